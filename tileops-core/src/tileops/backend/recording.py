"""Who registers what: the functions that register, bound to their callers, and what is checked of an owner's whole.

A registration belongs to the distribution whose module makes it, not to whoever happens to import that module, so
that rolling one backend back never takes another's kernels along.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from tileops.backend.discovery import belongs_to
from tileops.backend.drafts import Change
from tileops.backend.precedence import check_precedence
from tileops.backend.process import active, process
from tileops.backend.records import State
from tileops.backend.registration import commit, registry, update_registry
from tileops.backend.units import LOCAL, DeviceClaim, Implementation, Unit, check_claims
from tileops.catalogue import find_op
from tileops.device import FactsReader
from tileops.kernels.kernel_base import Kernel, KernelInterface
from tileops.verdict import IN_TREE, Owner


class Recorder:
    """The functions that register, bound to whoever is registering.

    Args:
        owner: Who registers.
        module: The module whose code calls, which may be being imported; None where a hook does.
    """

    def __init__(self, owner: Owner, module: ModuleType | None = None) -> None:
        self._owner = owner
        self._module = module

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

    def _add(self, change: Change) -> None:
        if self._owner != LOCAL and process.redraft(self._owner, lambda draft: draft.with_change(change, self._module)):
            return
        while not _add_now(self._owner, change):
            pass  # another thread registered for the same owner meanwhile


def _add_now(owner: Owner, change: Change) -> bool:
    """Register for the program, or for a backend whose load is over: a transaction of its own.

    Of a backend that is not loaded (disabled, failed) nothing is taken, and its record says so. Returns False where
    another thread's registration came between.
    """
    record = registry().record_of(owner.name)
    if record is not None and record.state not in (State.LOADED, State.EMPTY):
        note = f"what it registers after the load is not taken: it is {record.state.value}"
        if note not in record.notes:
            noted = dataclasses.replace(record, notes=(*record.notes, note))
            update_registry(lambda old: old.with_record(noted))
        return True
    before = registry().units.get(owner.name)
    unit = change(before or Unit(owner))
    if unit is before:
        return True
    if owner == LOCAL:
        check_claims(unit, registry().units.values())  # the program may mend the rest until its next selection
    else:
        check_unit(unit)
    return commit(unit, after=before)


def recorder_of_caller(depth: int) -> Recorder:
    """What registers for whoever called: the backend whose module it is, else the one being loaded, else `local`.

    Args:
        depth: How many frames up the caller is.
    """
    scope = sys._getframe(depth).f_globals
    name = str(scope.get("__name__", ""))
    module = sys.modules.get(name)
    return Recorder(_owner_of(name), module if getattr(module, "__dict__", None) is scope else None)


def _owner_of(module: str) -> Owner:
    loading = active.get()
    if loading is None and module in ("__main__", ""):
        return LOCAL
    backends = [one for one in process.installed() if not one.problem and not one.shadowed_by]
    nearest = max(backends, key=lambda one: (belongs_to(module, one), one is loading), default=None)
    if nearest is not None and belongs_to(module, nearest):
        return nearest.owner
    return LOCAL if loading is None else loading.owner


def check_unit(unit: Unit) -> None:
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
