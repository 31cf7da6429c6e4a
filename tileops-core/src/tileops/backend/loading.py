"""Find, import and commit the installed backends.

Backends are loaded once, at the first selection miss, the first question about backends, or by `load()`; never
at `import tileops`. A backend is a distribution with entry points in the group `tileops.backends`. It loads
whole or not at all, and one that cannot costs nobody else anything: it is recorded, warned about once, and
named in later errors.

Registrations are attributed to the distribution whose module makes them, not to whoever happens to import that
module, so that rolling one backend back never takes another's kernels along.
"""

from __future__ import annotations

import contextvars
import dataclasses
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tileops.backend import hooks
from tileops.backend.discovery import POLICY_VARIABLE, Installed, Policy, installed_backends, shared_parts
from tileops.backend.precedence import check_precedence
from tileops.backend.records import BackendRecord, State
from tileops.backend.registration import (
    LOCAL,
    DeviceClaim,
    Implementation,
    Unit,
    check_claims,
    commit,
    registry,
    update_registry,
)
from tileops.catalogue import find_op, meant
from tileops.device import FactsReader, warn_user
from tileops.errors import BackendLoadWarning, RegistrationError
from tileops.kernels.kernel_base import Kernel, KernelInterface
from tileops.verdict import IN_TREE, Owner

if TYPE_CHECKING:
    import importlib_metadata
    import pluggy


class _Loading:
    """The state of the one load of this process, and what imported modules registered before or during it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.leader: int | None = None
        self.done = threading.Event()
        self.installed: tuple[Installed, ...] | None = None
        self.pending: dict[str, Unit] = {}


_loading = _Loading()
_active: contextvars.ContextVar[Installed | None] = contextvars.ContextVar("tileops_loading_backend", default=None)


def _after_fork_in_child() -> None:
    """A child starts with locks nobody holds; a load that another thread had begun is begun again."""
    if not _loading.done.is_set():
        _loading.leader = None
        _loading.done = threading.Event()
    _loading.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def load() -> None:
    """Load the installed backends, once in a process. Any thread may call it; the later ones wait.

    No lock of ours is held while a backend's modules are imported or its hooks run. A backend that asks for
    kernels while it is being loaded sees what is committed so far.
    """
    if registry().loaded or not _become_leader():
        return
    try:
        reports = _load_all()
    except BaseException:
        with _loading.lock:
            _loading.leader = None
        _loading.done.set()
        raise
    _loading.done.set()
    for report in reports:
        warn_user(report, BackendLoadWarning)


def _become_leader() -> bool:
    """Whether this thread is the one to load; waits for the one that is."""
    while not registry().loaded:
        with _loading.lock:
            if _loading.leader is None:
                _loading.leader = threading.get_ident()
                _loading.done.clear()
                return True
            if _loading.leader == threading.get_ident():
                return False
        _loading.done.wait()
    return False


def _load_all() -> list[str]:
    """Load every backend that may be; return the warnings to give once all are recorded."""
    policy = Policy.from_text(os.environ.get(POLICY_VARIABLE))
    backends = _scan()
    for backend in backends:
        if registry().record_of(backend.name) is None:  # an interrupt may have ended an earlier load
            _load_one(backend, policy)
    records = [record for record in registry().records if record.name != LOCAL.name]
    update_registry(lambda old: dataclasses.replace(old, loaded=True))
    reports = [_unknown_name(name, backends) for name in policy.unknown(backends)]
    return reports + [_report(record) for record in records if record.state in (State.FAILED, State.EMPTY)]


def _scan() -> tuple[Installed, ...]:
    """The installed backends, read once: also who a module's registrations belong to."""
    if _loading.installed is None:
        _loading.installed = installed_backends()
    return _loading.installed


def _load_one(backend: Installed, policy: Policy) -> None:
    """Load one backend whole or not at all, and record what became of it."""
    denial = policy.denial(backend)
    if denial is not None:
        _record(backend.record(State.DISABLED, reason=denial))
        return
    try:
        if backend.problem:
            raise RegistrationError(backend.problem)  # noqa: TRY301
        unit = _collect(backend)
        _check_unit(unit)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # sys.exit at import or a native panic must not end the host
        _record(backend.record(State.FAILED, reason=_reason(error), traceback=traceback.format_exc()))
        return
    finally:
        _loading.pending.pop(backend.name, None)
    if unit.is_empty and not unit.notes:
        _record(backend.record(State.EMPTY, reason="it loaded and registered nothing"))
    else:
        commit(unit, backend.record(State.LOADED, unit))


def _record(record: BackendRecord) -> None:
    update_registry(lambda old: old.with_record(record))


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _collect(backend: Installed) -> Unit:
    """Import the backend and run its hooks; what it registered."""
    if not all(module in sys.modules for module in backend.modules):
        # Somebody's import of it failed half-way; what it registered then goes, and its own fault shows again.
        _loading.pending.pop(backend.name, None)
    token = _active.set(backend)
    try:
        for point in backend.entry_points:
            _run_hooks(backend, _imported(point))
    finally:
        _active.reset(token)
    return _loading.pending.pop(backend.name, Unit(backend.owner))


def _imported(point: importlib_metadata.EntryPoint) -> object:
    """What an entry point names: a module, an object with hooks, or the result of a class or a function."""
    value = point.load()
    if isinstance(value, type):
        return value()
    if callable(value) and not _hooks_of(value):
        value()
    return value


def _hooks_of(value: object) -> list[str]:
    return [name for name in dir(value) if name.startswith(f"{hooks.PROJECT}_")]


def _run_hooks(backend: Installed, plugin: object) -> None:
    """Call the hooks of one plugin, in a plugin manager of its own: nobody else's mistakes reach it."""
    import pluggy

    manager = pluggy.PluginManager(hooks.PROJECT)
    for specification in hooks.SPECIFICATIONS:
        pluggy.HookspecMarker(hooks.PROJECT)(specification)
    manager.add_hookspecs(hooks)
    manager.register(plugin, backend.name)
    _refuse_unknown_hooks(manager, plugin)
    recorder = Recorder(lambda: backend.owner)
    manager.hook.tileops_register_kernels(register_kernel_type=recorder.register_kernel_type)
    manager.hook.tileops_register_targets(
        register_detector=recorder.register_detector, register_kernel_builder=recorder.register_kernel_builder
    )
    manager.hook.tileops_register_devices(register_device_facts=recorder.register_device_facts)


def _refuse_unknown_hooks(manager: pluggy.PluginManager, plugin: object) -> None:
    """Say which hooks there are, where pluggy says only which one is unknown."""
    import pluggy

    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        known = tuple(sorted(specification.__name__ for specification in hooks.SPECIFICATIONS))
        unknown = [name for name in _hooks_of(plugin) if name not in known]
        name = unknown[0] if unknown else str(error)
        raise RegistrationError(f"no hook is called {name!r}; known: {', '.join(known)}{meant(name, known)}") from error


def _check_unit(unit: Unit) -> None:
    """Check what only the whole shows: two generals, a cycle, a target that somebody else has."""
    check_claims(unit, registry().units.values())
    for op, interface in _interfaces_of(unit):
        own = [implementation for name, implementation in unit.kernels if name == op.__name__]
        in_tree = [Implementation(key, cls, Owner(IN_TREE)) for key, cls in op.kernel_types.items()]
        check_precedence(interface, own, in_tree)


def _interfaces_of(unit: Unit) -> Iterator[tuple[type[Any], type[KernelInterface[Any]]]]:
    for name in dict.fromkeys(name for name, _ in unit.kernels):
        op = find_op(name)
        if op is not None:
            yield from ((op, interface) for interface in op.interfaces.values())


def _report(record: BackendRecord) -> str:
    """The one warning about a backend that does not serve: which, why, what to do."""
    remedy = (
        f"reinstall or uninstall {record.distribution}, or leave it out with {POLICY_VARIABLE}=-{record.name}; "
        "tileops.backend.status() has the traceback"
    )
    return f"tileops skips the backend {record.title}: {record.reason}. What to do: {remedy}"


def _unknown_name(name: str, backends: tuple[Installed, ...]) -> str:
    known = tuple(backend.name for backend in backends)
    listed = ", ".join(known) or "none is installed"
    return (
        f"{POLICY_VARIABLE} names {name!r}, which no installed backend is called; known: {listed}{meant(name, known)}"
    )


class Recorder:
    """The functions that register, bound to whoever is registering.

    Args:
        owner: Asked at each call.
    """

    def __init__(self, owner: Callable[[], Owner]) -> None:
        self._owner = owner

    def register_kernel_type(self, op: str, key: str, cls: type[Kernel[Any]]) -> None:
        """Add an implementation to the op called `op`, under `key`."""
        self._add(lambda unit: unit.with_kernel(op, key, cls))

    def register_detector(self, target: str, detect: DeviceClaim) -> None:
        """Let `target` have the devices that `detect(device)` claims."""
        self._add(lambda unit: unit.with_detector(target, detect))

    def register_kernel_builder(
        self, op: str, target: str, build_kernel: Callable[..., Any], *, per_op: bool = False
    ) -> None:
        """Let `target` take over the op called `op`."""
        self._add(lambda unit: unit.with_builder(op, target, build_kernel, per_op=per_op))

    def register_device_facts(self, device_type: str, read: FactsReader) -> None:
        """Let `read(device)` tell the facts of devices of `device_type`."""
        self._add(lambda unit: unit.with_reader(device_type, read))

    def note(self, reason: str) -> None:
        """Add a line to the record."""
        self._add(lambda unit: unit.with_note(reason))

    def _add(self, change: Callable[[Unit], Unit]) -> None:
        owner = self._owner()
        if owner == LOCAL:
            unit = change(registry().units.get(LOCAL.name, Unit(LOCAL)))
            check_claims(unit, registry().units.values())
            commit(unit)
        elif registry().record_of(owner.name) is None:
            _loading.pending[owner.name] = change(_loading.pending.get(owner.name, Unit(owner)))
        else:
            _add_late(owner, change)


def _add_late(owner: Owner, change: Callable[[Unit], Unit]) -> None:
    """A backend's module that is imported, or registers more, after the load: a transaction of its own.

    Of a backend that is not loaded (disabled, failed) nothing is taken: its record says why.
    """
    record = registry().record_of(owner.name)
    if record is None or record.state is not State.LOADED:
        return
    unit = change(registry().units.get(owner.name, Unit(owner)))
    _check_unit(unit)
    commit(unit)


def owner_of_caller(depth: int) -> Owner:
    """Whose registration it is: the backend whose module called, else the one being loaded, else `local`.

    Args:
        depth: How many frames up the caller is.
    """
    module = sys._getframe(depth).f_globals.get("__name__", "")
    active = _active.get()
    if active is None and module in ("__main__", ""):
        return LOCAL
    backend = max(_scan(), key=lambda known: shared_parts(known, module), default=None)
    if backend is not None and shared_parts(backend, module) and not backend.problem:
        return backend.owner
    return LOCAL if active is None else active.owner
