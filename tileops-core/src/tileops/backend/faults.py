"""What is recorded of a backend that could not be loaded: why, and what to do."""

from __future__ import annotations

import json
import signal
import traceback
from pathlib import Path

from tileops.backend.discovery import Installed
from tileops.backend.policy import POLICY_VARIABLE


def is_the_programs(error: BaseException) -> bool:
    """Whether `error` is meant for the program and only passes through the backend.

    That is an interrupt, and whatever a signal handler raised.
    """
    if isinstance(error, (KeyboardInterrupt, GeneratorExit)):
        return True
    codes = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def reason_of(error: BaseException) -> str:
    """The error in one line, with the one that it began with."""
    first = error
    seen = {id(first)}
    while (earlier := _before(first)) is not None and id(earlier) not in seen:
        first = earlier
        seen.add(id(first))
    return _one_line(error) if first is error else f"{_one_line(error)} (it began with {_one_line(first)})"


def _before(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _one_line(error: BaseException) -> str:
    kind = type(error).__name__
    try:
        said = " ".join(str(error).split())
    except Exception:
        said = "it cannot say what it is"
    return f"{kind}: {said}" if said else kind


def remedy_of(error: BaseException, backend: Installed) -> str:
    """What to do about a backend that failed."""
    return f"{way_out(backend, _mend(error, backend))}; tileops.backend.status() has the traceback"


def way_out(backend: Installed, mend: str) -> str:
    """A remedy: the mend, or to go without the backend."""
    return f"{mend}, or leave it out with {POLICY_VARIABLE}=-{backend.name}"


def _mend(error: BaseException, backend: Installed) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        if not any(module == error.name or module.startswith(f"{error.name}.") for module in backend.modules):
            return f"install {error.name.partition('.')[0]}, which it imports"
        if _is_editable(backend):
            return "restart Python, which reads where editable installations are when it starts"
        return f"its module is gone and its metadata is stale: pip uninstall {backend.distribution}"
    return f"reinstall or uninstall {backend.distribution}"


def _is_editable(backend: Installed) -> bool:
    """Whether pip installed the distribution in place: then its modules are found through a file read at start-up."""
    try:
        origin = json.loads((Path(backend.path) / "direct_url.json").read_text())
        return bool(origin["dir_info"]["editable"])
    except Exception:
        return False
