"""Calls like those that an op has served: they go to their entries at once.

A model calls an op again and again with tensors that differ in their contents and in some sizes. Once such a call
was checked and its entry found, a guard tells the next one like it, and nothing is checked or looked up again.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, cast

from torch import is_grad_enabled

from tileops.autograd import recording
from tileops.kernels.kernel_base import Kernel
from tileops.ops.entries import note_who_ran
from tileops.ops.signature import arguments_in_order, asked_for
from tileops.record import key_of
from tileops.scopes import Scope, active
from tileops.torch_guards import Guarded, guarded

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
        known: For each kind the scope that it was served in, and its entry behind a guard.
        left: Calls that may still be noted.
    """

    entries: dict[Any, Any]
    known: tuple[tuple[Scope | None, Guarded], ...] = ()
    left: int = ATTEMPTS


NO_REPEATS: Final = Repeats({})


def with_call(repeats: Repeats, op: Any, tensors: tuple[Any, ...]) -> Repeats:
    """What an op has noted, and this call, which it has just served."""
    entries: dict[Any, Any] = op._entries
    if repeats.entries is not entries:
        repeats = Repeats(entries)
    sizes = None if op._is_offered() else op.call_sizes(*tensors)  # a target looks at every size
    if sizes is None or len(repeats.known) == MOST:
        return repeats._replace(left=0)
    recorded = is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)
    run = recording(op, tensors) if recorded else _entry_of(op, entries, tensors)
    arity = len(op.argument_names)
    on_error = _noted_within if recorded else note_who_ran
    call = None if run is None else guarded(run, arity, tensors, sizes, on_error, recorded=recorded)
    known = repeats.known if call is None else ((active(), call), *repeats.known)
    return Repeats(entries, known, repeats.left - 1)


def _noted_within(error: Exception) -> None:
    """Of a call with its backward: the call within notes who ran."""


def _entry_of(op: Any, entries: dict[Any, Any], tensors: tuple[Any, ...]) -> Any:
    """What repeats of the call go to; None where its look-up is not stored."""
    interface, call = asked_for(op, tensors)
    entry = entries.get((interface, key_of(call), active()))
    if not isinstance(entry, Kernel):
        return entry
    return cast("Kernel[Any]", entry).repeated(*arguments_in_order(op.__class__, tensors, {}))
