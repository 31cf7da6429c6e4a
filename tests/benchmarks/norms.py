"""Device time of the norms: ours, torch, torch.compile and peers, beside a copy of the bytes that each has to move.

Usage: python tests/benchmarks/norms.py [--json FILE] [--peer NAME=PATH …] [--op NAME …] [--case TEXT …]
       [--rounds N] [--seconds N] [--prepare] [--device cpu]

All are timed in one run, rounds of all processes interleaved, and compared by medians. docs/benchmarks/norms.md
says how it measures, and shows what it found.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from norm_cases import PASSES, Case, cases
from norm_results import FLOOR, Record, by_op, is_met, lead, median, over, shown, verdicts
from peers import COMPILE, OURS, TITLES, TORCH, Peer, PeerError, parser_of
from rich.console import Console
from rich.table import Table
from timing import order_of, quartiles

TOGETHER = (FLOOR, OURS, TORCH)
"""Timed in one process."""
OWN = (*TOGETHER, COMPILE)
NOT_MEASURED = "not measured"
LEAST_ROUNDS, CASE_SECONDS = 3, 0.5
"""A case has three rounds, and more while it has taken less than this."""


@dataclass
class Timing:
    """What came of one arm in one case.

    Args:
        seconds: The device time of one call, in each round.
        problem: Why there is none.
        kernel: Which implementation of ours ran.
    """

    seconds: list[float] = field(default_factory=list)
    problem: str = ""
    kernel: str = ""

    def report(self) -> dict[str, Any]:
        """The times as JSON holds them."""
        if self.problem or not self.seconds:
            return {"problem": self.problem or NOT_MEASURED}
        return {"microseconds": [round(1e6 * value, 3) for value in quartiles(self.seconds)]}


class Run:
    """The processes, and what each of their arms did in each case.

    Args:
        chosen: The cases.
        arms: The processes of each arm; of several, each takes its share of the cases.
    """

    def __init__(self, chosen: Sequence[Case], arms: dict[str, list[Peer]]) -> None:
        self.on: dict[str, str] = {}
        self.timings = {case: {arm: Timing() for arm in arms} for case in chosen}
        self._arms = arms
        self._share = {case: at for at, case in enumerate(chosen)}

    def _peer(self, arm: str, case: Case) -> Peer:
        peers = self._arms[arm]
        return peers[self._share[case] % len(peers)]

    def _ask(self, do: str, arm: str, case: Case) -> dict[str, Any]:
        """What the arm answers; nothing where it cannot, and its timing then says why."""
        timing = self.timings[case][arm]
        if timing.problem:
            return {}
        try:
            beside = {} if do == "replay" else {"case": dataclasses.asdict(case)}
            return self._peer(arm, case).answer(do=do, arm=arm, **beside)
        except PeerError as error:
            timing.problem = str(error)
            return {}

    def _at_once(self, ask: Callable[[str, Case], None], chosen: Iterable[Case]) -> None:
        """Ask every process at once, each for its arms of each case in turn."""
        turns: dict[Peer, list[tuple[str, Case]]] = {}
        for case in chosen:
            for arm in self._arms:
                turns.setdefault(self._peer(arm, case), []).append((arm, case))
        with ThreadPoolExecutor(len(turns)) as pool:
            list(pool.map(lambda asked: [ask(*one) for one in asked], turns.values()))

    def prepare(self) -> None:
        """Compile everything and compare its results, all processes at once."""
        self._at_once(self._prepare, self.timings)

    def _prepare(self, arm: str, case: Case) -> None:
        if arm == OURS and self._share[case] == 0:
            self._build(self._peer(arm, case))
        answer = self._ask("prepare", arm, case)
        self.timings[case][arm].kernel = answer.get("kernel", "")
        self.on.setdefault(arm, answer.get("on", ""))

    def _build(self, peer: Peer) -> None:
        """Compile all kernels of ours, several at a time; what fails fails again when its case is prepared."""
        with contextlib.suppress(PeerError):
            peer.answer(do="build", cases=[dataclasses.asdict(case) for case in self.timings])

    def measure(self, case: Case, rounds: int) -> None:
        """Capture the case in every process, then replay in turns, at most `rounds` times."""
        self._at_once(self._capture, [case])
        begun = time.monotonic()
        for turn in range(rounds):
            if turn >= LEAST_ROUNDS and time.monotonic() - begun > CASE_SECONDS:
                break
            for arm in order_of(list(self._arms), turn):
                answer = self._ask("replay", arm, case)
                self.timings[case][arm].seconds += [answer["seconds"]] if answer else []
        self._at_once(self._drop, [case])

    def _capture(self, arm: str, case: Case) -> None:
        self._ask("capture", arm, case)

    def _drop(self, arm: str, case: Case) -> None:
        with contextlib.suppress(PeerError):  # it said why when it was asked for a time
            self._peer(arm, case).answer(do="drop")

    def record(self, case: Case) -> Record:
        """The case as JSON holds it."""
        timings = self.timings[case]
        kernel = timings[OURS].kernel if OURS in timings else ""
        times = {arm: timing.report() for arm, timing in timings.items()}
        return {**dataclasses.asdict(case), "name": case.name, "moved": case.moved, "kernel": kernel, "times": times}

    def close(self) -> None:
        """End all processes."""
        for peer in {peer for peers in self._arms.values() for peer in peers}:
            peer.close()


def table_of(op: str, records: Sequence[Record]) -> Table:
    """The results of one op as a table."""
    caption = f"geometric mean of the best rival's time ÷ ours: {shown(lead(records))}"
    table = Table(title=f"{op}, µs of one call on the device, medians", caption=caption)
    others = [arm for arm in records[0]["times"] if arm not in (FLOOR, OURS)]
    headings = ("", "", "kernel", "MB", FLOOR, OURS, "quartiles", "÷ copy", *(TITLES.get(arm, arm) for arm in others))
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("", "kernel") else "right", no_wrap=True)
    table.add_column("bar")
    for record in records:
        times = [shown_time(median(record, arm)) for arm in (FLOOR, OURS)]
        spread = record["times"].get(OURS, {}).get("microseconds", ())
        quarters = "–".join(f"{spread[at]:.2f}" for at in (0, 2)) if spread else ""
        beside = (shown_time(median(record, arm)) for arm in others)
        row = (record["name"], record["dtype"], record["kernel"], f"{record['moved'] / 1e6:.1f}", *times, quarters)
        table.add_row(*row, shown(over(record, OURS, FLOOR)), *beside, "; ".join(judged(record)))
    return table


def shown_time(microseconds: float | None) -> str:
    """A time as tables show it."""
    return "–" if microseconds is None else f"{microseconds:.2f}"


def judged(record: Record) -> list[str]:
    """Each part of the bar, and what came of it."""
    state = {True: "met", False: "MISSED", None: NOT_MEASURED}
    return [f"{said}: {state[met]}" for said, met in verdicts(record)]


def problems_of(records: Iterable[Record]) -> list[str]:
    """Why arms have no time: a line for each op, arm and reason, with the cases."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        for arm, times in record["times"].items():
            problem = times.get("problem", NOT_MEASURED)
            if problem != NOT_MEASURED:
                found.setdefault((record["op"], TITLES.get(arm, arm), problem), []).append(record["name"])
    return [f"{': '.join(key)} ({', '.join(names)})" for key, names in found.items()]


def summary_of(records: Sequence[Record]) -> Table:
    """For each op, how many bars are met, and the geometric mean of the lead."""
    table = Table("op", "cases", "bars met", "missed", "not measured", "best rival ÷ ours", title="Bars")
    for op, of_op in by_op(records).items():
        states = [is_met(record) for record in of_op]
        counts = (str(states.count(state)) for state in (True, False, None))
        table.add_row(op, str(len(of_op)), *counts, shown(lead(of_op)))
    return table


def report_of(run: Run, records: Sequence[Record], options: argparse.Namespace) -> dict[str, Any]:
    """The results as JSON holds them."""
    return {"python": platform.python_version(), "rounds": options.rounds, "on": run.on, "cases": records}


def text_of(report: dict[str, Any]) -> str:
    """The report as JSON, with a line for each case."""
    head = json.dumps({name: value for name, value in report.items() if name != "cases"}, ensure_ascii=False)
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in report["cases"])
    return f'{head[:-1]}, "cases": [\n{lines}\n]}}\n'


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__.partition("\n")[0], OWN)
    parser.add_argument("--op", action="append", choices=PASSES, help="only this op; may be repeated")
    parser.add_argument("--case", action="append", metavar="TEXT", help="only cases whose name has it; may be repeated")
    parser.add_argument("--rounds", type=int, default=10, help="of each case, at most")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after this time")
    parser.add_argument("--prepare", action="store_true", help="compile and compare, and time nothing")
    parser.add_argument(
        "--spread", type=int, default=4, help="processes of each arm but ours, which share out the cases"
    )
    return parser.parse_args(arguments)


def chosen_by(options: argparse.Namespace) -> list[Case]:
    """The cases that the command line asks for."""
    texts, ops = options.case or ("",), options.op or tuple(PASSES)
    return [case for case in cases() if case.op in ops and any(text in case.name for text in texts)]


def started(options: argparse.Namespace) -> dict[str, list[Peer]]:
    """The processes by arm."""
    worker = [sys.executable, str(Path(__file__).with_name("device_worker.py")), options.device]
    names = [name for name in OWN if name not in options.without]
    shared = [Peer(worker)]
    arms = {name: shared for name in names if name in TOGETHER}
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // options.spread))}
    apart = {COMPILE: None} if COMPILE in names else {}
    for name, folder in {**apart, **dict(options.peer)}.items():
        command = worker if folder is None else [*worker, folder]
        arms[name] = [Peer(command, folder, threads) for _ in range(options.spread)]
    return arms


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare everything, then measure; print a table and write JSON after each op."""
    options, begun = options_of(arguments), time.monotonic()
    chosen = chosen_by(options)
    if not chosen:
        sys.exit(
            f"no case is called {' or '.join(options.case)}; there are: {', '.join(dict.fromkeys(case.name for case in cases()))}"
        )
    console = Console(width=None if sys.stdout.isatty() else 240)
    run = Run(chosen, started(options))
    try:
        run.prepare()
        console.print(f"prepared {len(chosen)} cases in {time.monotonic() - begun:.0f} s")
        records = [] if options.prepare else measured(run, options, console, begun)
    finally:
        run.close()
    if options.prepare:
        records = [run.record(case) for case in chosen]
    else:
        console.print(summary_of(records))
    console.print("\n".join(problems_of(records)), markup=False)


def measured(run: Run, options: argparse.Namespace, console: Console, begun: float) -> list[Record]:
    """Measure case by case, while there is time."""
    records: list[Record] = []
    for op, of_op in by_op_of(run.timings).items():
        for case in of_op:
            if time.monotonic() - begun < options.seconds:
                run.measure(case, options.rounds)
            records.append(run.record(case))
        console.print(table_of(op, records[-len(of_op) :]), f"{time.monotonic() - begun:.0f} s")
        if options.json is not None:  # after each op: what was measured outlives an interruption
            options.json.write_text(text_of(report_of(run, records, options)), encoding="utf-8")
    return records


def by_op_of(chosen: Iterable[Case]) -> dict[str, list[Case]]:
    """The cases of each op, in order."""
    found: dict[str, list[Case]] = {}
    for case in chosen:
        found.setdefault(case.op, []).append(case)
    return found


if __name__ == "__main__":
    main()
