"""Host time of one eager call: ours, the bare launch, torch, torch.compile, and peers, each peer in its own process.

Usage: python tests/benchmarks/host_time.py [--device cpu] [--json FILE] [--peer NAME=PATH …] [--without NAME …]

Rounds of all processes are interleaved in one run, and compared by their medians. docs/benchmarks/README.md says
how to read the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers import COMPILE, OURS, TITLES, TORCH, Peer, PeerError, parser_of
from rich.console import Console
from rich.table import Table
from timing import order_of, quartiles

FLOOR = "floor"
TOGETHER = (FLOOR, OURS, TORCH)
"""Timed in one process: two processes differ by some per cent in the same work, and these are compared closely."""
OWN = (*TOGETHER, COMPILE)
SHOWN = {FLOOR: "empty_like + executable", **TITLES}
OPS = ("layer_norm", "rms_norm")
MOST_OVER_FLOOR = 1.2


@dataclass
class Result:
    """One arm's time of one op.

    Args:
        op: The op.
        arm: The arm.
        seconds: The host time of one call, in each round.
        problem: Why there is none.
        on: The torch and the device of its process.
    """

    op: str
    arm: str
    seconds: list[float] = field(default_factory=list)
    problem: str = ""
    on: str = ""

    @property
    def median(self) -> float | None:
        """The median over the rounds."""
        return quartiles(self.seconds)[1] if self.seconds and not self.problem else None


def measured(peers: Mapping[str, Peer], op: str, options: argparse.Namespace) -> dict[str, Result]:
    """The times of one op, rounds of all peers interleaved. A peer that fails once is asked no more."""
    results = {name: Result(op, name) for name in peers}
    request = {"op": op, "rows": options.rows, "n": options.n, "calls": options.calls}
    with ThreadPoolExecutor(len(peers)) as pool:  # what a first call imports and builds, all processes at once
        list(pool.map(lambda names: [asked(peers[name], results[name], request) for name in names], processes(peers)))
    for turn in range(options.rounds):
        for name in order_of(list(peers), turn):
            taken = asked(peers[name], results[name], request)
            results[name].seconds += [] if taken is None else [taken / options.calls]
    return results


def processes(peers: Mapping[str, Peer]) -> list[list[str]]:
    """The names by process."""
    names: dict[Peer, list[str]] = {}
    for name, peer in peers.items():
        names.setdefault(peer, []).append(name)
    return list(names.values())


def asked(peer: Peer, result: Result, request: Mapping[str, Any]) -> float | None:
    """The seconds a peer answers with; None where it cannot, and the result then says why."""
    if result.problem:
        return None
    try:
        answer = peer.answer(arm=result.arm, **request)
    except PeerError as error:
        result.problem = str(error)
        return None
    result.on = answer["on"]
    return answer["seconds"]


def table_of(op: str, results: Mapping[str, Result], options: argparse.Namespace) -> Table:
    """The results of one op as a table."""
    title = f"{op} {options.rows}×{options.n} {options.dtype}, {options.device}: host time of one call"
    table = Table(title=title, caption=verdict(results))
    for heading in ("", "µs", "quartiles", "÷ floor", "÷ torch"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, result in results.items():
        median = result.median
        if median is None:
            table.add_row(SHOWN.get(name, name), "–", f"[dim]{result.problem}[/]", "–", "–")
            continue
        low, _, high = quartiles(result.seconds)
        ratios = (shown_ratio(over(results, name, base)) for base in (FLOOR, TORCH))
        table.add_row(SHOWN.get(name, name), f"{median * 1e6:.2f}", f"{low * 1e6:.2f}–{high * 1e6:.2f}", *ratios)
    return table


def over(results: Mapping[str, Result], name: str, base: str) -> float | None:
    """The ratio of two arms' medians; None where one of them has none."""
    times = [results[arm].median if arm in results else None for arm in (name, base)]
    return None if times[0] is None or times[1] is None else times[0] / times[1]


def shown_ratio(ratio: float | None) -> str:
    """A ratio as the table shows it."""
    return "–" if ratio is None else f"{ratio:.2f}"


def verdict(results: Mapping[str, Result]) -> str:
    """Whether the two budgets are met."""
    floor, eager = over(results, OURS, FLOOR), over(results, OURS, TORCH)
    return (
        f"budgets: {shown_ratio(floor)} ≤ {MOST_OVER_FLOOR} × floor: {_met(floor, MOST_OVER_FLOOR)}; "
        f"{shown_ratio(eager)} < 1 × torch: {_met(eager, 1.0)}"
    )


def _met(ratio: float | None, most: float) -> str:
    return "not measured" if ratio is None else "met" if ratio <= most else "missed"


def report_of(results: Sequence[Result], options: argparse.Namespace) -> dict[str, Any]:
    """The results as JSON holds them."""
    rows = [{**dataclasses.asdict(result), "median": result.median} for result in results]
    asked = {name: getattr(options, name) for name in ("device", "dtype", "rows", "n", "calls", "rounds")}
    return {"python": platform.python_version(), **asked, "results": rows}


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__.partition("\n")[0], OWN)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--calls", type=int, default=2000, help="calls of one round")
    parser.add_argument("--rounds", type=int, default=30)
    return parser.parse_args(arguments)


def started(options: argparse.Namespace) -> dict[str, Peer]:
    """The processes by arm; several arms of ours share one."""
    worker = [sys.executable, str(Path(__file__).with_name("host_worker.py")), options.device, options.dtype]
    shared = Peer(worker)
    peers = {name: shared if name in TOGETHER else Peer(worker) for name in OWN if name not in options.without}
    for name, folder in options.peer:
        peers[name] = Peer([*worker, folder], folder)
    return peers


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each op; print a table and write JSON after each."""
    options = options_of(arguments)
    peers = started(options)
    results: list[Result] = []
    try:
        for op in OPS:
            of_op = measured(peers, op, options)
            Console().print(table_of(op, of_op, options))
            results += of_op.values()
            if options.json is not None:  # after each op: what was measured outlives an interruption
                options.json.write_text(json.dumps(report_of(results, options), indent=2) + "\n", encoding="utf-8")
    finally:
        for peer in set(peers.values()):
            peer.close()


if __name__ == "__main__":
    main()
