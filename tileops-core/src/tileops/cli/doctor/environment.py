"""What is wrong in the environment that this runs in: whose package `tileops` is, and what became of backends."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from packaging.requirements import InvalidRequirement, Requirement

import tileops
from tileops.backend import BackendRecord, status
from tileops.backend.discovery import installed_backends, normalised_name
from tileops.backend.policy import POLICY_VARIABLE, Policy
from tileops.backend.registration import registry
from tileops.catalogue import meant
from tileops.cli.doctor.findings import Finding, error, warning
from tileops.cli.doctor.metadata import CORE, FOREIGN
from tileops.errors import BackendError, RegistrationError

_OUR_FILE: Final = "tileops/__init__.py"
_REINSTALL: Final = f"pip install --force-reinstall --no-deps {CORE}"


@dataclasses.dataclass(frozen=True)
class Distribution:
    """An installed distribution, as far as it concerns us.

    Args:
        name: Its normalised name.
        version: Its version.
        path: Where its metadata lies.
        owns_package: Whether it installed `tileops/__init__.py`.
        requires_foreign: Whether it requires the distribution `tileops`.
    """

    name: str
    version: str
    path: str
    owns_package: bool
    requires_foreign: bool


def check_environment() -> Iterator[Finding]:
    """Everything about this environment."""
    found = distributions()
    yield from check_owners(found)
    yield from check_requirements(found)
    yield from check_policy()
    try:
        records = loaded_records()
    except BackendError:
        return  # the variable cannot be read, which is a finding above
    for record in records:
        yield from check_record(record)


def loaded_records() -> tuple[BackendRecord, ...]:
    """What became of each backend; also where a strict load makes an error of what the records say."""
    try:
        return status()
    except BackendError:
        if not registry().loaded:
            raise
        return registry().records


# ---------------------------------------------------------------------------------------------- distributions


def distributions() -> list[Distribution]:
    """Every distribution on the path whose metadata can be read."""
    read = [_read(one) for one in importlib.metadata.distributions()]
    return [one for one in read if one is not None]


def _read(distribution: Any) -> Distribution | None:
    try:
        name = normalised_name(distribution.metadata["Name"])
        record: str = distribution.read_text("RECORD") or ""
        owns = any(line.partition(",")[0] == _OUR_FILE for line in record.splitlines())
        requires = any(_requires_foreign(text) for text in distribution.requires or ())
        return Distribution(name, distribution.version, str(getattr(distribution, "_path", "")), owns, requires)
    except Exception:  # somebody's broken metadata: pip says so, and it is not what was asked
        return None


def _requires_foreign(text: str) -> bool:
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return False
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    return wanted and normalised_name(requirement.name) == FOREIGN


def check_owners(found: Sequence[Distribution]) -> Iterator[Finding]:
    """The package `tileops` belongs to one distribution, ours, of which there is one."""
    for other in found:
        if other.name == FOREIGN or (other.owns_package and other.name != CORE):
            wrote = "has overwritten files of" if other.owns_package else "has the package name of"
            yield error(f"{other.name} {other.version}", f"it {wrote} {CORE}: both bring a package called tileops",
                        f"pip uninstall {other.name}, then {_REINSTALL}")  # fmt: skip
    cores = [one for one in found if one.name == CORE]
    folders = {str(Path(one.path).parent): one for one in cores}
    if len(folders) > 1:
        shown = ", ".join(f"{one.version} in {folder}" for folder, one in folders.items())
        yield error(CORE, f"it is installed {len(folders)} times: {shown}; the first on the path is imported",
                    f"pip uninstall {CORE} until none is left, then install one")  # fmt: skip
    if cores and cores[0].owns_package and not _is_imported(cores[0]):
        yield error(CORE, f"{tileops.__file__} is imported, which it did not install",
                    "take that folder off PYTHONPATH, or install from it: pip install -e FOLDER")  # fmt: skip


def _is_imported(core: Distribution) -> bool:
    return Path(core.path).parent.joinpath(_OUR_FILE).resolve() == Path(tileops.__file__).resolve()


def check_requirements(found: Sequence[Distribution]) -> Iterator[Finding]:
    """Nothing installed requires the other project's wheel, which pip would install over ours."""
    for one in found:
        if one.requires_foreign:
            yield error(f"{one.name} {one.version}", f"it requires {FOREIGN!r}, the wheel of another project, which "
                        "overwrites ours when pip installs it",
                        f"ask its author to require {CORE}; until then, pip install --no-deps {one.name}")  # fmt: skip


# --------------------------------------------------------------------------------------------------- backends


def check_policy() -> Iterator[Finding]:
    """TILEOPS_BACKENDS can be read, and names what is installed."""
    text = os.environ.get(POLICY_VARIABLE)
    try:
        policy = Policy.from_text(text)
    except RegistrationError as mixed:
        yield error(POLICY_VARIABLE, str(mixed), "no backend is loaded until it is mended")
        return
    backends = installed_backends()
    known = tuple(backend.name for backend in backends)
    for name in policy.unknown_names(backends):
        yield warning(POLICY_VARIABLE, f"it names {name!r}, which no installed backend is called{meant(name, known)}",
                      f"correct it; installed: {', '.join(known) or 'none'}")  # fmt: skip


_IS_ERROR: Final = frozenset({"failed", "incompatible"})
_IS_WARNING: Final = frozenset({"empty", "shadowed"})
"""The states of a backend that somebody did not intend. Loaded, disabled and declined are as they should be."""


def check_record(record: BackendRecord) -> Iterator[Finding]:
    """What became of a backend, and what it registered that nothing uses."""
    state = record.state.value
    if state in _IS_ERROR or state in _IS_WARNING:
        said = error if state in _IS_ERROR else warning
        yield said(record.title, f"{state}: {record.reason}", _mend(record))
    for note in record.notes:
        if "unknown here" in note or "does not have" in note:
            yield warning(record.title, note, "an update of it, or of tileops-core, may mend it; it harms nothing")


def _mend(record: BackendRecord) -> str:
    mends = {
        "failed": f"tileops backends list --verbose shows the traceback; reinstall or uninstall {record.distribution}, "
        f"or leave it out with {POLICY_VARIABLE}=-{record.name}",
        "incompatible": f"install a release of {record.distribution} that fits tileops-core {tileops.__version__}",
        "empty": f"tileops backends doctor {record.name} may say why; else ask its author",
        "shadowed": f"uninstall the copy that is not meant: pip uninstall {record.distribution}",
    }
    return mends[record.state.value]
