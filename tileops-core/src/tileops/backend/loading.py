"""Find, import and commit the installed backends.

Backends are loaded once, at the first selection miss, the first question about backends, or by `load()`; never
at `import tileops`. A backend is a distribution with entry points in the group `tileops.backends`. It loads
whole or not at all, and one that cannot costs nobody else anything: it is recorded, warned about once, and
named in later errors.
"""

from __future__ import annotations

import dataclasses
import os
import traceback
from collections.abc import Iterable
from typing import Final

import torch

from tileops.backend.compatibility import incompatibility
from tileops.backend.discovery import Installed
from tileops.backend.drafts import Draft
from tileops.backend.entry_points import run_entry_points
from tileops.backend.faults import is_the_programs, reason_of, remedy_of, way_out
from tileops.backend.policy import POLICY_VARIABLE, Policy
from tileops.backend.process import active, process
from tileops.backend.recording import Recorder, check_unit
from tileops.backend.records import BackendRecord, State
from tileops.backend.registration import commit, registry, update_registry
from tileops.backend.side_effects import observing
from tileops.backend.units import Unit
from tileops.device import warn_user
from tileops.errors import BackendLoadError, BackendLoadWarning, Declined, RegistrationError

STRICT_VARIABLE: Final = "TILEOPS_BACKENDS_STRICT"


def load(
    *, only: Iterable[str] | None = None, exclude: Iterable[str] | None = None, strict: bool | None = None
) -> None:
    """Load the installed backends, once in a process. Any thread may call it; the later ones wait.

    No lock of ours is held while a backend's modules are imported or its hooks run. A backend that asks for
    kernels while it is being loaded sees what is committed so far.

    Args:
        only: The backends that may be loaded, in place of what `TILEOPS_BACKENDS` says; `()` for none. A name is
            the backend's, its distribution's or an entry point's.
        exclude: The backends that may not, in place of what `TILEOPS_BACKENDS` says; `()` for all to be loaded.
        strict: Whether what is otherwise warned about, or noted as unknown here, is an error. None: as
            `TILEOPS_BACKENDS_STRICT` says.

    Raises:
        RegistrationError: `only` and `exclude` are both given; or backends are loaded already, and others than
            those are asked for.
        BackendLoadError: With `strict`, something is wrong. Everything is recorded; the next `load` tries nothing
            again.
    """
    if registry().loaded and only is None and exclude is None and strict is None:
        return
    asked = Policy.from_names(only, exclude)
    reports = _load_as_leader(asked, _is_strict(strict)) if process.begin_load() else ()
    _warn_of(reports)
    if asked is not None:
        _refuse_another(asked)
    if strict and registry().loaded:
        _raise_problems()


def _is_strict(strict: bool | None) -> bool:
    said = os.environ.get(STRICT_VARIABLE, "").strip().lower()
    return strict if strict is not None else said not in ("", "0", "false", "no", "off")


def _load_as_leader(asked: Policy | None, strict: bool) -> tuple[str, ...]:
    """Load everything that may be; return the warnings to give once all are recorded."""
    try:
        if process.policy is None:
            process.policy = asked or Policy.from_text(os.environ.get(POLICY_VARIABLE))
        failures = _load_all(process.policy)
        if strict:
            _raise_problems(failures)
        update_registry(lambda old: dataclasses.replace(old, loaded=True))
        return _complaints()
    finally:
        process.end_load()


def _load_all(policy: Policy) -> list[BaseException]:
    """Load each backend that may be and was not before; return what failed."""
    failures: list[BaseException] = []
    taken: dict[str, Installed] = {}
    for backend in process.installed():
        state = _state_of(backend)
        if state is None:  # an interrupt may have ended an earlier load
            skipped = _skipped(backend, policy, taken)
            failure = _load_one(backend, taken) if skipped is None else _record(backend, skipped)
            failures += [] if failure is None else [failure]
            state = _state_of(backend)
        if state in (State.LOADED, State.EMPTY, State.FAILED, State.DECLINED):
            taken = {**dict.fromkeys(backend.values, backend), **taken}
    return failures


def _state_of(backend: Installed) -> State | None:
    """What became of one copy of a backend; None of one that is not loaded yet."""
    here = (record for record in registry().records if (record.name, record.path) == (backend.name, backend.path))
    return next((record.state for record in here), None)


def _skipped(backend: Installed, policy: Policy, taken: dict[str, Installed]) -> BackendRecord | None:
    """The record of a backend that is not imported, for what its metadata or the policy says; None of any other."""
    if backend.shadowed_by:
        return backend.record(State.SHADOWED, reason=f"{backend.shadowed_by} is used in its place")
    denial, unmet = policy.denial(backend), incompatibility(backend)
    if denial is not None:
        return backend.record(State.DISABLED, reason=denial)
    if unmet is not None:
        remedy = way_out(backend, f"install a release of {backend.distribution} that runs here")
        return backend.record(State.INCOMPATIBLE, reason=unmet, remedy=remedy)
    if backend.values and all(value in taken for value in backend.values):
        other = taken[backend.values[0]]
        return backend.record(
            State.SHADOWED, reason=f"{other.shipped_as} has the entry point {backend.values[0]!r} too"
        )
    return None


def _load_one(backend: Installed, taken: dict[str, Installed]) -> BaseException | None:
    """Load one backend whole or not at all, and record what became of it; return why it failed."""
    try:
        if backend.problem:
            raise RegistrationError(backend.problem)  # noqa: TRY301
        with observing() as changes:
            _collect(backend, taken)
        _settle(backend, tuple(changes))
    except Declined as declined:
        _record(backend, backend.record(State.DECLINED, reason=str(declined) or "it gives no reason"))
    except BaseException as error:  # sys.exit at import or a native panic must not end the host
        if is_the_programs(error):
            raise
        told = {"reason": reason_of(error), "remedy": remedy_of(error, backend), "traceback": traceback.format_exc()}
        _record(backend, backend.record(State.FAILED, **told))
        return error
    return None


def _record(backend: Installed, record: BackendRecord) -> None:
    """Record a backend that is not loaded; what it had registered goes."""
    with process.lock:
        update_registry(lambda old: old.with_record(record))
        if not backend.shadowed_by:
            process.pending.pop(backend.name, None)


def _collect(backend: Installed, taken: dict[str, Installed]) -> None:
    """Import the backend and run its hooks, in no mode of torch that the first call may have been made in."""
    _forget_failed_imports(backend)
    token = active.set(backend)
    try:
        with torch.inference_mode(mode=False):
            points = (point for point in backend.entry_points if point.value not in taken)
            run_entry_points(points, Recorder(backend.owner))
    finally:
        active.reset(token)
    _forget_failed_imports(backend)


def _forget_failed_imports(backend: Installed) -> None:
    process.redraft(backend.owner, Draft.without_failed_imports)


def _settle(backend: Installed, observed: tuple[str, ...]) -> None:
    """Check what the backend registered as a whole, and commit it; what comes later is a transaction of its own."""
    settled = False
    while not settled:
        draft = process.pending[backend.name]
        unit = dataclasses.replace(draft.unit, observed=observed)
        check_unit(unit)
        with process.lock:  # unless another thread has imported more of it meanwhile
            settled = process.pending[backend.name] is draft
            if settled:
                del process.pending[backend.name]
                _commit(backend, unit)


def _commit(backend: Installed, unit: Unit) -> None:
    if unit.is_empty and not unit.notes:
        remedy = way_out(backend, f"reinstall or uninstall {backend.distribution}")
        empty = backend.record(State.EMPTY, reason="it loaded and registered nothing", remedy=remedy)
        update_registry(lambda old: old.with_record(empty))
    else:
        commit(unit, after=None, record=backend.record(State.LOADED))


# ---------------------------------------------------------------------------------------- what came of the load


def _complaints() -> tuple[str, ...]:
    """A warning for each backend that is at fault, and for each name of the policy that nobody has."""
    unknown = () if process.policy is None else process.policy.unknown_names(process.installed())
    return (*unknown, *(record.complaint() for record in registry().records if record.state.is_fault))


def _raise_problems(failures: Iterable[BaseException] = ()) -> None:
    """Raise what is warned about, and what the library notes about backends, as one error."""
    current = registry()
    doubts = (f"backend {record.title}: {doubt}" for record in current.records for doubt in current.doubts(record))
    problems = (*_complaints(), *doubts)
    if problems:
        told = "\n  ".join((f"load(strict=True) or {STRICT_VARIABLE} makes errors of:", *problems))
        raise BackendLoadError(told) from next(iter(failures), None)


def _refuse_another(asked: Policy) -> None:
    """Refuse a policy under which other backends would be loaded than are."""
    in_force = process.policy or Policy()
    other = [one.name for one in process.installed() if (asked.denial(one) is None) != (in_force.denial(one) is None)]
    if other:
        raise RegistrationError(
            f"{asked.source} comes too late to decide about {', '.join(dict.fromkeys(other))}: backends are loaded "
            f"once; call it before the first call of an op, or set {POLICY_VARIABLE}. A program that runs leaves "
            "kernels out with tileops.selection(exclude=…)"
        )


def _warn_of(reports: Iterable[str]) -> None:
    """Warn of each, also where the first warning is made an error."""
    raised = [error for error in map(_warned, reports) if error is not None]
    if raised:
        raise raised[0]


def _warned(report: str) -> Warning | None:
    try:
        warn_user(report, BackendLoadWarning)
    except Warning as error:
        return error
    return None
