"""Which backends are installed, and which of them may be loaded. Reads metadata and a variable; imports nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, cast

from tileops.backend.records import BackendRecord, State
from tileops.backend.registration import LOCAL, Unit
from tileops.errors import RegistrationError
from tileops.verdict import IN_TREE, Owner

if TYPE_CHECKING:
    import importlib_metadata

GROUP: Final = "tileops.backends"
POLICY_VARIABLE: Final = "TILEOPS_BACKENDS"
RESERVED: Final = frozenset({IN_TREE, LOCAL.name})
"""Names that no backend can have: we use them ourselves."""
_PREFIX: Final = "tileops-backend-"


@dataclasses.dataclass(frozen=True)
class Installed:
    """A distribution with our entry points.

    Args:
        name: The backend's name: the distribution's normalised name without `tileops-backend-`.
        distribution: The distribution's normalised name.
        version: Its version.
        path: Where its metadata lies.
        entry_points: Its entry points in our group, sorted by name and value.
        modules: The modules that they name.
        problem: Why its entry points could not be read; empty where they could.
    """

    name: str
    distribution: str
    version: str
    path: str
    entry_points: tuple[importlib_metadata.EntryPoint, ...] = ()
    modules: tuple[str, ...] = ()
    problem: str = ""

    @property
    def owner(self) -> Owner:
        """Who its registrations belong to."""
        return Owner(self.name, f"{self.distribution} {self.version}")

    @property
    def aliases(self) -> frozenset[str]:
        """The names that a policy may call it by."""
        names = (self.name, self.distribution, *(point.name for point in self.entry_points))
        return frozenset(normalised_name(name) for name in names)

    def record(self, state: State, unit: Unit | None = None, **details: Any) -> BackendRecord:
        """A record of it in `state`."""
        unit = unit or Unit(self.owner)
        values = tuple(point.value for point in self.entry_points)
        return BackendRecord(
            self.name,
            self.distribution,
            self.version,
            self.path,
            values,
            state,
            registered=unit.lines(),
            notes=unit.all_notes(),
            **details,
        )


def normalised_name(name: str) -> str:
    """A distribution's name as pip compares it: `Tileops_Backend.Acme` is `tileops-backend-acme`."""
    from packaging.utils import canonicalize_name

    return str(canonicalize_name(name))


def installed_backends() -> tuple[Installed, ...]:
    """Every installed backend, in order of name. Reads metadata only; imports nothing.

    Each distribution is read in a guard of its own, so that one malformed file anywhere hides nobody else. Of
    two copies of one distribution, the first on the path counts.
    """
    import importlib_metadata

    found: dict[str, Installed] = {}
    for distribution in cast("Any", importlib_metadata).distributions():
        backend = _read_distribution(distribution)
        if backend is not None:
            found.setdefault(backend.distribution, backend)
    return tuple(_with_names_of_their_own(sorted(found.values(), key=lambda backend: backend.distribution)))


def _with_names_of_their_own(backends: Iterable[Installed]) -> Iterator[Installed]:
    """The backends, no two of one name: of two with one short name, the later goes by its distribution's."""
    taken = set[str]()
    for backend in backends:
        if backend.name in RESERVED:
            problem = f"a backend cannot be called {backend.name!r}: tileops uses that name itself"
            yield dataclasses.replace(backend, name=f"{_PREFIX}{backend.name}", problem=problem)
        elif backend.name in taken:
            yield dataclasses.replace(backend, name=backend.distribution)
        else:
            taken.add(backend.name)
            yield backend


def _read_distribution(distribution: Any) -> Installed | None:
    """What `distribution` announces; None where it is no backend or cannot be read at all."""
    try:
        text = distribution.read_text("entry_points.txt") or ""
        if GROUP not in text:
            return None
        name = normalised_name(distribution.metadata["Name"])
        version, path = distribution.version, str(getattr(distribution, "_path", ""))
    except Exception:
        return None
    short = name.removeprefix(_PREFIX)
    try:
        points = distribution.entry_points.select(group=GROUP)
        ordered = tuple(sorted(points, key=lambda point: (point.name, point.value)))
        modules = tuple(point.module for point in ordered)
        return Installed(short, name, version, path, ordered, modules) if ordered else None
    except Exception as error:
        problem = f"its entry_points.txt cannot be read: {type(error).__name__}: {error}"
        return Installed(short, name, version, path, problem=problem)


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which backends may be loaded, from `TILEOPS_BACKENDS`.

    Unset: all. Empty: none. `acme,zeta`: only these. `-acme`: all but these.
    """

    only: frozenset[str] | None = None
    excluded: frozenset[str] = frozenset()
    text: str | None = None

    @classmethod
    def from_text(cls, text: str | None) -> Policy:
        """The policy that `text` writes; None for an unset variable."""
        if text is None:
            return cls()
        names = [name.strip() for name in text.split(",") if name.strip()]
        excluded = frozenset(normalised_name(name[1:].strip()) for name in names if name.startswith("-"))
        only = frozenset(normalised_name(name) for name in names if not name.startswith("-"))
        if excluded and only:
            raise RegistrationError(
                f"{POLICY_VARIABLE}={text!r} mixes names to load with names to leave out; write either "
                f"{','.join(sorted(only))!r} or {','.join('-' + name for name in sorted(excluded))!r}"
            )
        return cls(None if excluded else only, excluded, text)

    def denial(self, backend: Installed) -> str | None:
        """Why `backend` may not be loaded, or None."""
        allowed = self.only is None or bool(self.only & backend.aliases)
        if allowed and not self.excluded & backend.aliases:
            return None
        return f"{POLICY_VARIABLE}={self.text!r} leaves it out"

    def unknown(self, backends: Iterable[Installed]) -> tuple[str, ...]:
        """The names it holds that no installed backend has."""
        known = frozenset[str]().union(*(backend.aliases for backend in backends))
        return tuple(sorted(((self.only or frozenset()) | self.excluded) - known))


def shared_parts(backend: Installed, module: str) -> int:
    """How many leading parts of its dotted name `module` shares with an entry point of `backend`."""
    parts = module.split(".")
    return max((_common(parts, other.split(".")) for other in backend.modules), default=0)


def _common(left: list[str], right: list[str]) -> int:
    count = 0
    for one, other in zip(left, right):
        if one != other:
            break
        count += 1
    return count
