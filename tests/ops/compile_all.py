"""Compile every kernel of ours for every architecture that it is declared for; no GPU is needed.

Usage: python tests/ops/compile_all.py [--op NAME …] [--board NAME …] [--builds N] [--processes N] [--seconds N]

Walks the sample calls of every op's interfaces on one board of each architecture, and builds each implementation
that serves a call there, once for each build identity. Prints what failed, and what the compiler spilled.
The order goes round the implementations, so that a run cut short by --seconds has tried each of them.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tileops.catalogue import IN_TREE_OPS, find_op
from tileops.device import KNOWN_BOARDS
from tileops.kernels.kernel_base import available
from tileops.verdict import IN_TREE, Answer, Owner

BOARDS = ("a100", "h200", "b200", "rtx5090")
"""One board for each architecture that programs are compiled for: sm_80, sm_90a, sm_100a, sm_120a."""

ENTRY = re.compile(r"Compiling entry function '(\w+)'")
SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Job:
    """One kernel to build.

    Args:
        op: The op.
        interface: Its interface's name there.
        key: The implementation's key.
        board: The board that the call states.
        call: The call, with that board's facts.
    """

    op: str
    interface: str
    key: str
    board: str
    call: Any

    @property
    def kind(self) -> tuple[str, str, str]:
        """What the job is an example of."""
        return self.interface, self.key, self.board


@dataclass(frozen=True)
class Outcome:
    """What came of a job.

    Args:
        problem: Why it could not be built; empty where it was.
        spills: For each function that spills, its name and the bytes that it stores and loads.
    """

    problem: str = ""
    spills: tuple[str, ...] = ()


def jobs(ops: Sequence[str], boards: Sequence[str], builds: int | None = None) -> list[Job]:
    """Every build, or so many of each kind, once for each class and identity; the kinds in turn."""
    kinds: dict[tuple[str, str, str], dict[Any, Job]] = defaultdict(dict)
    for op, board in itertools.product(ops, boards):
        for job in _served(op, board):
            cls = find_op(op).kernel_types[job.key]
            kinds[job.kind].setdefault((cls, cls.entry_for(job.call)[0]), job)
    rounds = itertools.zip_longest(*(of_kind.values() for of_kind in kinds.values()))
    return [job for turn in itertools.islice(rounds, builds) for job in turn if job is not None]


def _served(op: str, board: str) -> Iterator[Job]:
    cls = find_op(op)
    for name, interface in cls.interfaces.items():
        kernels = {key: kernel for key, kernel in cls.kernel_types.items() if issubclass(kernel, interface)}
        for call in interface.sample_calls(torch.device("cuda", 0)):
            stated = call.normalised().on(board)
            for key, kernel in kernels.items():
                here = available(kernel, stated, Owner(IN_TREE))[0] is Answer.SERVES
                if here and kernel.refusal(stated) is None:
                    yield Job(op, name, key, board, stated)


class Said(logging.Handler):
    """Keeps what TileLang logs: with TILELANG_VERBOSE, the assembler's words are among it."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.text += record.getMessage() + "\n"


def built(job: Job) -> Outcome:
    """Build one kernel in this process."""
    import tilelang

    tilelang.logger.handlers[:] = [said := Said()]
    tilelang.logger.setLevel(logging.INFO)
    try:
        find_op(job.op).kernel_types[job.key].entry_for(job.call)[1]()
    except Exception as error:
        return Outcome(problem=f"{type(error).__name__}: {_last_line(str(error))}")
    return Outcome(spills=spills_in(said.text))


def _last_line(text: str) -> str:
    """The line that says what is wrong: the compiler's first error, else the last line."""
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    return next((line for line in lines if "error" in line.lower()), lines[-1])[:300]


def spills_in(text: str) -> tuple[str, ...]:
    """The functions that spill, from what the assembler says of each."""
    found: list[str] = []
    function = ""
    for line in text.splitlines():
        if entry := ENTRY.search(line):
            function = entry[1]
        if (spill := SPILL.search(line)) and spill[0] != "0 bytes spill stores, 0 bytes spill loads":
            found.append(f"{function}: {spill[1]} bytes stored, {spill[2]} loaded")
    return tuple(found)


def run(work: Sequence[Job], processes: int, seconds: float) -> dict[Job, Outcome]:
    """Build in a pool of processes, until done or `seconds` have passed."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    outcomes: dict[Job, Outcome] = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(work))
        for job, outcome in outcomes_of(work, processes, time.monotonic() + seconds):
            outcomes[job] = outcome
            failed = sum(bool(one.problem) for one in outcomes.values())
            progress.update(task, advance=1, description=f"{job.key} · {failed} failed")
            if outcome.problem:
                progress.console.print(f"{job.kind}: {outcome.problem}", markup=False)
    return outcomes


def outcomes_of(work: Sequence[Job], processes: int, deadline: float) -> Iterator[tuple[Job, Outcome]]:
    """What came of each job that began before the deadline, as it ends."""
    waiting, running = iter(work), dict[Future[Outcome], Job]()
    pool, is_broken = ProcessPoolExecutor(processes, get_context("spawn")), False
    while True:
        if is_broken and not running:
            pool, is_broken = ProcessPoolExecutor(processes, get_context("spawn")), False
        room = 0 if is_broken or time.monotonic() > deadline else processes - len(running)
        for job in itertools.islice(waiting, room):
            running[pool.submit(built, job)] = job
        if not running:
            break
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            is_broken = is_broken or isinstance(future.exception(), BrokenExecutor)
            yield running.pop(future), _outcome(future)
    pool.shutdown()


def _outcome(future: Future[Outcome]) -> Outcome:
    error = future.exception()
    return future.result() if error is None else Outcome(problem=f"{type(error).__name__}: {error}")


def tables(work: Sequence[Job], outcomes: dict[Job, Outcome]) -> Iterator[Table]:
    """How many of each kind were built; then what failed, and what spills."""
    wanted, done = Counter(job.kind for job in work), Counter(job.kind for job in outcomes)
    failed = Counter(job.kind for job, outcome in outcomes.items() if outcome.problem)
    spilling = Counter(job.kind for job, outcome in outcomes.items() if outcome.spills)
    counts = Table("interface", "implementation", "board", "builds", "tried", "failed", "with spills")
    for kind, total in wanted.items():
        counts.add_row(*kind, *map(str, (total, done[kind], failed[kind], spilling[kind])))
    yield counts
    for title, shown in (
        ("Failures", lambda outcome: outcome.problem),
        ("Spills", lambda outcome: "\n".join(outcome.spills)),
    ):
        rows = [(job, shown(outcome)) for job, outcome in outcomes.items() if shown(outcome)]
        table = Table("implementation", "board", "call", title[:-1].lower(), title=title)
        for job, text in rows:
            table.add_row(f"{job.interface}: {job.key}", job.board, str(job.call), text)
        if rows:
            yield table


def main(arguments: Sequence[str] | None = None) -> None:
    """Build, print, and exit with 1 where something failed or was not tried."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--op", action="append", choices=IN_TREE_OPS, help="only this op; may be repeated")
    parser.add_argument("--board", action="append", choices=KNOWN_BOARDS, help="only this board; may be repeated")
    parser.add_argument("--builds", type=int, help="at most so many of each implementation on each board")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no build after this time")
    options = parser.parse_args(arguments)
    work = jobs(options.op or tuple(IN_TREE_OPS), options.board or BOARDS, options.builds)
    with tempfile.TemporaryDirectory() as cache:  # what is found in a cache is not compiled
        os.environ.update(TILELANG_CACHE_DIR=cache, TILELANG_VERBOSE="1", TILELANG_PRINT_ON_COMPILATION="0")
        outcomes = run(work, options.processes, options.seconds)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in tables(work, outcomes):
        console.print(table, markup=False)
    failures = sum(bool(outcome.problem) for outcome in outcomes.values())
    console.print(f"{len(outcomes)} of {len(work)} builds tried, {failures} failed")
    sys.exit(1 if failures or len(outcomes) < len(work) else 0)


if __name__ == "__main__":
    main()
