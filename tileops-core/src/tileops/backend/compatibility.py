"""Whether a backend may be imported here, from its metadata alone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Final

from tileops.backend.discovery import Installed

_OURS: Final = ("tileops-core", "tileops")
"""The names by which a backend requires us; the second is the public library's, which has the same protocol."""


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
    """The name and the range of a requirement that concerns us; None for any other."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    try:
        parsed = Requirement(requirement)
        concerns = canonicalize_name(parsed.name) in _OURS
        applies = parsed.marker is None or parsed.marker.evaluate({"extra": ""})
    except (InvalidRequirement, ValueError):
        return None
    return (parsed.name, str(parsed.specifier)) if concerns and applies else None


def _allows(stated: str, version: str) -> bool:
    """Whether the range `stated` holds `version`, a pre-release too. Unknown versions are held by every range."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return not version or SpecifierSet(stated).contains(version, prereleases=True)
    except InvalidSpecifier:
        return True


@functools.lru_cache(maxsize=1)
def core_version() -> str:
    """The version of the installed tileops-core; empty where it runs without being installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version("tileops-core")
    except importlib.metadata.PackageNotFoundError:
        return ""
