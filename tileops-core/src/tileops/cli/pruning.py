"""Take parts out of a package's source: what is not wanted, then whatever only that needed.

Nothing here knows the template: a statement that mentions an unwanted name goes, an import that nobody uses goes,
a module that nobody imports goes, until nothing changes. Comments and layout of what stays are kept.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

_BLOCKS: Final = ("body", "orelse", "finalbody", "handlers")
Edit = tuple[int, int, str]
"""Lines to replace, from the first to the one after the last, counted from zero, and the new text."""


def pruned(modules: Mapping[str, str], entry: str, unwanted: Iterable[str]) -> tuple[dict[str, str], frozenset[str]]:
    """The modules of a package without what mentions an unwanted name, and without what is then of no use.

    Args:
        modules: Dotted name → source.
        entry: The module that everything is reached from.
        unwanted: Names: of functions, classes, modules that are imported, or words in strings.

    Returns:
        The modules that stay, and every name that went with the others.
    """
    kept, gone = dict(modules), frozenset(unwanted)
    while True:
        before = kept
        for name, source in before.items():
            text, lost = without(source, gone)
            kept = {**kept, name: without_unused_imports(text)}
            gone |= lost
        reached = _reached(kept, entry)
        gone |= {name for name in kept if name not in reached}
        kept = {name: source for name, source in kept.items() if name in reached}
        if kept == before:
            return kept, gone | (_names_of(modules) - _names_of(kept))


def without(source: str, unwanted: frozenset[str], *, whole: bool = False) -> tuple[str, frozenset[str]]:
    """A module without the statements that mention an unwanted name, and the names that those defined.

    Args:
        source: The module.
        unwanted: The names.
        whole: Take out the statement of the module that mentions one, not the smallest statement inside it.
    """
    tree = ast.parse(source)
    imports = {id(node): node for node in tree.body if isinstance(node, ast.ImportFrom)}
    doomed = [node for node in _doomed(tree.body, unwanted, whole=whole) if id(node) not in imports]
    edits = [edit for node in imports.values() for edit in _without_aliases(node, unwanted)]
    edits += [_removal(source, node) for node in doomed]
    lost = {name for node in doomed if node in tree.body for name in _bound(node)}
    lost |= {name for node in imports.values() for name in _unwanted_aliases(node, unwanted)}
    return _edited(source, edits), frozenset(lost)


def without_unused_imports(source: str) -> str:
    """A module without the names that it imports from elsewhere and never uses."""
    tree = ast.parse(source)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    edits = list[Edit]()
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)) and getattr(node, "module", "") != "__future__":
            edits += _kept_aliases(node, [alias for alias in node.names if _binding(alias) in used])
    return _edited(source, edits)


def mentions(node: ast.AST, names: frozenset[str]) -> bool:
    """Whether code, as opposed to a docstring, mentions one of the names."""
    return any(not names.isdisjoint(_words(inner)) for inner in _code(node))


def _words(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.findall(r"\w+", node.value)
    return []


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """A node and everything in it, but for docstrings."""
    yield node
    for inner in ast.iter_child_nodes(node):
        if not _is_docstring(inner):
            yield from _code(inner)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _doomed(body: list[ast.stmt], unwanted: frozenset[str], *, whole: bool) -> Iterator[ast.stmt]:
    """The statements to take out of a block: a compound one whole where a block of it would be left empty."""
    for statement in body:
        if not mentions(statement, unwanted):
            continue
        blocks: list[list[ast.stmt]] = [getattr(statement, name, []) for name in _BLOCKS]
        inner = [node for block in blocks for node in _doomed(block, unwanted, whole=False)]
        if whole or _head_mentions(statement, unwanted) or any(_is_emptied(block, inner) for block in blocks):
            yield statement
        else:
            yield from inner


def _head_mentions(statement: ast.stmt, unwanted: frozenset[str]) -> bool:
    """Whether a statement itself, as opposed to the blocks in it, mentions an unwanted name."""
    nested = {id(node) for name in _BLOCKS for node in getattr(statement, name, [])}
    parts = [node for node in ast.iter_child_nodes(statement) if id(node) not in nested]
    return not unwanted.isdisjoint(_words(statement)) or any(mentions(part, unwanted) for part in parts)


def _is_emptied(block: list[ast.stmt], doomed: list[ast.stmt]) -> bool:
    return bool(block) and all(node in doomed or _is_docstring(node) for node in block)


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module defines."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _names_of(modules: Mapping[str, str]) -> frozenset[str]:
    """Everything that the modules define."""
    trees = map(ast.parse, modules.values())
    return frozenset(name for tree in trees for statement in tree.body for name in _bound(statement))


def _binding(alias: ast.alias) -> str:
    return (alias.asname or alias.name).partition(".")[0]


def _unwanted_aliases(node: ast.ImportFrom, unwanted: frozenset[str]) -> list[str]:
    return [_binding(alias) for alias in node.names if node.module in unwanted or alias.name in unwanted]


def _without_aliases(node: ast.ImportFrom, unwanted: frozenset[str]) -> Iterator[Edit]:
    lost = _unwanted_aliases(node, unwanted)
    yield from _kept_aliases(node, [alias for alias in node.names if _binding(alias) not in lost])


def _kept_aliases(node: ast.Import | ast.ImportFrom, kept: list[ast.alias]) -> Iterator[Edit]:
    """The edit that leaves only `kept` of an import."""
    if len(kept) == len(node.names):
        return
    end = node.end_lineno or node.lineno
    if not kept:
        yield node.lineno - 1, end, ""
    elif isinstance(node, ast.Import):
        yield node.lineno - 1, end, f"{ast.unparse(ast.Import(kept))}\n"
    else:
        yield node.lineno - 1, end, f"{ast.unparse(ast.ImportFrom(node.module, kept, node.level))}\n"


def _removal(source: str, statement: ast.stmt) -> Edit:
    """The edit that takes a statement out, with its decorators and the comment right above it."""
    lines = source.splitlines()
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(decorator.lineno for decorator in decorators)]) - 1
    while first and lines[first - 1].strip().startswith("#"):
        first -= 1
    return first, statement.end_lineno or statement.lineno, ""


def _edited(source: str, edits: Iterable[Edit]) -> str:
    lines = source.splitlines(keepends=True)
    for first, end, text in sorted(edits, reverse=True):
        above, below = _blank_lines(lines[:first][::-1]), _blank_lines(lines[end:])
        if text:
            lines[first:end] = [text]
        elif above <= below:
            del lines[first - above : end]
        else:
            del lines[first : end + below]
    return "".join(lines).rstrip() + "\n"


def _blank_lines(lines: list[str]) -> int:
    return next((count for count, line in enumerate(lines) if line.strip()), len(lines))


def _reached(modules: Mapping[str, str], entry: str) -> frozenset[str]:
    """The modules that `entry` imports, at once or later, and what those import."""
    reached, steps = set[str](), [entry]
    while steps:
        step = steps.pop()
        if step in modules and step not in reached:
            reached.add(step)
            steps += imported_modules(modules[step])
    return frozenset(reached)


def imported_modules(source: str) -> Iterator[str]:
    """What a module imports, anywhere in it; of `from a import b`, both `a` and `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
