"""What a backend imports: no compiler when it is loaded, and of tileops what is public. Nothing runs."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from tileops.catalogue import meant
from tileops.cli.doctor.findings import Finding, error
from tileops.cli.doctor.metadata import COMPILERS
from tileops.cli.doctor.projects import Module, Project, dotted, values_of
from tileops.cli.doctor.public_names import all_modules, names_of, public_home, public_modules

_PUBLIC_LIST: Final = "docs/guide/compatibility.md lists what is public"


def check_imports(project: Project) -> Iterator[Finding]:
    """Everything that its imports show."""
    entries = [value.partition(":")[0].strip() for value in values_of(project.groups)]
    yield from _check_compilers(project.modules, entries)
    for module in project.modules.values():
        yield from _check_origins(module)


def _check_compilers(modules: Mapping[str, Module], entries: Iterable[str]) -> Iterator[Finding]:
    """Nothing that is imported when the backend is loaded imports a compiler."""
    seen, steps = set[str](), list(entries)
    while steps:
        module = modules.get(steps.pop())
        if module is None or module.name in seen:
            continue
        seen.add(module.name)
        steps.append(module.name.rpartition(".")[0])
        for node in _at_import(module.tree.body if module.tree else ()):
            names = list(_imported(node, module))
            steps += names
            for compiler in COMPILERS:
                if any(name.partition(".")[0] == compiler for name in names):
                    yield error(module.place(node), f"{compiler} is imported when the backend is loaded: every program waits for it",
                                "import it in the function that builds the kernel, or in a module that only that imports")  # fmt: skip


def _at_import(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported, those of type checkers left out."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            yield from _at_import(statement.orelse)
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from _at_import(getattr(statement, name, ()))
        for handler in getattr(statement, "handlers", ()):
            yield from _at_import(handler.body)


def _imported(node: ast.AST, module: Module) -> Iterator[str]:
    """The modules that a statement may import; of `from a import b`, both `a` and `a.b`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        source = _source_of(node, module)
        yield source
        yield from (f"{source}.{alias.name}" for alias in node.names)


def _source_of(node: ast.ImportFrom, module: Module) -> str:
    """The module that names are imported from, also where it is given relative to this one."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    package = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*package, *filter(None, [node.module])])


def _check_origins(module: Module) -> Iterator[Finding]:
    """What is imported from tileops is there, and public."""
    for node in module.nodes():
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _check_module(module, node, alias.name)
        elif isinstance(node, ast.ImportFrom) and _is_ours(node.module or "") and not node.level:
            yield from _check_names(module, node, node.module or "")
        elif isinstance(node, ast.Attribute):
            yield from _check_attribute(module, node)


def _is_ours(name: str) -> bool:
    return name == "tileops" or name.startswith("tileops.")


def _check_module(module: Module, node: ast.AST, name: str) -> Iterator[Finding]:
    if not _is_ours(name) or name in public_modules():
        return
    if name in all_modules():
        yield error(module.place(node), f"{name} is private: it may change in any release", _PUBLIC_LIST)
    else:
        yield error(module.place(node), f"tileops has no module {name!r}{meant(name, public_modules())}", _PUBLIC_LIST)


def _check_names(module: Module, node: ast.ImportFrom, source: str) -> Iterator[Finding]:
    if source not in all_modules():
        yield from _check_module(module, node, source)
        return
    public = source in public_modules()
    for alias in node.names:
        inner = f"{source}.{alias.name}"
        if (public and alias.name in names_of(source)) or inner in public_modules():
            continue
        if inner in all_modules():
            yield from _check_module(module, node, inner)
            continue
        home = public_home(alias.name)
        mend = _PUBLIC_LIST if home is None else f"write: from {home} import {alias.name}"
        if public:
            near = meant(alias.name, names_of(source))
            yield error(module.place(node), f"{source} has no public name {alias.name!r}{near}", mend)
        else:
            yield error(module.place(node), f"{inner} is private: it may change in any release", mend)


def _check_attribute(module: Module, node: ast.Attribute) -> Iterator[Finding]:
    """`tileops.backend.loading.load`, written out: a private module, or a name with an underscore."""
    name = dotted(node)
    if not _is_ours(name):
        return
    leads_on = any(f"{module}.".startswith(f"{name}.") for module in public_modules())
    is_underscored = node.attr.startswith("_") and not node.attr.endswith("__")
    if is_underscored or (name in all_modules() and not leads_on):
        yield error(module.place(node), f"{name} is private: it may change in any release", _PUBLIC_LIST)
