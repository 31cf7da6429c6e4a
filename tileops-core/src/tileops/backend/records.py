"""What became of each installed backend, as records."""

from __future__ import annotations

import dataclasses
import enum
from typing import Final


class State(enum.Enum):
    """What became of a backend when backends were loaded."""

    LOADED = "loaded"
    DECLINED = "declined"
    INCOMPATIBLE = "incompatible"
    FAILED = "failed"
    DISABLED = "disabled"
    EMPTY = "empty"
    SHADOWED = "shadowed"

    @property
    def is_fault(self) -> bool:
        """Whether its users go without what it was installed for, and nobody decided so: it is warned about."""
        return self in (State.INCOMPATIBLE, State.FAILED, State.EMPTY)


_SAYING: Final = {
    State.DECLINED: "declined",
    State.INCOMPATIBLE: "is incompatible",
    State.FAILED: "failed to load",
    State.DISABLED: "is disabled",
    State.EMPTY: "is empty",
}
"""How later errors say it. A shadowed copy explains no missing kernel: the other one may."""


@dataclasses.dataclass(frozen=True)
class BackendRecord:
    """One backend and what became of it.

    Args:
        name: The backend's name: `example`, `acme`, `local`.
        distribution: The distribution that ships it; empty for `local`.
        version: The distribution's version.
        path: Where its metadata lies.
        entry_points: The values of its entry points, sorted.
        state: What became of it.
        reason: Why it is not `loaded`, in one line; empty where it is.
        remedy: What to do about it, in one line; empty where there is nothing to do.
        traceback: The traceback of a failure; empty otherwise.
        registered: What it registered, as lines for a reader.
        notes: What it, or the library about it, has to say: optional parts left out, unknown names.
    """

    name: str
    distribution: str = ""
    version: str = ""
    path: str = ""
    entry_points: tuple[str, ...] = ()
    state: State = State.LOADED
    reason: str = ""
    remedy: str = ""
    traceback: str = ""
    registered: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The backend and its distribution: `acme (tileops-backend-acme 1.0)`."""
        shipped = f"{self.distribution} {self.version}".strip()
        return f"{self.name} ({shipped})" if shipped else self.name

    def complaint(self) -> str:
        """The one warning about a backend that is at fault: which, why, what to do."""
        return f"tileops skips the backend {self.title}: {self.reason.rstrip('.')}. What to do: {self.remedy}"

    def remarks(self) -> tuple[str, ...]:
        """The lines of later errors that this backend may explain."""
        saying = _SAYING.get(self.state)
        said = () if saying is None else (f"backend {self.title} {saying}: {self.reason}",)
        return (*said, *(f"backend {self.title}: {note}" for note in self.notes))
