"""Which calls torch must see, and which are like one that it need not have seen.

An eager call on plain tensors stays out of torch's dispatcher; `needs_dispatcher` says which calls do not. It asks
each question in Python. `guard_of` has torch's own guards, those that its compiled code starts with, ask all of
them again in one call of C++: about a third of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

_PLAIN: Final = frozenset({Tensor, nn.Parameter, type(None)})

ALIGNMENT: Final = 16
"""Bytes: kernels load and store vectors of up to 16 bytes. A power of two."""

Sizes = Sequence[Sequence["int | None"]]
"""The sizes of tensors, each by its axes; None where a size may vary."""

Guard = Callable[[Sequence[Any]], bool]


def needs_dispatcher(tensors: Sequence[Any]) -> bool:
    """Whether torch must see the call: a kernel that takes pointers would get it wrong, or hide it.

    Not asked here, because a check of the op's or its copy to contiguous memory answers it: sparse, nested and
    quantised tensors, and negative-bit views.
    """
    if is_dynamo_compiling():  # first: while it traces, dynamo takes this for true and never sees the rest
        return True
    for tensor in tensors:
        if tensor.__class__ not in _PLAIN:
            return True
    return (
        _forward_ad._current_level >= 0
        or _dispatch_modes() > 0
        or _function_mode()
        or _transforms()
        or _tracing()
        or _autocast()  # the dearest; asking the tensors' dtypes first would cost more
    )


def guard_of(tensors: Sequence[Any], sizes: Sizes) -> Guard | None:
    """A guard that passes later tensors only where a plain call sees no difference to these but `sizes`' None.

    It holds what this thread's state is now (modes, transforms, autocast, inference mode) and of each tensor the
    class, dtype, device, layout, sizes and `requires_grad`; later tensors must also be contiguous and aligned,
    have elements, no tangent, and no wanted gradient. Trailing arguments that were left out may be None.

    Returns:
        The guard; None where these tensors do not pass it themselves, or this torch has no such guards.
    """
    # Where no size but the first varies, contiguous tensors have one sequence of strides.
    strides_vary = [None in axes[1:] for axes in sizes]
    try:
        if any(tensor.is_nested or not tensor.is_contiguous() for tensor in tensors):
            return None
        alike = _C._dynamo.guards.TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(axes) for axes in sizes],
            dynamic_dims_strides=[
                [None] * tensor.dim() if vary else list(tensor.stride()) for tensor, vary in zip(tensors, strides_vary)
            ],
        )
        guard = _compiled(alike.check, strides_vary, [None in axes for axes in sizes], _wants_gradients(tensors))
        return guard if guard(tensors) else None
    except Exception:  # an absent argument, or a torch whose guards are made in another way
        return None


def _wants_gradients(tensors: Sequence[Any]) -> bool:
    """Whether gradients are wanted wherever they are enabled. Nothing can enable them for inference mode's sake."""
    return any(tensor.requires_grad for tensor in tensors) and not torch.is_inference_mode_enabled()


def _compiled(alike: Any, strides_vary: Sequence[bool], may_be_empty: Sequence[bool], wants_gradients: bool) -> Guard:
    """The guard as one expression over as many names as there are tensors: loops would double what it costs."""
    names = [f"tensor_{at}" for at in range(len(strides_vary))]
    # Of a nested tensor torch's guards ask for strides that it does not have, and end the process.
    asked = [f"not {name}.is_nested" for name in names]
    asked += [f"alike({', '.join(names)})", "not function_mode()", "forward_ad._current_level < 0"]
    asked += ["not is_grad_enabled()"] if wants_gradients else []
    asked += [f"{name}.is_contiguous()" for name, vary in zip(names, strides_vary) if vary]
    pointers = [f"{name}_pointer" if empty else f"{name}.data_ptr()" for name, empty in zip(names, may_be_empty)]
    asked += [f"({name}_pointer := {name}.data_ptr())" for name, empty in zip(names, may_be_empty) if empty]  # 0 if so
    asked += [f"({' | '.join(pointers)}) % {ALIGNMENT} == 0"]
    source = f"""
def guard(tensors):
    if len(tensors) != {len(names)}:
        tensors = given(tensors, {len(names)})
        if tensors is None:
            return False
    {", ".join(names)}, = tensors
    try:
        return {" and ".join(asked)}
    except AttributeError:  # something that is no tensor
        return False
"""
    made: dict[str, Any] = {
        "alike": alike,
        "function_mode": _function_mode,
        "forward_ad": forward_ad,
        "is_grad_enabled": is_grad_enabled,
        "given": _given,
        "__name__": __name__,
    }
    exec(source, made)  # noqa: S102 - only our own names enter the source
    return made["guard"]


def _given(tensors: Sequence[Any], count: int) -> Sequence[Any] | None:
    """The first `count` tensors, where all others are absent."""
    if len(tensors) < count or any(tensor is not None for tensor in tensors[count:]):
        return None
    return tensors[:count]
