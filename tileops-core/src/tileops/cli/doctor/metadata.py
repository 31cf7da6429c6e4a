"""What a backend's metadata says, compared with what makes a backend found, loaded and left alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Any, Final

from packaging.requirements import InvalidRequirement, Requirement

from tileops.backend.discovery import GROUP, RESERVED, normalised_name
from tileops.catalogue import meant, nearest
from tileops.cli.doctor.findings import Finding, error, hint, warning
from tileops.cli.doctor.projects import Project, values_of

CORE: Final = "tileops-core"
FOREIGN: Final = "tileops"
"""The distribution of another project that brings a package of our name."""
COMPILERS: Final = ("tilelang", "triton", "tvm")

_REFERENCE: Final = re.compile(r"(?P<module>\w+(\.\w+)*)\s*(:\s*(?P<attribute>\w+(\.\w+)*)\s*)?")
_PREFIX: Final = "tileops-backend-"


def check_metadata(project: Project) -> Iterator[Finding]:
    """Everything that the metadata shows."""
    yield from _check_name(project)
    yield from _check_groups(project)
    yield from _check_requirements(project)
    yield from _check_build_requirements(project)
    yield from _check_typed(project)


def _check_name(project: Project) -> Iterator[Finding]:
    name = normalised_name(project.name)
    if name.removeprefix(_PREFIX) in RESERVED:
        yield error(project.metadata, f"{project.name!r} is a name that tileops uses itself", f"call it {_PREFIX}acme")
    elif not name.startswith(_PREFIX):
        yield warning(project.metadata, f"the distribution is called {project.name!r}, and so is the backend",
                      f"call it {_PREFIX}{name}: the backend is then called {name!r}, and people find it")  # fmt: skip


# ----------------------------------------------------------------------------------------------- entry points


def _check_groups(project: Project) -> Iterator[Finding]:
    right = f'[project.entry-points."{GROUP}"]'
    if GROUP not in project.groups:
        yield _missing_group(project, right)
    elif not project.groups[GROUP]:
        yield error(project.metadata, f"{right} names nothing", f"name the module: {_module_name(project)}")
    for value in values_of(project.groups):
        yield from _check_entry_point(project, value)
    installed = project.installed_groups
    if installed is not None and installed.get(GROUP) != project.groups.get(GROUP):
        yield error(project.metadata, "the installed entry points are older than this file",
                    f"install it again: pip install -e {project.place}")  # fmt: skip


def _missing_group(project: Project, right: str) -> Finding:
    nested: Any = project.groups.get(GROUP.partition(".")[0])
    if isinstance(nested, dict) and "backends" in nested:
        return error(project.metadata, "TOML reads [project.entry-points.tileops.backends] as a group in a group",
                     f"write the group in quotes: {right}")  # fmt: skip
    near = nearest(GROUP, tuple(project.groups))
    if near is not None:
        return error(project.metadata, f"nobody reads the entry-point group {near!r}", f"write {right}")
    return error(project.metadata, f"it has no entry point in the group {GROUP!r}: it is no backend",
                 f"add {right} with {_short_name(project)} = {_module_name(project)!r}")  # fmt: skip


def _short_name(project: Project) -> str:
    return normalised_name(project.name).removeprefix(_PREFIX) or "acme"


def _module_name(project: Project) -> str:
    return normalised_name(project.name).replace("-", "_") or "tileops_backend_acme"


def _check_entry_point(project: Project, value: str) -> Iterator[Finding]:
    place = f"{project.metadata}: {value!r}"
    parts = _REFERENCE.fullmatch(value.strip())
    if parts is None:
        yield error(place, "it is no reference to a module", 'write "package.module" or "package.module:name"')
        return
    module = project.modules.get(parts["module"])
    if module is None:
        near = meant(parts["module"], tuple(project.modules))
        yield error(place, f"the project has no module {parts['module']!r}{near}",
                    "name a module that is there, and see that the build takes it along")  # fmt: skip
    elif parts["attribute"] and module.tree is not None:
        first = parts["attribute"].partition(".")[0]
        known = tuple(module.defined_names())
        if first not in known and "*" not in known:
            yield error(place, f"{module.file} defines no {first!r}{meant(first, known)}",
                        "name what it defines, or the module alone")  # fmt: skip


# ----------------------------------------------------------------------------------------------- requirements


def _check_requirements(project: Project) -> Iterator[Finding]:
    if project.requirements is None:
        yield hint(project.metadata, "its dependencies are only known when it is built",
                   "have the wheel examined, too: tileops backends doctor FILE.whl")  # fmt: skip
        return
    required = dict(_parsed(project.requirements))
    if FOREIGN in required:
        yield error(project.metadata, f"it requires {FOREIGN!r}, the wheel of another project, which overwrites ours",
                    f"require {CORE!r}; the package is called tileops all the same")  # fmt: skip
    if CORE not in required:
        yield error(project.metadata, f"it does not require {CORE}",
                    f'add "{CORE}{_range()}" to its dependencies, so that a release it does not fit is noticed')  # fmt: skip
    else:
        yield from _check_range(project, required[CORE])


def _parsed(requirements: Iterable[str]) -> Iterator[tuple[str, Requirement]]:
    """The requirements without extras' own, by normalised name; those that pip would refuse are its business."""
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield normalised_name(requirement.name), requirement


def _check_range(project: Project, requirement: Requirement) -> Iterator[Finding]:
    present = version(CORE)
    if not requirement.specifier.contains(present, prereleases=True):
        yield error(project.metadata, f"it requires {requirement}, and {CORE} {present} is installed: not loaded here",
                    f"test it with this release and require {CORE}{_range()}, or install a release in its range")  # fmt: skip
    elif not any(one.operator in ("<", "<=", "==", "===", "~=") for one in requirement.specifier):
        yield warning(project.metadata, f"{str(requirement)!r} takes every later release, also one it cannot run with",
                      f'write "{CORE}{_range()}"')  # fmt: skip


def _range() -> str:
    """The range that fits a backend which was written for this release: up to the next minor one."""
    major, minor = version(CORE).split(".")[:2]
    return f">={major}.{minor},<{major}.{int(minor) + 1}"


def _check_build_requirements(project: Project) -> Iterator[Finding]:
    names = [name for name, _ in _parsed(project.build_requirements)]
    for name in ("torch", *COMPILERS):
        if name in names:
            yield warning(f"{project.metadata}: [build-system]", f"building it requires {name}: pip fetches a "
                          f"{name} of its own choice to build with, not the one that is installed",
                          f"compile when the kernel is first built, and take {name} out of requires")  # fmt: skip


def _check_typed(project: Project) -> Iterator[Finding]:
    packages = {name.partition(".")[0] for name, module in project.modules.items() if module.is_package}
    for name in sorted(packages - project.typed):
        yield hint(f"{name}/", "type checkers ignore its annotations: py.typed is missing",
                   f"add an empty file {name}/py.typed")  # fmt: skip
