"""Statements: what a program says about whose kernels are taken, and the names that it may say it by.

A name is a backend's (`acme`; also `in-tree` and `local`), or the full key of a kernel or of a target
(`held_row`, `acme:row`). A statement is checked against what exists, and then holds each name as the registry
has it: an owner's name, or an owner's name and a key.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Final, NoReturn, cast

from tileops.backend.loading import load
from tileops.backend.records import State
from tileops.backend.registration import registry, when_registry_changes
from tileops.backend.units import LOCAL
from tileops.catalogue import find_op, meant, op_names
from tileops.errors import ScopeError
from tileops.verdict import IN_TREE

Names = str | Sequence[str] | None
"""One name, several, or none."""

_PARTS: Final = ("prefer", "exclude", "require")


@dataclasses.dataclass(frozen=True)
class Statement:
    """What one line of a program says about whose kernels are taken.

    Args:
        prefer: Whose are taken where several serve a call, the first before the second, all before the rest.
        exclude: Whose are never taken.
        require: Whose alone are taken: any of these.
        op: The op that it concerns, with its subclasses, by its class's name; None for every op.
        said_by: The function of `tileops` that said it.
    """

    prefer: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    op: str | None = None
    said_by: str = "selection"

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing."""
        return not (self.prefer or self.exclude or self.require)

    def __str__(self) -> str:
        """As a program writes it: `tileops.selection(prefer="acme")`."""
        said = [f"{part}={_as_code(getattr(self, part))}" for part in _PARTS if getattr(self, part)]
        said += [] if self.op is None else [f'op="{self.op}"']
        return f"tileops.{self.said_by}({', '.join(said)})"


def _as_code(names: tuple[str, ...]) -> str:
    quoted = ['"' + name.removeprefix(f"{IN_TREE}:") + '"' for name in names]
    return quoted[0] if len(quoted) == 1 else f"({', '.join(quoted)})"


def stated(said_by: str, prefer: Names, exclude: Names, require: Names, op: str | None) -> Statement:
    """The statement that these arguments make. Its names are not checked yet.

    Raises:
        ScopeError: An argument is neither a name nor a sequence of names.
    """
    return Statement(_names("prefer", prefer), _names("exclude", exclude), _names("require", require), op, said_by)


def _names(part: str, given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    names = cast("Sequence[Any]", [given] if isinstance(given, str) else given)
    if not isinstance(given, Sequence) or not all(isinstance(name, str) for name in names):
        raise ScopeError(f'{part}={given!r} is neither a name nor a list of names; write {part}="acme"')
    return tuple(dict.fromkeys(names))


def resolved(statement: Statement) -> Statement:
    """The statement with each name as the registry has it. Loads backends.

    Raises:
        ScopeError: A name that nothing has, or one of a backend that is installed and takes no part. To exclude
            the latter is no error.
    """
    load()
    if not registry().loaded:
        raise ScopeError(f"{statement}: backends are being loaded; say this where ops are called")
    return _resolved(statement)


@functools.lru_cache(maxsize=1024)
def _resolved(statement: Statement) -> Statement:
    _check_op(statement)
    names = {part: tuple(_found(statement, part, name) for name in getattr(statement, part)) for part in _PARTS}
    return dataclasses.replace(statement, **names)


when_registry_changes(_resolved.cache_clear)


def _check_op(statement: Statement) -> None:
    known = tuple(sorted({*op_names(), *(op for unit in registry().units.values() for op, _ in unit.named())}))
    if statement.op is not None and statement.op not in known:
        raise ScopeError(
            f"{statement}: no op is called {statement.op!r}; known ops: {', '.join(known)}{meant(statement.op, known)}"
        )


def _found(statement: Statement, part: str, name: str) -> str:
    """What the registry calls `name`. Of a backend and an in-tree key with one name, the backend is meant."""
    owners = _owners()
    before, colon, key = name.partition(":")
    if not colon and name not in owners:
        before, colon, key = IN_TREE, ":", name
    owner = owners.get(before)
    if owner is None:
        _refuse(statement, name)
    record = registry().record_of(owner)
    if record is not None and record.state is not State.LOADED:
        if part == "exclude":
            return f"{owner}{colon}{key}"
        raise ScopeError(f"{statement}: backend {record.title} takes no part ({record.state.value}): {record.reason}")
    if colon and (owner, key) not in _keys(statement.op):
        _refuse(statement, name)
    return f"{owner}{colon}{key}"


def _owners() -> dict[str, str]:
    """The names of owners, and of their distributions, with the owner each means."""
    records = registry().records
    names = (IN_TREE, LOCAL.name, *registry().units, *(record.name for record in records))
    return {record.distribution: record.name for record in records} | {name: name for name in names}


def _keys(op: str | None) -> set[tuple[str, str]]:
    """The owners and keys of the kernels and targets of one op, or of all."""
    return {pair for name in (op_names() if op is None else (op,)) for pair in _keys_of(name)}


def _keys_of(op: str) -> Iterator[tuple[str, str]]:
    cls = find_op(op)
    names = {op} if cls is None else {base.__name__ for base in cls.__mro__}
    if cls is not None:
        yield from ((IN_TREE, key) for key in cls.kernel_types)
    for unit in registry().units.values():
        yield from ((unit.owner.name, key) for name, key in unit.named() if name in names)


def _refuse(statement: Statement, name: str) -> NoReturn:
    """Raise for an unknown name: with what its backend has, where that is known, else with everything."""
    owner = _owners().get(name.partition(":")[0])
    keys = sorted(_keys(statement.op), key=lambda pair: (pair[0] != IN_TREE, pair))
    full = [key if of == IN_TREE else f"{of}:{key}" for of, key in keys if owner in (None, of)]
    backends = () if owner is not None else tuple(sorted(set(_owners().values())))
    listed = f"backends: {', '.join(backends)}; " if backends else ""
    of_op = "" if statement.op is None else f" of {statement.op}"
    raise ScopeError(
        f"{statement}: nothing is called {name!r}; {listed}kernels and targets{of_op}: {', '.join(full) or 'none'}"
        f"{meant(name, (*backends, *full))}"
    )
