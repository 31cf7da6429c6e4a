"""Scopes: what a program says, for a while or for good, about whose kernels are taken.

    with tileops.selection(prefer="acme"):
        y = op(x)

A scope is in force in the context that opened it: this thread or this task, and nowhere else. Every look-up
reads which one is in force, one context-variable read, and every miss hands it to `select`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from typing import Any, Final, TypeVar, cast

from torch.compiler import is_dynamo_compiling

from tileops.backend.registration import registry, update_registry
from tileops.backend.statements import Names, Statement, resolved, stated
from tileops.backend.units import Implementation
from tileops.errors import ScopeError
from tileops.verdict import Answer

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True, eq=False)
class Scope:
    """Statements that hold together. A key of look-ups, by its identity.

    Whoever is asked about has an owner, such as `in-tree` or `acme`, and a key: a kernel's without the owner's
    name, or a target's name.

    Args:
        statements: What is said, the innermost first, the process default last.
    """

    statements: tuple[Statement, ...] = ()

    def admits(self, owner: str, key: str) -> tuple[Answer, str | None]:
        """Whether a kernel or a target may be taken at all, and why not."""
        for said in self.statements:
            if _among(said.exclude, owner, key):
                return Answer.EXCLUDED, f"excluded by {said}"
            if said.require and not _among(said.require, owner, key):
                return Answer.NOT_REQUIRED, f"not what {said} requires"
        return Answer.SERVES, None

    def rank(self, owner: str, key: str) -> int:
        """The place in the order of preference: lower is taken first; what nobody prefers is last."""
        preferred = [name for said in self.statements for name in said.prefer]
        return next((at for at, name in enumerate(preferred) if _among((name,), owner, key)), len(preferred))

    def favour(self, owner: str, key: str) -> str | None:
        """What speaks for it: `preferred by tileops.selection(prefer="acme")`; None where nothing does."""
        for said in self.statements:
            if _among(said.prefer, owner, key):
                return f"preferred by {said}"
            if _among(said.require, owner, key):
                return f"required by {said}"
        return None

    def foremost(self, serving: Sequence[Implementation]) -> list[Implementation]:
        """Of implementations that serve a call those that are preferred first; all where none is preferred."""
        ranks = [self.rank(one.owner.name, one.key) for one in serving]
        return [one for one, rank in zip(serving, ranks) if rank == min(ranks)]

    def about(self, ops: Collection[str]) -> Scope:
        """What of it concerns an op that has these names: its class's and its bases'."""
        return Scope(tuple(said for said in self.statements if said.op is None or said.op in ops))


def _among(names: Collection[str], owner: str, key: str) -> bool:
    return owner in names or f"{owner}:{key}" in names


NO_SCOPE: Final = Scope()
"""The scope that says nothing."""

_active: Final[ContextVar[Scope | None]] = ContextVar("tileops_scope", default=None)
_outer: Final[ContextVar[tuple[Scope | None, ...]]] = ContextVar("tileops_outer_scopes", default=())
_interned: Final[weakref.WeakValueDictionary[tuple[Statement, ...], Scope]] = weakref.WeakValueDictionary()
"""The scopes that somebody holds: open ones, and those that look-ups were made under. Equal ones are one object,
so that they share look-ups; a race makes two, which costs a miss."""

active: Final = _active.get
"""`active()` is the scope that is in force here, None without one. Every hit reads it, without a frame."""


def in_effect(op: type[Any]) -> Scope:
    """What holds for an op class now: the open scopes, then the process default."""
    said = (active() or NO_SCOPE).statements + registry().default
    return Scope(said).about({base.__name__ for base in op.__mro__}) if said else NO_SCOPE


def opening() -> str:
    """The code that opens the scope in force, before a statement on the same line; nothing without one."""
    said = (active() or NO_SCOPE).statements
    return f"with {', '.join(map(str, reversed(said)))}: " if said else ""


def _inside(outer: Scope | None, statement: Statement) -> Scope | None:
    """The scope of `statement` within `outer`. What is said again moves to the front, so that recursion ends."""
    if statement.is_empty:
        return outer
    others = (said for said in (outer or NO_SCOPE).statements if said != statement)
    statements = (statement, *others)
    return _interned.setdefault(statements, Scope(statements))


# ------------------------------------------------------------------------------------------- opening a scope


class ScopeContext:
    """Opens a scope: `with` it, or decorate a function with it. One can be entered again, also while it is open.

    Args:
        scope: Asked when the scope is opened, in the context that opens it.
    """

    def __init__(self, scope: Callable[[], Scope | None]) -> None:
        self._scope = scope

    def __enter__(self) -> None:
        refuse_in_a_graph()
        scope, before = self._scope(), active()
        _outer.set((*_outer.get(), before))
        _active.set(scope)

    def __exit__(self, *failure: object) -> None:
        *rest, before = _outer.get()
        _outer.set(tuple(rest))
        _active.set(before)

    def __call__(self, func: Function) -> Function:
        """`func`, which runs with the scope open. Of an `async def`, its whole run."""
        if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise ScopeError(
                f"{func.__qualname__} is a generator, whose caller runs between its steps: open the scope inside it"
            )

        @functools.wraps(func)
        def run(*args: Any, **kwargs: Any) -> Any:
            refuse_in_a_graph()  # before `with`, of which dynamo has a sentence of its own
            with self:
                return func(*args, **kwargs)

        @functools.wraps(func)
        async def run_all(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await func(*args, **kwargs)

        return cast("Function", run_all if inspect.iscoroutinefunction(func) else run)


def refuse_in_a_graph() -> None:
    """Refuse to open a scope while dynamo traces. Where it may leave code out of the graph, it leaves this out."""
    if is_dynamo_compiling():
        raise ScopeError(
            "a scope is opened inside what torch.compile(fullgraph=True) compiles, where no node of a graph would be "
            "in it; open it around the compiled call: kernels are selected when the graph runs"
        )


def selection(
    *, prefer: Names = None, exclude: Names = None, require: Names = None, op: str | None = None
) -> ScopeContext:
    """Say whose kernels are taken, in a block or a function. A context manager and a decorator.

    It holds in the thread or task that enters it. A scope within another adds to it: what any of them excludes
    is out, each `require` must be met, and preferences of the inner one come first. None makes a kernel run where
    it is not available or refuses.

    A name is a backend's (`"acme"`, `"local"`, `tileops.IN_TREE`), or a kernel's or target's full key
    (`"acme:row"`, `"held_row"`). An argument is one name or a sequence of them.

    Args:
        prefer: Whose kernel is taken where several serve a call, whatever their own preferences, in this order.
        exclude: Whose kernels are not taken.
        require: Whose kernels alone are taken, any of these; a call that they do not serve is an error.
        op: The op that this concerns, with its subclasses: "LayerNormFwdOp". None for every op.

    Raises:
        ScopeError: When the scope is entered, which loads backends: nothing has such a name, or a backend that
            is preferred or required is installed and takes no part.
    """
    statement = stated("selection", prefer, exclude, require, op)
    return ScopeContext(lambda: _inside(active(), resolved(statement)))


def set_default_selection(
    *, prefer: Names = None, exclude: Names = None, require: Names = None, op: str | None = None
) -> None:
    """Say whose kernels are taken in this process, around every scope. It takes effect at every op's next call.

    It replaces what was said before for the same `op`, and what is said for one op comes before what is said for
    every op. Without names it takes back what was said for `op`; without anything, all that was said.

    Args:
        prefer: As for `selection`.
        exclude: As for `selection`.
        require: As for `selection`.
        op: As for `selection`.

    Raises:
        ScopeError: Nothing has such a name, or a backend that is preferred or required takes no part. What was
            said before stays.
    """
    statement = resolved(stated("set_default_selection", prefer, exclude, require, op))
    everything = statement.is_empty and op is None

    def said(before: tuple[Statement, ...]) -> tuple[Statement, ...]:
        kept = [] if everything else [known for known in before if known.op != op]
        new = [] if statement.is_empty else [statement]
        return tuple(sorted(kept + new, key=lambda one: (one.op is None, one.op)))

    update_registry(lambda old: dataclasses.replace(old, default=said(old.default)))


def in_force(scope: Scope | None) -> ScopeContext:
    """Put a scope in force again, in place of the one that is: `in_force(active())` of an earlier moment."""
    return ScopeContext(lambda: scope)


def checkpoint_contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """The contexts of a checkpoint's forward and of its recomputation, which gets the forward's scope.

        checkpoint(block, x, use_reentrant=False, context_fn=tileops.checkpoint_contexts)

    Returns:
        What `context_fn` of `torch.utils.checkpoint.checkpoint` returns. Without it the recomputation runs with
        the scope, if any, that is open around `backward()`.
    """
    return contextlib.nullcontext(), in_force(active())
