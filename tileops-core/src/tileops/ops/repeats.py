"""Calls like those that an op has served: they go to their entries at once.

A model calls an op again and again with tensors that differ in their contents and in some sizes. Once such a call
was checked and its entry found, a guard tells the next one like it, and nothing is checked or looked up again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from tileops.ops.signature import asked_for
from tileops.record import key_of
from tileops.torch_guards import Guard, guard_of

MOST: Final = 4
"""Kinds of calls that an op notes: each is asked in turn. A guard that does not pass takes a tenth of an op call."""

ATTEMPTS: Final = 16
"""Calls that an op tries to note. Some can never be, such as those with strided tensors, and trying takes as long as
a few calls."""


class Repeats(NamedTuple):
    """The kinds of calls that an op has noted.

    Args:
        entries: The look-up table of the op class that they were found in. Registrations make a new one, and none
            of these is a repeat any more.
        known: For each kind its guard, and the entry as the op's arguments call it.
        left: Calls that may still be noted.
    """

    entries: dict[Any, Any]
    known: tuple[tuple[Guard, Callable[..., Any]], ...] = ()
    left: int = ATTEMPTS


NO_REPEATS: Final = Repeats({})


def with_call(repeats: Repeats, op: Any, tensors: tuple[Any, ...]) -> Repeats:
    """What an op has noted, and this call, which it has just served."""
    entries: dict[Any, Any] = op._entries
    if repeats.entries is not entries:
        repeats = Repeats(entries)
    while tensors[-1] is None:
        tensors = tensors[:-1]
    sizes = None if op._is_offered() else op.call_sizes(*tensors)  # a target looks at every size
    if sizes is None or len(repeats.known) == MOST:
        return repeats._replace(left=0)
    guard = guard_of(tensors, sizes)
    entry: Any = None if guard is None else entries.get(_look_up(op, tensors))
    known = () if guard is None or entry is None else ((guard, _called(entry, op, len(tensors))),)
    return Repeats(entries, (*repeats.known, *known), repeats.left - 1)


def _look_up(op: Any, tensors: tuple[Any, ...]) -> tuple[str, Any]:
    interface, call = asked_for(op, tensors)
    return interface, key_of(call)


def _called(entry: Any, op: Any, given: int) -> Callable[..., Any]:
    """The entry, for calls that leave trailing arguments out or pass None."""
    absent = (None,) * (len(op.argument_names) - given)
    return (lambda *tensors: entry(*tensors[:given], *absent)) if absent else entry
