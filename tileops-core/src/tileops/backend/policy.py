"""Which of the installed backends may be loaded: a variable of the environment, or a program, says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

from tileops.backend.discovery import Installed, normalised_name
from tileops.catalogue import meant
from tileops.errors import RegistrationError

POLICY_VARIABLE: Final = "TILEOPS_BACKENDS"


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which backends may be loaded.

    Args:
        only: The names of those that may; None for all.
        excluded: The names of those that may not.
        source: What said so, as its author wrote it; empty where nobody did.
    """

    only: frozenset[str] | None = None
    excluded: frozenset[str] = frozenset()
    source: str = ""

    @classmethod
    def from_text(cls, text: str | None) -> Policy:
        """What the variable says: None, as it is not set, all; empty, none; `acme,zeta`, these; `-acme`, the others."""
        if text is None:
            return cls()
        names = [name.strip() for name in text.split(",") if name.strip()]
        excluded = _normalised(name[1:].strip() for name in names if name.startswith("-"))
        only = _normalised(name for name in names if not name.startswith("-"))
        if excluded and only:
            raise RegistrationError(
                f"{POLICY_VARIABLE}={text!r} mixes names to load with names to leave out; write either "
                f"{','.join(sorted(only))!r} or {','.join('-' + name for name in sorted(excluded))!r}"
            )
        return cls(None if excluded else only, excluded, f"{POLICY_VARIABLE}={text!r}")

    @classmethod
    def from_names(cls, only: Iterable[str] | None, exclude: Iterable[str] | None) -> Policy | None:
        """What `load(only=…)` or `load(exclude=…)` says; None where neither was given."""
        if only is not None and exclude is not None:
            raise RegistrationError("load(only=…, exclude=…) mixes names to load with names to leave out; give one")
        if only is not None:
            names = _listed(only)
            return cls(only=_normalised(names), source=f"load(only={names!r})")
        if exclude is not None:
            names = _listed(exclude)
            return cls(excluded=_normalised(names), source=f"load(exclude={names!r})")
        return None

    def denial(self, backend: Installed) -> str | None:
        """Why `backend` may not be loaded, or None."""
        allowed = self.only is None or bool(self.only & backend.aliases)
        return None if allowed and not self.excluded & backend.aliases else f"{self.source} leaves it out"

    def unknown_names(self, backends: Iterable[Installed]) -> tuple[str, ...]:
        """A sentence for each name that it holds and no installed backend has."""
        backends = tuple(backends)
        aliases = frozenset[str]().union(*(backend.aliases for backend in backends))
        known = tuple(dict.fromkeys(backend.name for backend in backends))
        listed = ", ".join(known) or "none is installed"
        return tuple(
            f"{self.source} names {name!r}, which no installed backend is called; known: {listed}{meant(name, known)}"
            for name in sorted(((self.only or frozenset()) | self.excluded) - aliases)
        )


def _listed(names: Iterable[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _normalised(names: Iterable[str]) -> frozenset[str]:
    return frozenset(normalised_name(name) for name in names)
