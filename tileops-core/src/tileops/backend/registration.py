"""What is registered, by whom: the one table of a process.

An owner's registrations are collected in a `Unit` and taken whole or not at all; the whole table is one immutable
`Registry`, swapped by an assignment, so that readers take no lock.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from tileops.backend.notes import unknown_names
from tileops.backend.records import BackendRecord, State
from tileops.backend.units import Builder, Detector, Implementation, Unit
from tileops.device import set_facts_readers

if TYPE_CHECKING:
    from tileops.backend.statements import Statement


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
