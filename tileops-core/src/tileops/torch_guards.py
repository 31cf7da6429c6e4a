"""Which calls torch must see, and which are like one that it need not have seen.

An eager call on plain tensors stays out of torch's dispatcher; `needs_dispatcher` says which calls do not. It asks
each question in Python. `guarded` has torch's own guards, those that its compiled code starts with, ask all of
them again in one call of C++: about a third of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

# Private names of torch, with `forward_ad._current_level` and `_C._dynamo.guards.TensorGuards` below. A test names each.
_C: Final = cast("Any", torch._C)
_dispatch_modes: Final[Callable[[], int]] = _C._len_torch_dispatch_stack
_function_mode: Final[Callable[[], bool]] = _C._is_torch_function_mode_enabled
_transforms: Final[Callable[[], bool]] = _C._are_functorch_transforms_active
_tracing: Final[Callable[[], bool]] = _C._is_tracing
_autocast: Final[Callable[[], bool]] = _C._is_any_autocast_enabled
_forward_ad: Final = cast("Any", forward_ad)

PLAIN: Final = frozenset({Tensor, nn.Parameter, type(None)})
"""The classes of arguments that are no more than their memory."""

ALIGNMENT: Final = 16
"""Bytes: kernels load and store vectors of up to 16 bytes. A power of two."""

Sizes = Sequence[Sequence["int | str | None"]]
"""The sizes of tensors, each by its axes: None where a size may vary, and a name where it may, but is the same
wherever it has that name."""

Guarded = Callable[[Sequence[Any]], Any]
"""Takes the arguments of a call and returns its results; None where a guard does not pass them."""


def needs_dispatcher(tensors: Sequence[Any]) -> bool:
    """Whether torch must see the call: a kernel that takes pointers would get it wrong, or hide it.

    Not asked here, because a check of the op's or its copy to contiguous memory answers it: sparse, nested and
    quantised tensors, and negative-bit views.
    """
    if is_dynamo_compiling():  # first: while it traces, dynamo takes this for true and never sees the rest
        return True
    for tensor in tensors:
        if tensor.__class__ not in PLAIN:
            return True
    return (
        _forward_ad._current_level >= 0
        or _dispatch_modes() > 0
        or _function_mode()
        or _transforms()
        or _tracing()
        or _autocast()  # the dearest; asking the tensors' dtypes first would cost more
    )


def guarded(
    run: Callable[..., Any],
    arity: int,
    tensors: Sequence[Any],
    sizes: Sizes,
    on_error: Callable[[Exception], None],
    *,
    recorded: bool = False,
) -> Guarded | None:
    """`run` behind a guard, which passes tensors only where a plain call sees no difference to these.

    The guard holds what this thread's state is now (modes, transforms, autocast, inference mode), which arguments
    are None, and of each tensor the class, dtype, device, layout, `sizes` and `requires_grad`; later tensors must
    also be contiguous and aligned, have elements and no tangent, and a gradient of them is wanted or not as of these.

    Args:
        run: What is called with the tensors, and with None for those of its `arity` arguments that were left out.
        arity: The number of its arguments.
        tensors: The arguments of a call that `run` served.
        sizes: The sizes that later tensors must have.
        on_error: Called with an exception that leaves `run`.
        recorded: Whether a gradient of these tensors is wanted, and of later ones.

    Returns:
        The guarded call; None where these tensors do not pass themselves, or this torch has no such guards.
    """
    given = {f"tensor_{at}": tensor for at, tensor in enumerate(tensors)}
    known = [(name, tensor, axes) for (name, tensor), axes in zip(given.items(), sizes) if tensor is not None]
    try:
        if any(tensor.is_nested or not tensor.is_contiguous() for _, tensor, _ in known):
            return None
        alike = _C._dynamo.guards.TensorGuards(
            *(tensor for _, tensor, _ in known),
            dynamic_dims_sizes=[[None if _varies(size) else size for size in axes] for _, _, axes in known],
            dynamic_dims_strides=[
                [None] * tensor.dim() if _strides_vary(axes) else list(tensor.stride()) for _, tensor, axes in known
            ],
        )
        questions = _questions({name: axes for name, _, axes in known})
        if any(one.requires_grad for _, one, _ in known):
            questions.insert(0, "is_grad_enabled()" if recorded else "not is_grad_enabled()")
        questions += [f"{name} is None" for name, tensor in given.items() if tensor is None]
        made: dict[str, Any] = {"alike": alike.check, "run": run, "on_error": on_error, **_NAMES}
        exec(_source(list(given), questions, arity), made)  # noqa: S102 - only our own names enter the source
        return made["call"] if made["guard"](*tensors) else None
    except Exception:  # a torch whose guards are made in another way
        return None


def _varies(size: int | str | None) -> bool:
    """Whether later tensors may have another size."""
    return not isinstance(size, int)


def _strides_vary(axes: Sequence[int | str | None]) -> bool:
    """Whether contiguous tensors of these sizes have several sequences of strides."""
    return any(map(_varies, axes[1:]))


def _questions(sizes: Mapping[str, Sequence[int | str | None]]) -> list[str]:
    """What a guard asks about the tensors of these names and sizes."""
    # Of a nested tensor torch's guards ask for strides that it does not have, and end the process.
    asked = [f"not {name}.is_nested" for name in sizes]
    asked += [f"alike({', '.join(sizes)})", "not function_mode()", "forward_ad._current_level < 0"]
    asked += [f"{name}.is_contiguous()" for name, axes in sizes.items() if _strides_vary(axes)]
    asked += _equal_sizes(sizes)
    vary = {name for name, axes in sizes.items() if any(map(_varies, axes))}
    asked += [f"({name}_pointer := {name}.data_ptr())" for name in sizes if name in vary]  # 0 if empty
    pointers = [f"{name}_pointer" if name in vary else f"{name}.data_ptr()" for name in sizes]
    return [*asked, f"({' | '.join(pointers)}) % {ALIGNMENT} == 0"]


def _equal_sizes(sizes: Mapping[str, Sequence[int | str | None]]) -> list[str]:
    """The questions whether sizes of one name are equal."""
    places: dict[str, list[str]] = {}
    for name, axes in sizes.items():
        for axis, size in enumerate(axes):
            if isinstance(size, str):
                places.setdefault(size, []).append(f"{name}.size({axis})")
    return [" == ".join(equal) for equal in places.values() if len(equal) > 1]


def _source(names: Sequence[str], questions: Sequence[str], arity: int) -> str:
    """The source of a guarded call: all in one frame, with no loop, which would double what it costs."""
    given, guard = ", ".join(names), " and ".join(questions)
    arguments = ", ".join([*names, *["None"] * (arity - len(names))])
    return f"""
def guard({given}):
    return {guard}

def call(tensors):
    if len(tensors) != {len(names)}:
        return None
    {given}, = tensors
    try:
        if not ({guard}):
            return None
    except AttributeError:  # something that is no tensor
        return None
    try:
        return run({arguments})
    except Exception as error:
        on_error(error)
        raise
"""


_NAMES: Final[dict[str, Any]] = {
    "function_mode": _function_mode,
    "forward_ad": forward_ad,
    "is_grad_enabled": is_grad_enabled,
    "__name__": __name__,
}
