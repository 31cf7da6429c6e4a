"""What a terminal shows while kernels are built and tuned."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import Final

SILENCE: Final = "TILEOPS_PROGRESS"
"""Set to 0, the environment variable that silences it."""

_CLEAR: Final = "\r\x1b[2K"

_within: ContextVar[bool] = ContextVar("tileops_progress", default=False)
"""Whether steps are shown: the line of a build within would break theirs."""

Step = Callable[[str], None]
"""Shows that the next step begins, and what it does."""


def _is_shown() -> bool:
    """Whether somebody sees it: standard error is a terminal, and nobody silenced it."""
    return os.environ.get(SILENCE) != "0" and sys.stderr is not None and sys.stderr.isatty() and not _within.get()


@contextlib.contextmanager
def showing_build(key: str) -> Generator[None]:
    """Show which kernel is being built, on standard error, where that is a terminal and nobody silenced it."""
    if not _is_shown():
        yield
        return
    with _line() as show:
        show(f"building the kernel {key} …")
        yield


@contextlib.contextmanager
def showing_steps(what: str, count: int) -> Generator[Step]:
    """Show how many of `count` steps are done, likewise: as a bar where rich is installed, else as a line."""
    if not _is_shown():
        yield lambda _doing: None
        return
    token = _within.set(True)
    try:
        with _bar(what, count) if importlib.util.find_spec("rich") else _counted_line(what, count) as step:
            yield step
    finally:
        _within.reset(token)


@contextlib.contextmanager
def _line() -> Generator[Callable[[str], None]]:
    """A line of the terminal, which is left clean."""

    def show(text: str) -> None:
        sys.stderr.write(f"{_CLEAR}tileops: {text}")
        sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()


@contextlib.contextmanager
def _counted_line(what: str, count: int) -> Generator[Step]:
    with _line() as show:
        done = iter(range(count))
        yield lambda doing: show(f"{what}: {next(done, count)} of {count}, {doing} …")


@contextlib.contextmanager
def _bar(what: str, count: int) -> Generator[Step]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn(f"tileops: {what}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description} …"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as progress:
        task, done = progress.add_task("", total=count), iter(range(count))
        yield lambda doing: progress.update(task, completed=next(done, count), description=doing)
