"""What is registered, by whom: kernels, builders of whole ops, readers of device facts.

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
    """

    op: str
    target: str
    build: Callable[..., Any]
    owner: Owner


@dataclasses.dataclass(frozen=True)
class Unit:
    """What one owner registered: taken whole or not at all.

    Args:
        owner: The owner.
        kernels: Its implementations, with the op each is for.
        builders: Its builders.
        readers: Its readers of device facts, by device type.
        notes: What it says about itself.
        observed: What its import did to the process besides registering.
    """

    owner: Owner
    kernels: tuple[tuple[str, Implementation], ...] = ()
    builders: tuple[Builder, ...] = ()
    readers: tuple[tuple[str, FactsReader], ...] = ()
    notes: tuple[str, ...] = ()
    observed: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing at all was registered."""
        return not (self.kernels or self.builders or self.readers)

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

    def with_builder(self, op: str, target: str, build: Callable[..., Any]) -> Unit:
        """This unit and one more builder."""
        _check_name("an op", op, "the name of its class, such as 'LayerNormFwdOp'")
        if not callable(build):
            raise RegistrationError(f"the builder of target {target!r} for {op} is {build!r}, which nobody can call")
        if any((known.op, known.target) == (op, target) and known.build is not build for known in self.builders):
            raise RegistrationError(f"target {target!r} has a builder for {op} already")
        if any((known.op, known.target) == (op, target) for known in self.builders):
            return self
        return dataclasses.replace(self, builders=(*self.builders, Builder(op, target, build, self.owner)))

    def with_reader(self, device_type: str, read: FactsReader) -> Unit:
        """This unit and one more reader of device facts."""
        _check_name("a device type", device_type, "torch's name for it, such as 'npu'")
        if not callable(read):
            raise RegistrationError(f"the reader of the facts of {device_type!r} is {read!r}, which nobody can call")
        if device_type in ("cuda", "cpu"):
            raise RegistrationError(f"the facts of {device_type!r} are read by tileops itself")
        if any(known == device_type and reader is not read for known, reader in self.readers):
            raise RegistrationError(f"the facts of {device_type!r} have a reader already")
        if (device_type, read) in self.readers:
            return self
        return dataclasses.replace(self, readers=(*self.readers, (device_type, read)))

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
        readers = (f"device facts of {device_type}" for device_type, _ in self.readers)
        return (*kernels, *builders, *readers)


def _check_name(what: str, given: object, wanted: str) -> None:
    if not isinstance(given, str) or not given:
        raise RegistrationError(f"{given!r} is not {what}: give {wanted}")


def _check_against_op(op: str, key: str, cls: type[Kernel[Any]]) -> None:
    """Check the class against its op. One that this release does not have is checked when it appears."""
    known = find_op(op)
    if known is not None:
        check_kernel_class(key, cls, known.interfaces.values())


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
    """

    units: Mapping[str, Unit] = dataclasses.field(default_factory=dict[str, Unit])
    records: tuple[BackendRecord, ...] = ()
    loaded: bool = False
    default: tuple[Statement, ...] = ()

    def implementations(self, op: str) -> tuple[Implementation, ...]:
        """What is registered for the op called `op`."""
        return tuple(found for unit in self.units.values() for name, found in unit.kernels if name == op)

    def builders(self) -> tuple[Builder, ...]:
        """Every builder of every target."""
        return tuple(builder for unit in self.units.values() for builder in unit.builders)

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
    """Raise where `unit` claims an (op, target) or a device type that somebody else has."""
    others = [other for other in units if other.owner != unit.owner]
    for device_type, _ in unit.readers:
        holder = next((o.owner for o in others if device_type in dict(o.readers)), None)
        if holder is not None:
            raise RegistrationError(
                f"the facts of {device_type!r} have a reader already, from {holder.distribution or holder.name}"
            )
    taken = {(b.op, b.target): b for other in others for b in other.builders}
    for builder in unit.builders:
        holder = taken.get((builder.op, builder.target))
        if holder is not None:
            raise RegistrationError(
                f"target {builder.target!r} has a builder for {builder.op} already, from "
                f"{holder.owner.distribution or holder.owner.name}"
            )
