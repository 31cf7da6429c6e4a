"""How long the first calls with many row counts take, compiling included: ours, and peers.

Usage: python tests/benchmarks/row_counts.py [--counts N] [--seconds N] [--peer NAME=PATH …] [--json FILE] [--device cpu]

Each arm is a process of its own that begins with an empty cache of compiled kernels. It is stopped after so many
seconds; a ratio then compares what it did until then with all of ours, and is at least what it says.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers import OURS, Peer, PeerError, parser_of
from rich.console import Console
from rich.table import Table

OPS = ("layer_norm", "rms_norm")


@dataclass
class Taken:
    """What one arm did.

    Args:
        op: The op.
        arm: The arm.
        counts: Row counts that it was called with.
        seconds: How long that took.
        problem: Why it was called with no more.
    """

    op: str
    arm: str
    counts: int = 0
    seconds: float = 0.0
    problem: str = ""


def taken(op: str, arm: str, folder: str | None, options: argparse.Namespace) -> Taken:
    """Call an op with one row count after the other, in a new process with an empty cache."""
    worker = [sys.executable, str(Path(__file__).with_name("host_worker.py")), options.device, options.dtype]
    found = Taken(op, arm)
    with tempfile.TemporaryDirectory() as cache:
        variables = dict.fromkeys(("TILELANG_CACHE_DIR", "TRITON_CACHE_DIR"), cache)
        peer = Peer(worker if folder is None else [*worker, folder], folder, variables)
        try:
            peer.answer(op=op, arm="torch", rows=1, n=options.n, calls=0)  # imports torch, which is nobody's
            call_in_turn(peer, found, options)
        except PeerError as error:
            found.problem = str(error)
        finally:
            peer.close()
    return found


def call_in_turn(peer: Peer, found: Taken, options: argparse.Namespace) -> None:
    """Call with 1, 2, 3 … rows until done, or until the time is over."""
    begin = time.perf_counter()
    for rows in range(1, options.counts + 1):
        if found.seconds > options.seconds:
            found.problem = f"stopped after {options.seconds:.0f} s"
            return
        peer.answer(op=found.op, arm=found.arm, rows=rows, n=options.n, calls=0)
        found.counts, found.seconds = rows, time.perf_counter() - begin


def table_of(results: Sequence[Taken], options: argparse.Namespace) -> Table:
    """The results as a table."""
    table = Table("op", "arm", "row counts", "seconds", "÷ ours", "", title=f"First calls, n = {options.n}")
    ours = {one.op: one.seconds for one in results if one.arm == OURS}
    for one in results:
        bound = "≥ " if one.problem else ""
        ratio = f"{bound}{one.seconds / ours[one.op]:.1f}" if ours.get(one.op) and one.counts else "–"
        table.add_row(one.op, one.arm, f"{one.counts} of {options.counts}", f"{one.seconds:.2f}", ratio, one.problem)
    return table


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__.partition("\n")[0], (OURS,))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--counts", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60, help="of each arm and op")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON."""
    options = options_of(arguments)
    arms: dict[str, str | None] = {OURS: None, **dict(options.peer)}
    asked = [(op, arm, folder) for op in OPS for arm, folder in arms.items() if arm not in options.without]
    results = [taken(*one, options) for one in asked]
    Console().print(table_of(results, options))
    if options.json is not None:
        report: dict[str, Any] = {"n": options.n, "dtype": options.dtype, "results": [asdict(one) for one in results]}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
