"""Load backends in a process of its own, and say what that did: `python -m tileops.testing.fresh_process …`.

The process imports torch and tileops first, so that nobody is blamed for what those do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any, Final, cast

ORDERS: Final = ("alone", "imported_first", "others_first")
"""No other backend is enabled; its modules are imported before backends are loaded; all others' modules are."""

COMPILERS: Final = ("tilelang", "triton", "tvm", "cutlass", "torch.utils.cpp_extension", "torch._inductor", "numba")
"""Modules that compile, or that take seconds because they can."""

COMPILER_PROGRAMS: Final = ("nvcc", "hipcc", "gcc", "g++", "cc", "c++", "clang", "clang++", "cl", "ninja", "cmake")

_MARK: Final = "tileops.testing.fresh_process: "


@dataclasses.dataclass(frozen=True)
class Report:
    """What loading did in a fresh process.

    Args:
        state: The backend's state; empty where no such backend is installed.
        reason: Why it is not loaded.
        traceback: The traceback of its failure.
        registered: What it registered, as its record shows it.
        registered_again: The same after a second load.
        installed: The names of all installed backends.
        compilers: Modules of compilers that were imported, and compilers that were started.
        moved: What changed of the global state.
    """

    state: str = ""
    reason: str = ""
    traceback: str = ""
    registered: tuple[str, ...] = ()
    registered_again: tuple[str, ...] = ()
    installed: tuple[str, ...] = ()
    compilers: tuple[str, ...] = ()
    moved: str = ""


@functools.lru_cache(maxsize=64)
def report_of(backend: str, order: str) -> Report:
    """What a fresh process reports that loads `backend` in one of the `ORDERS`, with warnings as errors."""
    from tileops.backend import POLICY_VARIABLE

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop(POLICY_VARIABLE, None)
    if order == "alone":
        environment[POLICY_VARIABLE] = backend
    command = [sys.executable, "-m", __name__, backend, order]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    line = next((line for line in done.stdout.splitlines() if line.startswith(_MARK)), None)
    if line is None:
        said = (done.stderr or done.stdout).strip()
        return Report("ended", f"the process ended with exit status {done.returncode}", said)
    values: dict[str, Any] = json.loads(line.removeprefix(_MARK))
    lists = {name: tuple(cast("list[str]", value)) for name, value in values.items() if isinstance(value, list)}
    return Report(**{**values, **cast("dict[str, Any]", lists)})


def main(backend: str, order: str) -> None:
    """Load in this process, and print the report as a line of JSON."""
    importlib.import_module("tileops.ops.op_base")  # and torch: before anybody is blamed for what they import
    from tileops.testing.global_state import changes, read_state

    known, started = set(sys.modules), list[str]()
    sys.addaudithook(lambda event, arguments: _note_program(started, event, arguments))
    warnings.simplefilter("error")
    before = read_state()
    report = _load(backend, order)
    moved = changes(before, read_state())
    imported = [name for name in COMPILERS if name in sys.modules and name not in known]
    report = dataclasses.replace(report, compilers=(*imported, *dict.fromkeys(started)), moved=moved)
    print(f"\n{_MARK}{json.dumps(dataclasses.asdict(report))}")  # noqa: T201 - the answer


def _note_program(started: list[str], event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system"):
        words = os.fsdecode(arguments[0]).split() if arguments[0] is not None else [""]
        name = PurePath(words[0]).stem if words else ""
        if name in COMPILER_PROGRAMS:
            started.append(name)


def _load(backend: str, order: str) -> Report:
    from tileops.backend.discovery import installed_backends

    installed = installed_backends()
    _import(
        module
        for one in installed
        if order != "alone" and (one.name == backend) == (order == "imported_first")
        for module in one.modules
    )
    record, again = _record_of(backend), _record_of(backend)
    names = tuple(one.name for one in installed)
    if record is None or again is None:
        return Report(installed=names)
    return Report(record.state.value, record.reason, record.traceback, record.registered, again.registered, names)


def _import(modules: Iterable[str]) -> None:
    """Import modules of backends; one that cannot be imported has its record."""
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)


def _record_of(backend: str) -> Any:
    """The backend's record; a warning about another backend must not hide it."""
    from tileops.backend import BackendLoadWarning, status

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BackendLoadWarning)
        return next((record for record in status() if record.name == backend), None)


if __name__ == "__main__":
    main(*sys.argv[1:])
