"""The rules about loading: found, whole, quiet, in any order, and cheap."""

from __future__ import annotations

from typing import Final

from tileops.testing.broken_rule import NotTried, RuleBroken
from tileops.testing.fresh_process import Report, report_of
from tileops.verdict import IN_TREE

LOADS: Final = "it loads in a fresh process, twice, with warnings as errors, in any order relative to others"
CHEAP: Final = "loading imports no compiler and starts none"
NO_TRACE: Final = "loading changes no global state"


def check_loads(backend: str, order: str) -> None:
    """In a fresh process the backend loads whole, and a second load changes nothing."""
    report = _report(backend, order)
    if report.state != "loaded":
        raise RuleBroken(LOADS, backend, _failure(report, order), "what the last line of the traceback names")
    if report.registered != report.registered_again:
        found = f"the second load made {_listed(report.registered)} into {_listed(report.registered_again)}"
        raise RuleBroken(LOADS, backend, found, "register the same things whenever it is asked")
    alone = _report(backend, "alone").registered
    if report.registered != alone:
        found = f"{order}, it registers {_listed(report.registered)}; alone {_listed(alone)}"
        raise RuleBroken(LOADS, backend, found, "register whatever other backends are there, from modules of its own")


def _report(backend: str, order: str) -> Report:
    if backend == IN_TREE:
        raise NotTried("in-tree kernels are part of the library: nothing is loaded")
    report = report_of(backend, order)
    if report.state == "":
        known = ", ".join(report.installed) or "none"
        found = f"no installed backend is called {backend!r}; installed: {known}"
        change = (
            "install it (pip install -e .), and name it as its distribution without 'tileops-backend-'; its entry "
            "point is in the group 'tileops.backends'"
        )
        raise RuleBroken(LOADS, backend, found, change)
    return report


def _failure(report: Report, order: str) -> str:
    where = f"{order}, with warnings as errors, it is {report.state}: {report.reason}"
    return f"{where}\n    {report.traceback.strip()}".replace("\n", "\n    ") if report.traceback else where


def _listed(lines: tuple[str, ...]) -> str:
    return f"[{', '.join(lines)}]"


def check_cheap(backend: str) -> None:
    """Loading imports no compiler: who builds no kernel does not wait for one."""
    compilers = _report(backend, "alone").compilers
    if compilers:
        found = f"loading it brings in {', '.join(compilers)}"
        raise RuleBroken(CHEAP, backend, found, "import compilers where a kernel is built, in its factory or __init__")


def check_no_trace_of_loading(backend: str) -> None:
    """Loading leaves the global state of the process as it was."""
    moved = _report(backend, "alone").moved
    if moved:
        raise RuleBroken(NO_TRACE, backend, f"loading it changed {moved}", "do it where it is needed, and put it back")
