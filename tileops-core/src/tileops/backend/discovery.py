"""Which backends are installed. Reads metadata; imports nothing of theirs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any, Final

from tileops.backend.records import BackendRecord, State
from tileops.backend.units import LOCAL
from tileops.verdict import IN_TREE, Owner

GROUP: Final = "tileops.backends"
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
        entry_points: Its entry points in our group, no value twice, sorted by name and value.
        requirements: What it requires, as its metadata writes it.
        requires_python: The versions of Python that it runs on, as its metadata writes it; empty for all.
        problem: Why its metadata could not be read; empty where it could.
        shadowed_by: The copy of the same distribution that counts in its place; empty where it counts itself.
    """

    name: str
    distribution: str
    version: str
    path: str
    entry_points: tuple[importlib.metadata.EntryPoint, ...] = ()
    requirements: tuple[str, ...] = ()
    requires_python: str = ""
    problem: str = ""
    shadowed_by: str = ""

    @property
    def owner(self) -> Owner:
        """Who its registrations belong to."""
        return Owner(self.name, self.shipped_as)

    @property
    def shipped_as(self) -> str:
        """Its distribution and version, as pip shows them."""
        return f"{self.distribution} {self.version}".strip()

    @property
    def values(self) -> tuple[str, ...]:
        """The values of its entry points."""
        return tuple(point.value for point in self.entry_points)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that its entry points name."""
        return tuple(point.module for point in self.entry_points)

    @property
    def aliases(self) -> frozenset[str]:
        """The names that a policy may call it by."""
        names = (self.name, self.distribution, *(point.name for point in self.entry_points))
        return frozenset(normalised_name(name) for name in names)

    def record(self, state: State, **details: Any) -> BackendRecord:
        """A record of it in `state`."""
        return BackendRecord(
            self.name, self.distribution, self.version, self.path, tuple(sorted(self.values)), state, **details
        )


def normalised_name(name: str) -> str:
    """A distribution's name as pip compares it: `Tileops_Backend.Acme` is `tileops-backend-acme`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_backends() -> tuple[Installed, ...]:
    """Every installed backend, in order of name; of several copies of one distribution, the one that counts first.

    Each distribution is read in a guard of its own, so that one malformed file anywhere hides nobody else.
    """
    copies: dict[str, dict[str, Installed]] = {}
    for distribution in _distributions():
        backend = _read_distribution(distribution)
        if backend is not None:  # one folder that is twice on the path holds no second copy
            copies.setdefault(backend.distribution, {}).setdefault(os.path.realpath(backend.path), backend)
    ranked = (_ranked(list(same.values())) for _, same in sorted(copies.items()))
    named = sorted(_with_names_of_their_own(ranked), key=lambda same: same[0].name)
    return tuple(backend for same in named for backend in same)


def _distributions() -> Iterator[Any]:
    """Every distribution on the path, in the path's order."""
    context = importlib.metadata.DistributionFinder.Context()
    for finder in list(sys.meta_path):
        yield from _found_by(finder, context)


def _found_by(finder: object, context: object) -> Iterator[Any]:
    """What one finder finds. One of somebody else's that fails costs only what it would find."""
    find = getattr(finder, "find_distributions", None)
    if find is not None:
        with contextlib.suppress(Exception):
            yield from find(context)


def _read_distribution(distribution: Any) -> Installed | None:
    """What `distribution` announces; None where it is no backend."""
    try:
        text = distribution.read_text("entry_points.txt") or ""
    except UnicodeDecodeError as error:
        text = error.object.decode("latin-1")
    except Exception:  # a backend or not: nobody can say
        return None
    if GROUP not in text:
        return None
    path = str(getattr(distribution, "_path", ""))
    try:
        return _announced(distribution, path)
    except Exception as error:
        name = normalised_name(PurePath(path).name.partition("-")[0]) or "unknown"
        problem = f"its metadata cannot be read: {type(error).__name__}: {error}"
        return Installed(name.removeprefix(_PREFIX), name, _version(distribution), path, problem=problem)


def _announced(distribution: Any, path: str) -> Installed | None:
    metadata, points = distribution.metadata, distribution.entry_points.select(group=GROUP)
    name = normalised_name(metadata.get("Name") or "")
    if not name:
        raise ValueError("it states no name")
    by_value = {point.value: point for point in sorted(points, key=lambda point: (point.name, point.value))}
    backend = Installed(
        name.removeprefix(_PREFIX),
        name,
        metadata.get("Version") or "",
        path,
        tuple(by_value.values()),
        tuple(metadata.get_all("Requires-Dist") or ()),
        metadata.get("Requires-Python") or "",
    )
    return backend if backend.entry_points and backend.modules else None


def _version(distribution: Any) -> str:
    try:
        return str(distribution.version or "")
    except Exception:
        return ""


def _ranked(copies: list[Installed]) -> list[Installed]:
    """Copies of one distribution, in the path's order, as they count: the first is used, the others are shadowed.

    The first folder on the path counts, among copies that can be read. One folder with two copies is what an
    upgrade that was interrupted leaves: the later version counts, in whatever order the folder lists them.
    """
    usable = [copy for copy in copies if not copy.problem] or copies
    folder = PurePath(usable[0].path).parent
    candidates = [copy for copy in usable if PurePath(copy.path).parent == folder]
    used = candidates[0] if len(candidates) == 1 else max(candidates, key=_by_version)
    others = sorted((copy for copy in copies if copy is not used), key=lambda copy: copy.path)
    return [used, *(dataclasses.replace(copy, shadowed_by=f"{used.shipped_as} in {folder}") for copy in others)]


def _by_version(copy: Installed) -> tuple[bool, Any, str]:
    from packaging.version import InvalidVersion, Version

    try:
        return True, Version(copy.version), copy.path
    except InvalidVersion:
        return False, copy.version, copy.path


def _with_names_of_their_own(distributions: Iterable[list[Installed]]) -> Iterator[list[Installed]]:
    """The backends, no two of one name: of two with one short name, the later goes by its distribution's."""
    taken = set[str]()
    for copies in distributions:
        name = copies[0].name
        if name in RESERVED:
            problem = f"a backend cannot be called {name!r}: tileops uses that name itself"
            yield [dataclasses.replace(copy, name=f"{_PREFIX}{name}", problem=problem) for copy in copies]
        elif name in taken:
            yield [dataclasses.replace(copy, name=copy.distribution) for copy in copies]
        else:
            taken.add(name)
            yield copies


def belongs_to(module: str, backend: Installed) -> int:
    """How many leading parts of its dotted name `module` shares with an entry point of `backend`.

    Parts of a namespace package, which distributions share, do not count: 0 where nothing else is shared.
    """
    parts = module.split(".")
    return max((_common(parts, other.split(".")) for other in backend.modules), default=0)


def _common(left: list[str], right: list[str]) -> int:
    count = 0
    for one, other in zip(left, right):
        if one != other:
            break
        count += 1
    return 0 if count and _is_namespace(".".join(left[:count])) else count


def _is_namespace(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and getattr(module, "__file__", None) is None and hasattr(module, "__path__")
