"""Which modules a thread is importing, and whether another thread waits for one of them.

Python lets one thread at a time run a module's body. Whoever waits for a thread from within such a body must know
that the other may be waiting for that very module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType


def modules_being_imported() -> frozenset[str]:
    """The modules whose bodies the current thread is running."""
    names = {str(frame.f_globals.get("__name__")) for frame in _stack(sys._getframe()) if _is_body(frame)}
    return frozenset(names - {"__main__"})


def is_importing_any(thread: int, modules: frozenset[str]) -> bool:
    """Whether `thread` is asking Python's import system for one of `modules`, which another thread is importing."""
    return any(
        "importlib._bootstrap" in frame.f_code.co_filename and frame.f_locals.get("name") in modules
        for frame in _stack(sys._current_frames().get(thread))
    )


def _is_body(frame: FrameType) -> bool:
    return frame.f_code.co_name == "<module>"


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
