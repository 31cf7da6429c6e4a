"""Whether a backend may be imported here, from its metadata alone."""

from __future__ import annotations

import functools
import importlib.metadata
import operator
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from tileops.backend.discovery import Installed, normalised_name

_OURS: Final = ("tileops-core", "tileops")
"""The names by which a backend requires us; the second is the public library's, which has the same protocol."""

_REQUIREMENT: Final = re.compile(r"\s*([A-Za-z0-9._-]+)(.*)", re.DOTALL)
_CLAUSE: Final = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*([0-9]+(?:\.[0-9]+)*)\s*")
_OF_AN_EXTRA: Final = re.compile(r"""\s*extra\s*==\s*(["'])[A-Za-z0-9._-]+\1\s*""")  # a whole marker
_COMPARISONS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def incompatibility(backend: Installed) -> str | None:
    """What `backend` needs and is not here: another Python, another tileops-core. None where all is well.

    A statement that cannot be parsed is no statement: pip would not have installed it.
    """
    return "; ".join(_unmet(backend)) or None


def _unmet(backend: Installed) -> Iterator[str]:
    python = ".".join(map(str, sys.version_info[:3]))
    if not _allows(backend.requires_python, python):
        yield f"needs Python {backend.requires_python}; this is {python}"
    for requirement in backend.requirements:
        stated = _stated_about_us(requirement)
        if stated is not None and not _allows(stated[1], core_version()):
            yield f"needs {stated[0]}{stated[1]}; tileops-core {core_version()} is installed"


def _stated_about_us(requirement: str) -> tuple[str, str] | None:
    """The name and the range of a requirement that concerns us; None for any other, and for one plainly met."""
    begins = _REQUIREMENT.match(requirement)
    if begins is None or normalised_name(begins[1]) not in _OURS or plainly_holds(begins[2], core_version()):
        return None
    if _OF_AN_EXTRA.fullmatch(requirement.partition(";")[2]):
        return None  # nobody who installed the backend alone asked for it
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        parsed = Requirement(requirement)
        applies = parsed.marker is None or parsed.marker.evaluate({"extra": ""})
    except (InvalidRequirement, ValueError):
        return None
    return (parsed.name, str(parsed.specifier)) if applies else None


def _allows(stated: str, version: str) -> bool:
    """Whether the range `stated` holds `version`, a pre-release too. Unknown versions are held by every range."""
    if not version or plainly_holds(stated, version):
        return True
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return SpecifierSet(stated).contains(version, prereleases=True)
    except InvalidSpecifier:
        return True


def plainly_holds(stated: str, version: str) -> bool:
    """Whether comparing numbers is enough to see that the range `stated` holds `version`.

    False says nothing: packaging is asked then, which knows every rule, and takes a third of the time of loading a
    backend to import. It agrees wherever this is true.
    """
    release = _CLAUSE.fullmatch(f"=={version}")
    clauses = [_CLAUSE.fullmatch(clause) for clause in stated.split(",") if clause.strip()]
    return release is not None and all(
        clause is not None and _COMPARISONS[clause[1]](_release(release[2]), _release(clause[2])) for clause in clauses
    )


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a release without the zeros at its end: 3.10 and 3.10.0 are one version."""
    return tuple(map(int, re.sub(r"(\.0+)+$", "", version).split(".")))


@functools.lru_cache(maxsize=1)
def core_version() -> str:
    """The version of the installed tileops-core; empty where it runs without being installed."""
    try:
        return importlib.metadata.version("tileops-core")
    except importlib.metadata.PackageNotFoundError:
        return ""
