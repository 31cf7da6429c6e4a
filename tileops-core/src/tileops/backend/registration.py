"""What is registered, by whom: kernels, detectors and builders of targets, readers of device facts.

Everything that is registered belongs to an owner, the distribution that registered it or `local`. An owner's
registrations are collected in a `Unit` and taken whole or not at all; the whole table is one immutable
`Registry`, swapped by an assignment, so that readers take no lock.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from tileops.backend.notes import unknown_names
from tileops.backend.records import BackendRecord, State
from tileops.catalogue import find_op
from tileops.device import FactsReader, set_facts_readers
from tileops.errors import RegistrationError
from tileops.kernels.kernel_base import Kernel, check_kernel_class
from tileops.verdict import Owner

if TYPE_CHECKING:
    from tileops.backend.statements import Statement

LOCAL: Final = Owner("local")
"""The owner of what a program registers itself."""

BUILTIN: Final = "BUILTIN"
"""As `target=`, or as the default target: no target takes the op over, kernel selection serves it."""

DeviceClaim = Callable[[torch.device], bool]
"""Says of a device whether a target is for it."""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A kernel class under a key: one candidate of its interfaces.

    Args:
        key: The key as its owner wrote it.
        cls: The class.
        owner: Who registered it.
    """

    key: str
    cls: type[Kernel[Any]]
    owner: Owner

    @property
    def full_key(self) -> str:
        """The key as every table and message writes it: `held_row`, `acme:row`."""
        return self.owner.full_key(self.key)


@dataclasses.dataclass(frozen=True)
class Builder:
    """What builds a target's kernel for one op.

    Args:
        op: The op's name.
        target: The target's name.
        build: Called `build(*TensorSpec | None in signature order, **params)`; returns a callable.
        owner: Who registered it.
        per_op: Whether each op object has a kernel of its own, instead of one for all equal ops.
    """

    op: str
    target: str
    build: Callable[..., Any]
    owner: Owner
    per_op: bool = False


@dataclasses.dataclass(frozen=True)
class Detector:
    """What says which devices a target is for.

    Args:
        target: The target's name.
        detect: Called `detect(device)`.
        owner: Who registered it.
    """

    target: str
    detect: DeviceClaim
    owner: Owner


@dataclasses.dataclass(frozen=True)
class Unit:
    """What one owner registered: taken whole or not at all.

    Args:
        owner: The owner.
        kernels: Its implementations, with the op each is for.
        builders: Its builders.
        detectors: Its detectors.
        readers: Its readers of device facts, by device type.
        notes: What it says about itself.
        observed: What its import did to the process besides registering.
    """

    owner: Owner
    kernels: tuple[tuple[str, Implementation], ...] = ()
    builders: tuple[Builder, ...] = ()
    detectors: tuple[Detector, ...] = ()
    readers: tuple[tuple[str, FactsReader], ...] = ()
    notes: tuple[str, ...] = ()
    observed: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing at all was registered."""
        return not (self.kernels or self.builders or self.detectors or self.readers)

    def with_kernel(self, op: str, key: str, cls: type[Kernel[Any]]) -> Unit:
        """This unit and one more implementation; itself where the very same is in it already."""
        _check_name("an op", op, "the name of its class, such as 'LayerNormFwdOp'")
        for known_op, known in self.kernels:
            if (known_op, known.key) == (op, key):
                if known.cls is cls:
                    return self
                raise RegistrationError(
                    f"{op} has {self.owner.full_key(key)!r} already, {_name(known.cls)}; {_name(cls)} needs another "
                    f"key, or unregister_kernel_type({op!r}, {key!r}) first"
                )
        _check_against_op(op, key, cls)
        return dataclasses.replace(self, kernels=(*self.kernels, (op, Implementation(key, cls, self.owner))))

    def with_builder(self, op: str, target: str, build: Callable[..., Any], *, per_op: bool = False) -> Unit:
        """This unit and one more builder; itself where the very same is in it already."""
        _check_name("an op", op, "the name of its class, such as 'LayerNormFwdOp'")
        _check_target(target, f"the builder of target {target!r} for {op}", build)
        builder = Builder(op, target, build, self.owner, per_op)
        return self if builder in self.builders else self._extended(builders=(*self.builders, builder))

    def with_detector(self, target: str, detect: DeviceClaim) -> Unit:
        """This unit and one more detector; itself where the very same is in it already."""
        _check_target(target, f"the detector of target {target!r}", detect)
        detector = Detector(target, detect, self.owner)
        return self if detector in self.detectors else self._extended(detectors=(*self.detectors, detector))

    def with_reader(self, device_type: str, read: FactsReader) -> Unit:
        """This unit and one more reader of device facts; itself where the very same is in it already."""
        _check_name("a device type", device_type, "torch's name for it, such as 'npu'")
        if not callable(read):
            raise RegistrationError(f"the reader of the facts of {device_type!r} is {read!r}, which nobody can call")
        if device_type in ("cuda", "cpu"):
            raise RegistrationError(f"the facts of {device_type!r} are read by tileops itself")
        reader = (device_type, read)
        return self if reader in self.readers else self._extended(readers=(*self.readers, reader))

    def _extended(self, **longer: tuple[Any, ...]) -> Unit:
        """This unit with a longer table, in which nothing is claimed twice."""
        extended = dataclasses.replace(self, **longer)
        claims = tuple(extended.claims())
        twice = next((claim for claim in claims if claims.count(claim) > 1), None)
        if twice is not None:
            raise RegistrationError(f"{twice} already")
        return extended

    def claims(self) -> Iterator[str]:
        """What nobody else may register, each as the beginning of the sentence that says so."""
        yield from (f"target {builder.target!r} has a builder for {builder.op}" for builder in self.builders)
        yield from (f"target {detector.target!r} has a detector" for detector in self.detectors)
        yield from (f"the facts of {device_type!r} have a reader" for device_type, _ in self.readers)

    def with_note(self, note: str) -> Unit:
        """This unit and one more note."""
        _check_name("a note", note, "a sentence")
        return self if note in self.notes else dataclasses.replace(self, notes=(*self.notes, note))

    def named(self) -> Iterator[tuple[str, str]]:
        """What can be named, by op: the keys of its kernels, and its targets."""
        yield from ((op, implementation.key) for op, implementation in self.kernels)
        yield from ((builder.op, builder.target) for builder in self.builders)

    def lines(self) -> tuple[str, ...]:
        """What is registered, as lines for a reader."""
        kernels = (f"{op}: {implementation.full_key}" for op, implementation in self.kernels)
        builders = (f"{builder.op}: target {builder.target}" for builder in self.builders)
        detectors = (f"detector of target {detector.target}" for detector in self.detectors)
        readers = (f"device facts of {device_type}" for device_type, _ in self.readers)
        return (*kernels, *builders, *detectors, *readers)


def _check_name(what: str, given: object, wanted: str) -> None:
    if not isinstance(given, str) or not given:
        raise RegistrationError(f"{given!r} is not {what}: give {wanted}")


def _check_against_op(op: str, key: str, cls: type[Kernel[Any]]) -> None:
    """Check the class against its op. One that this release does not have is checked when it appears."""
    known = find_op(op)
    if known is not None:
        check_kernel_class(key, cls, known.interfaces.values())


def _check_target(target: object, what: str, function: object) -> None:
    """Refuse a target that cannot be given as `target=`, and what cannot be called."""
    if not isinstance(target, str) or not target or target == BUILTIN:
        raise RegistrationError(f"a target cannot be called {target!r}; give a name such as 'acme'")
    if not callable(function):
        raise RegistrationError(f"{what} is {function!r}, which nobody can call")


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@dataclasses.dataclass(frozen=True)
class Registry:
    """Everything that is registered now. Immutable.

    Args:
        units: The committed units by owner name, in order of name.
        records: What became of each installed backend, in order of name.
        loaded: Whether installed backends were looked for.
        default: What the program says for the whole process about whose kernels are taken.
        default_target: The target of ops that name none, or `BUILTIN`; None where detection decides.
    """

    units: Mapping[str, Unit] = dataclasses.field(default_factory=dict[str, Unit])
    records: tuple[BackendRecord, ...] = ()
    loaded: bool = False
    default: tuple[Statement, ...] = ()
    default_target: str | None = None

    def implementations(self, op: str) -> tuple[Implementation, ...]:
        """What is registered for the op called `op`."""
        return tuple(found for unit in self.units.values() for name, found in unit.kernels if name == op)

    def builders(self) -> tuple[Builder, ...]:
        """Every builder of every target."""
        return tuple(builder for unit in self.units.values() for builder in unit.builders)

    def detectors(self) -> tuple[Detector, ...]:
        """The detectors of all targets, one each."""
        return tuple(detector for unit in self.units.values() for detector in unit.detectors)

    def record_of(self, owner: str) -> BackendRecord | None:
        """The record of an owner; None of a backend that is not loaded yet. Shadowed copies come last."""
        return next((record for record in self.records if record.name == owner), None)

    def with_record(self, record: BackendRecord) -> Registry:
        """This registry with `record` in the place of its owner's; copies of a distribution differ by their paths."""
        records = {(known.name, known.path): known for known in (*self.records, record)}
        ordered = sorted(records.values(), key=lambda known: (known.name, known.state is State.SHADOWED, known.path))
        return dataclasses.replace(self, records=tuple(ordered))

    def doubts(self, record: BackendRecord) -> tuple[str, ...]:
        """What the library notes about a backend now: names that nothing here has, what its import did besides."""
        unit = None if record.state is not State.LOADED else self.units.get(record.name)
        return () if unit is None else (*unit.observed, *unknown_names(unit, self.units.values()))

    def told(self) -> tuple[BackendRecord, ...]:
        """The records with all notes as they are now, in order of name."""
        return tuple(
            dataclasses.replace(record, notes=(*record.notes, *self.doubts(record))) for record in self.records
        )

    def remarks(self) -> tuple[str, ...]:
        """The lines that backends add to an error about a missing kernel."""
        return tuple(line for record in self.told() for line in record.remarks())


_registry = Registry()
_lock = threading.RLock()
_listeners: Final[list[Callable[[], None]]] = []


def _after_fork_in_child() -> None:
    """Nobody in the child can release what another thread of the parent held."""
    global _lock  # noqa: PLW0603
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def registry() -> Registry:
    """What is registered now: a value that never changes."""
    return _registry


def when_registry_changes(listener: Callable[[], None]) -> None:
    """Have `listener` called after every change, so that tables made from the old registry are dropped."""
    _listeners.append(listener)


def update_registry(change: Callable[[Registry], Registry]) -> None:
    """Swap the registry for `change` of it. `change` does table work only: no import, no user code."""
    global _registry  # noqa: PLW0603 - the one place that swaps it
    with _lock:
        _registry = change(_registry)
        set_facts_readers(
            {
                kind: (read, unit.owner.distribution or unit.owner.name)
                for unit in _registry.units.values()
                for kind, read in unit.readers
            }
        )
        for listener in _listeners:
            listener()


def commit(unit: Unit, *, after: Unit | None, record: BackendRecord | None = None) -> bool:
    """Make `unit` the registrations of its owner, and keep its record; False where somebody else was quicker.

    Args:
        unit: What the owner has registered, all of it.
        after: What the owner must have now: what `unit` was made from. Nothing is changed where it has more.
        record: The owner's record, where a load is over; without one, the record it has says what is new.
    """
    done = False

    def changed(old: Registry) -> Registry:
        nonlocal done
        done = old.units.get(unit.owner.name) is after
        if not done:
            return old
        units = dict(sorted({**old.units, unit.owner.name: unit}.items()))
        kept = record or old.record_of(unit.owner.name) or BackendRecord(unit.owner.name)
        kept = dataclasses.replace(
            kept, state=State.LOADED, reason="", remedy="", registered=unit.lines(), notes=unit.notes
        )
        return dataclasses.replace(old.with_record(kept), units=units)

    update_registry(changed)
    return done


def check_claims(unit: Unit, units: Iterable[Unit]) -> None:
    """Raise where `unit` claims what somebody else has: a builder's or a detector's target, a device type."""
    taken = {claim: other.owner for other in units if other.owner != unit.owner for claim in other.claims()}
    for claim in unit.claims():
        if claim in taken:
            raise RegistrationError(f"{claim} already, from {taken[claim].distribution or taken[claim].name}")
