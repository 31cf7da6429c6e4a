"""What a backend has registered before it is loaded: collected here, and taken when its load succeeds."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import ModuleType

from tileops.backend.units import Unit
from tileops.verdict import Owner

Change = Callable[[Unit], Unit]


@dataclasses.dataclass(frozen=True)
class Draft:
    """The registrations of one owner, each with the module that made it.

    A module whose import fails is thrown away, and may be imported again. What it had registered goes with it.

    Args:
        unit: What is registered.
        changes: What made it so, with the module that called, or None where that is nobody's import.
    """

    unit: Unit
    changes: tuple[tuple[Change, ModuleType | None], ...] = ()

    @classmethod
    def of(cls, owner: Owner) -> Draft:
        """A draft of `owner` that holds nothing."""
        return cls(Unit(owner))

    def with_change(self, change: Change, module: ModuleType | None) -> Draft:
        """This draft and one more registration. Another module of the caller's name was its failed import."""
        kept = self if module is None else self._without(lambda known: _is_earlier(known, module))
        return Draft(change(kept.unit), (*kept.changes, (change, module)))

    def without_failed_imports(self) -> Draft:
        """This draft without what modules registered that are not imported any more."""
        kept = self._without(_is_gone)
        lost = {module.__name__ for _, module in self.changes if module is not None and _is_gone(module)}
        unit = kept.unit
        for name in sorted(lost):
            unit = unit.with_note(f"what {name} registered is left out: its import failed")
        return Draft(unit, kept.changes)

    def _without(self, is_lost: Callable[[ModuleType], bool]) -> Draft:
        changes = tuple(pair for pair in self.changes if pair[1] is None or not is_lost(pair[1]))
        if len(changes) == len(self.changes):
            return self
        unit = Unit(self.unit.owner)
        for change, _ in changes:
            unit = change(unit)
        return Draft(unit, changes)


def _is_earlier(known: ModuleType, module: ModuleType) -> bool:
    return known is not module and known.__name__ == module.__name__


def _is_gone(module: ModuleType) -> bool:
    # Python takes a module out for a moment at the end of its import, and puts it back before that is over.
    return module.__name__ not in sys.modules and not getattr(module.__spec__, "_initializing", False)
