"""The line that a terminal shows while a kernel is built."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator
from typing import Final

SILENCE: Final = "TILEOPS_PROGRESS"
"""Set to 0, the environment variable that silences the line."""

_CLEAR: Final = "\r\x1b[2K"


@contextlib.contextmanager
def showing_build(key: str) -> Generator[None]:
    """Show which kernel is being built, on standard error, where that is a terminal and nobody silenced it."""
    if os.environ.get(SILENCE) == "0" or sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    sys.stderr.write(f"{_CLEAR}tileops: building the kernel {key} …")
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()
