"""What a backend's source declares: hooks, ops, keys, kernel classes. Read as syntax; nothing runs."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Final

from tileops.backend import hooks
from tileops.backend.discovery import GROUP
from tileops.catalogue import IN_TREE_OPS, find_op, meant, op_names
from tileops.cli.doctor.findings import Finding, error, hint, warning
from tileops.cli.doctor.projects import Module, Project, dotted
from tileops.verdict import IN_TREE

Modules = Mapping[str, Module]

_OP: Final = re.compile(r"[A-Z][A-Za-z0-9]*Op")
_KEY: Final = re.compile(r"[a-z][a-z0-9_]*")


def check_declarations(project: Project) -> Iterator[Finding]:
    """Everything that its declarations show."""
    for module in project.modules.values():
        if module.tree is None:
            yield error(module.file, f"it is no Python: {module.problem}", "mend the syntax")
        yield from _check_hooks(module)
    yield from _check_registers(project)
    yield from _check_ops(project.modules)
    yield from _check_keys(project.modules)
    yield from _check_kernel_classes(project.modules)


# ------------------------------------------------------------------------------------------------------ hooks


def _check_registers(project: Project) -> Iterator[Finding]:
    """Something registers: a hook, or a call of one of our functions."""
    nodes = [node for module in project.modules.values() for node in module.nodes()]
    found = any(
        (isinstance(node, ast.FunctionDef) and node.name.startswith(f"{hooks.PROJECT}_"))
        or (isinstance(node, ast.Attribute) and node.attr.startswith("register_"))
        or (isinstance(node, ast.alias) and node.name.startswith("register_"))
        for node in nodes
    )
    if not found and nodes and GROUP in project.groups:
        names = ", ".join(specification.__name__ for specification in hooks.SPECIFICATIONS)
        yield error(project.place, "nothing in it registers anything",
                    f"mark a function with @tileops.backend.hookimpl, called one of: {names}")  # fmt: skip


def _check_hooks(module: Module) -> Iterator[Finding]:
    known = {one.__name__: tuple(inspect.signature(one).parameters) for one in hooks.SPECIFICATIONS}
    for node in module.nodes():
        if not isinstance(node, ast.FunctionDef):
            continue
        marked = any("hookimpl" in dotted(_called(decorator)) for decorator in node.decorator_list)
        if node.name in known:
            yield from _check_hook(module, node, known[node.name], marked=marked)
        elif marked or node.name.startswith(f"{hooks.PROJECT}_register"):
            yield error(module.place(node), f"no hook is called {node.name!r}{meant(node.name, tuple(known))}",
                        f"call it one of: {', '.join(known)}")  # fmt: skip


def _called(decorator: ast.expr) -> ast.expr:
    return decorator.func if isinstance(decorator, ast.Call) else decorator


def _check_hook(module: Module, node: ast.FunctionDef, known: tuple[str, ...], *, marked: bool) -> Iterator[Finding]:
    if not marked:
        yield error(module.place(node), f"{node.name} is never called: it is not marked as a hook",
                    "write @tileops.backend.hookimpl above it")  # fmt: skip
    for argument in node.args.args:
        if argument.arg not in (*known, "self"):
            yield error(module.place(node), f"{node.name} takes {argument.arg!r}, which no hook receives"
                        f"{meant(argument.arg, known)}", f"take any of: {', '.join(known)}")  # fmt: skip


# ----------------------------------------------------------------------------------------------- ops and keys


def _check_ops(modules: Modules) -> Iterator[Finding]:
    """Ops that are named in strings exist, or are the backend's own."""
    known = {*op_names(), *(name for module in modules.values() for name in module.defined_names())}
    for module in modules.values():
        for node in module.nodes():
            name = node.value if isinstance(node, ast.Constant) else None
            if isinstance(name, str) and _OP.fullmatch(name) and name not in known:
                yield warning(module.place(node), f"this release has no op {name!r}{meant(name, op_names())}",
                              "correct the name; or leave it: the registration is kept until a release has the op")  # fmt: skip


def _check_keys(modules: Modules) -> Iterator[Finding]:
    """Keys are well-formed, and those that a kernel wins over are there."""
    nodes = [(module, node) for module in modules.values() for node in module.nodes()]
    preferred = {id(key): (module, key) for module, node in nodes for key in _preferred(node)}
    texts = {node.value for _, node in nodes if isinstance(node, ast.Constant) and id(node) not in preferred}
    known = sorted(_in_tree_keys() | {text for text in texts if isinstance(text, str) and _KEY.fullmatch(text)})
    for module, key in preferred.values():
        if key.value != IN_TREE and ":" not in str(key.value) and key.value not in known:
            yield warning(module.place(key), f"preferred_over names {key.value!r}, a key that is not there"
                          f"{meant(str(key.value), tuple(known))}", "correct the key, or take it out")  # fmt: skip
    for module, node in nodes:
        key = _registered_key(node)
        if key is not None and not _KEY.fullmatch(str(key.value)):
            yield error(module.place(key), f"{key.value!r} is no key", "write letters, digits and underscores in lower "
                        "case, such as 'short_rows'; the backend's name is put before it by the library")  # fmt: skip


def _in_tree_keys() -> set[str]:
    ops = [op for op in map(find_op, IN_TREE_OPS) if op is not None]
    return {key for op in ops for key in op.kernel_types}


def _preferred(node: ast.AST) -> Iterator[ast.Constant]:
    """The keys that a statement `preferred_over = frozenset({…})` writes out."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    if any(isinstance(target, ast.Name) and target.id == "preferred_over" for target in targets):
        found = (inner for inner in ast.walk(node) if isinstance(inner, ast.Constant))
        yield from (key for key in found if isinstance(key.value, str))


def _registered_key(node: ast.AST) -> ast.Constant | None:
    """The key that a call of `register_kernel_type` writes out."""
    if not isinstance(node, ast.Call) or dotted(node.func).rpartition(".")[2] != "register_kernel_type":
        return None
    given = {word.arg: word.value for word in node.keywords}
    key = node.args[1] if len(node.args) > 1 else given.get("key")
    return key if isinstance(key, ast.Constant) else None


# ---------------------------------------------------------------------------------------------------- kernels


def _check_kernel_classes(modules: Modules) -> Iterator[Finding]:
    """A kernel class says where it runs; one that says nothing runs on CUDA devices alone."""
    classes = {
        node.name: (module, node)
        for module in modules.values()
        for node in module.nodes()
        if isinstance(node, ast.ClassDef)
    }
    for module, node in classes.values():
        family = list(_family(node, classes))
        states = any(name in _assigned(one) for one in family for name in ("devices", "supported_archs"))
        if not states and any(_base_name(base) in _interfaces() for one in family for base in one.bases):
            yield hint(module.place(node), f"{node.name} states no devices, so it runs on cuda alone",
                       'write devices = frozenset({"cuda"}), or the device types that it does run on')  # fmt: skip


def _family(node: ast.ClassDef, classes: Mapping[str, tuple[Module, ast.ClassDef]]) -> Iterator[ast.ClassDef]:
    """A class and its bases, as far as the backend defines them."""
    yield node
    for base in node.bases:
        found = classes.get(_base_name(base))
        if found is not None and found[1] is not node:
            yield from _family(found[1], classes)


def _base_name(base: ast.expr) -> str:
    return dotted(base.value if isinstance(base, ast.Subscript) else base).rpartition(".")[2]


def _assigned(node: ast.ClassDef) -> set[str]:
    return {inner.id for statement in node.body for inner in ast.walk(statement) if isinstance(inner, ast.Name)}


def _interfaces() -> set[str]:
    ops = [op for op in map(find_op, IN_TREE_OPS) if op is not None]
    return {interface.__name__ for op in ops for interface in op.interfaces.values()}
