"""What became of each installed backend, as records."""

from __future__ import annotations

import dataclasses
import enum


class State(enum.Enum):
    """What became of a backend when backends were loaded."""

    LOADED = "loaded"
    FAILED = "failed"
    DISABLED = "disabled"
    EMPTY = "empty"


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
    traceback: str = ""
    registered: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The backend and its distribution: `acme (tileops-backend-acme 1.0)`."""
        return f"{self.name} ({self.distribution} {self.version})" if self.distribution else self.name

    def remarks(self) -> tuple[str, ...]:
        """The lines of later errors that this backend may explain."""
        failure = (f"backend {self.title} failed to load: {self.reason}",) if self.state is State.FAILED else ()
        disabled = (f"backend {self.title} is disabled: {self.reason}",) if self.state is State.DISABLED else ()
        return (*failure, *disabled, *(f"backend {self.title}: {note}" for note in self.notes))
