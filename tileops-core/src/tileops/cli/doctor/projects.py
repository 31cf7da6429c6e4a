"""A backend as its files say: a project's folder, a wheel, or what is installed. Nothing of it is imported."""

from __future__ import annotations

import ast
import configparser
import dataclasses
import email
import importlib
import importlib.metadata
import json
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from tileops.backend.discovery import GROUP, installed_backends, normalised_name
from tileops.cli.arguments import UsageError

toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
"""Reads TOML: in the standard library since Python 3.11."""

Groups = Mapping[str, Mapping[str, str]]
Files = Mapping[str, Callable[[], bytes]]
"""Files by their path from where imports begin, each with what reads it."""


@dataclasses.dataclass(frozen=True)
class Module:
    """One module of a backend.

    Args:
        name: Its dotted name.
        file: The file that holds it, for messages.
        tree: What it says; None where it is no Python.
        problem: Why it is none.
        is_package: Whether it is the `__init__` of a package.
    """

    name: str
    file: str
    tree: ast.Module | None
    problem: str = ""
    is_package: bool = False

    def place(self, node: ast.AST) -> str:
        """The file and line of a node, for messages."""
        return f"{self.file}:{getattr(node, 'lineno', 1)}"

    def nodes(self) -> Iterator[ast.AST]:
        """Everything in it."""
        return iter(()) if self.tree is None else ast.walk(self.tree)

    def defined_names(self) -> Iterator[str]:
        """The names that it defines or imports, anywhere; `*` where it imports all of another."""
        for node in self.nodes():
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.alias):
                yield (node.asname or node.name).partition(".")[0]


@dataclasses.dataclass(frozen=True)
class Project:
    """A backend, installed or not.

    Args:
        place: What was examined, for messages: a folder, a file, a distribution.
        metadata: The file that states the metadata, for messages.
        name: The distribution's name.
        version: Its version.
        requirements: What it requires; None where that is only known when it is built.
        groups: Its entry points, by group.
        modules: The modules of the packages that its entry points name.
        typed: The packages among them that are marked as typed.
        build_requirements: What building it requires; nothing where it is built already.
        installed_groups: Where it is installed from this folder, the entry points that were installed.
    """

    place: str
    metadata: str
    name: str
    version: str
    requirements: tuple[str, ...] | None
    groups: Groups
    modules: Mapping[str, Module]
    typed: frozenset[str]
    build_requirements: tuple[str, ...] = ()
    installed_groups: Groups | None = None

    @property
    def title(self) -> str:
        """The distribution and where it was found."""
        return f"{self.name} {self.version} ({self.place})"


def read_project(text: str) -> Project:
    """The backend in a folder, in a wheel, or installed under a name.

    Raises:
        UsageError: There is none, or its metadata cannot be read.
    """
    path = Path(text)
    if path.suffix == ".whl":
        return _from_wheel(path)
    if (path / "pyproject.toml").is_file():
        return _from_folder(path)
    installed = _installed(normalised_name(text))
    if installed is not None:
        return installed
    if path.is_dir():
        raise UsageError(
            f"{text} has no pyproject.toml; give the folder that has it, or a wheel: pip wheel --no-deps {text}"
        )
    known = ", ".join(backend.name for backend in installed_backends()) or "none"
    raise UsageError(f"{text} is no folder, no wheel and no installed backend; installed: {known}")


# --------------------------------------------------------------------------------------------------- a folder


def _from_folder(folder: Path) -> Project:
    metadata = folder / "pyproject.toml"
    try:
        content: dict[str, Any] = toml.loads(metadata.read_text(encoding="utf-8"))
    except ValueError as error:  # of which those about TOML and about UTF-8 are kinds
        raise UsageError(f"{metadata} cannot be read: {error}") from None
    stated: dict[str, Any] = content.get("project", {})
    if not stated or "entry-points" in stated.get("dynamic", ()):
        raise UsageError(f"{metadata} does not state its entry points under [project]; build a wheel and give that: "
                         f"pip wheel --no-deps {folder}")  # fmt: skip
    groups = stated.get("entry-points", {})
    files = _project_files(folder, content)
    tops = _top_names(groups)
    return Project(
        place=str(folder),
        metadata=metadata.name,
        name=stated.get("name", ""),
        version=stated.get("version", ""),
        requirements=None if "dependencies" in stated.get("dynamic", ()) else tuple(stated.get("dependencies", ())),
        groups=groups,
        modules=_modules(files, tops),
        typed=_typed(files, tops),
        build_requirements=tuple(content.get("build-system", {}).get("requires", ())),
    )


def _project_files(folder: Path, content: Mapping[str, Any]) -> Files:
    """The Python packages of a project: in `src`, beside pyproject.toml, or where hatch is told they are."""
    hatch = content.get("tool", {}).get("hatch", {}).get("build", {}).get("targets", {}).get("wheel", {})
    roots = [folder / "src", folder, *((folder / package).parent for package in hatch.get("packages", ()))]
    found = dict[str, Callable[[], bytes]]()
    for root in dict.fromkeys(roots):
        for top in sorted(root.iterdir()) if root.is_dir() else ():
            inside = [top] if top.suffix == ".py" else sorted(top.rglob("*")) if (top / "__init__.py").is_file() else []
            for path in inside:
                found.setdefault(path.relative_to(root).as_posix(), path.read_bytes)
    return found


# ------------------------------------------------------------------------------------ what is built, installed


def _from_wheel(path: Path) -> Project:
    try:
        wheel = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} cannot be read as a wheel: {error}") from None
    names = wheel.namelist()
    described = next((name for name in names if name.endswith(".dist-info/METADATA")), None)
    if described is None:
        raise UsageError(f"{path} cannot be read as a wheel: it has no metadata")
    folder = described.rpartition("/")[0]

    def text(name: str) -> str:
        return wheel.read(f"{folder}/{name}").decode() if f"{folder}/{name}" in names else ""

    files: Files = {name: lambda name=name: wheel.read(name) for name in names}
    return _built(str(path), text("METADATA"), text("entry_points.txt"), files)


def _installed(name: str) -> Project | None:
    """An installed distribution, by a name of its backend or by its own."""
    aliases = {alias: backend.distribution for backend in reversed(installed_backends()) for alias in backend.aliases}
    try:
        found: Any = importlib.metadata.distribution(aliases.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        return None
    points = found.read_text("entry_points.txt") or ""
    source = _editable_source(found.read_text("direct_url.json"))
    if source is not None and (source / "pyproject.toml").is_file():
        return dataclasses.replace(_from_folder(source), installed_groups=_groups(points, str(source)))
    files: Files = {str(file): file.read_binary for file in found.files or ()}
    return _built(f"{found.metadata['Name']} {found.version}", found.read_text("METADATA") or "", points, files)


def _editable_source(text: str | None) -> Path | None:
    """The folder that an editable install reads its modules from."""
    direct: dict[str, Any] = json.loads(text or "{}")
    if not direct.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlsplit(str(direct.get("url"))).path))


def _built(place: str, metadata: str, entry_points: str, files: Files) -> Project:
    headers = email.message_from_string(metadata)
    groups = _groups(entry_points, place)
    tops = _top_names(groups)
    return Project(
        place=place,
        metadata="METADATA",
        name=headers["Name"] or "",
        version=headers["Version"] or "",
        requirements=tuple(map(str, headers.get_all("Requires-Dist", []))),
        groups=groups,
        modules=_modules(files, tops),
        typed=_typed(files, tops),
    )


def _groups(text: str, place: str) -> Groups:
    parser = configparser.ConfigParser(delimiters="=", interpolation=None)
    cast("Any", parser).optionxform = str
    try:
        parser.read_string(text)
    except configparser.Error as error:
        raise UsageError(f"the entry_points.txt of {place} cannot be read: {error.message.splitlines()[0]}") from None
    return {group: dict(parser[group]) for group in parser.sections()}


# ---------------------------------------------------------------------------------------------------- modules


def values_of(groups: Mapping[str, Any]) -> Iterable[str]:
    """The values of entry points that are ours, or were meant to be: of every group that speaks of tileops."""
    for group, points in groups.items():
        if normalised_name(group).startswith(GROUP.partition(".")[0]):
            nested: Mapping[str, str] | str = points.get("backends", points)
            yield from (nested if isinstance(nested, dict) else points).values()


def _top_names(groups: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(value.partition(":")[0].strip().partition(".")[0] for value in values_of(groups))


def _modules(files: Files, tops: frozenset[str]) -> dict[str, Module]:
    """The modules of the packages called `tops`."""
    found = dict[str, Module]()
    for path, read in sorted(files.items()):
        parts = path.removesuffix(".py").split("/")
        if path.endswith(".py") and parts[0] in tops:
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            tree, problem = _parsed(read())
            found[name] = Module(name, path, tree, problem, is_package)
    return found


def _parsed(source: bytes) -> tuple[ast.Module | None, str]:
    try:
        return ast.parse(source), ""
    except (SyntaxError, ValueError) as error:
        return None, str(error)


def _typed(files: Files, tops: frozenset[str]) -> frozenset[str]:
    return frozenset(top for top in tops if f"{top}/py.typed" in files)


def dotted(node: ast.expr) -> str:
    """An expression such as `tileops.backend.hookimpl` as text; `?` for what is no name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"
