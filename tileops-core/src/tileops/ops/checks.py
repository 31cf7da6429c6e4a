"""Checks of an op's arguments. Each refusal is one sentence: the argument, what came, what is served.

Nothing is computed and nothing is written before every check has passed.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor

from tileops.errors import InputError
from tileops.torch_guards import ALIGNMENT

FLOATING = frozenset(
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype.is_floating_point
)
"""The floating-point dtypes of this torch."""


def shown_shape(shape: Sequence[int]) -> str:
    """A shape as messages show it."""
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def shown_dtype(dtype: torch.dtype) -> str:
    """A dtype as messages show it: `float16`."""
    return str(dtype).removeprefix("torch.")


def fits(x: Tensor, shape: Sequence[int], beside: Sequence[Tensor | None]) -> bool:
    """Whether x is floating point and `check_beside` would pass each tensor beside it.

    The quick answer, on every call; where it is no, the checks below find out why.
    """
    try:
        dtype, device = x.dtype, x.device
        for value in beside:
            if value is None:
                continue
            if value.shape != shape or value.device != device:
                return False
            if value.dtype is not dtype and value.dtype is not torch.float32:
                return False
    except AttributeError:  # something that is no tensor
        return False
    return dtype in FLOATING


def check_tensor(name: str, value: object) -> None:
    """Refuse what is no strided tensor."""
    if not isinstance(value, Tensor):
        raise InputError(f"{name} is {type(value).__qualname__}; give a torch.Tensor")
    check_strided(name, value)


def check_strided(name: str, value: Tensor | None) -> None:
    """Refuse a sparse tensor and the like."""
    if value is not None and value.layout is not torch.strided:
        raise InputError(f"{name} has layout {value.layout}; give a strided tensor: {name}.to_dense()")


def check_floating(name: str, x: Tensor) -> None:
    """Refuse what has no floating-point dtype. Which floating-point dtypes are served is for kernels to say."""
    check_tensor(name, x)
    if not x.dtype.is_floating_point:
        raise InputError(
            f"{name} is {shown_dtype(x.dtype)}; it must be a floating-point tensor, such as float16, bfloat16 or float32"
        )


def check_beside(name: str, value: Tensor | None, x: Tensor, shape: Sequence[int], *, of: str) -> None:
    """Refuse a parameter or statistic of another shape or device than x's, or of a dtype that is not served.

    Args:
        name: The argument's name.
        value: The argument; an absent one passes.
        x: The input it goes with.
        shape: The shape it must have.
        of: Where that shape comes from, for the message.
    """
    if value is None:
        return
    check_tensor(name, value)
    if tuple(value.shape) != tuple(shape):
        raise InputError(f"{name} has shape {shown_shape(value.shape)}; it must have {shown_shape(shape)}, {of}")
    if value.device != x.device:
        raise InputError(f"{name} is on {value.device} and x on {x.device}; put both on one device")
    if value.dtype not in (x.dtype, torch.float32):
        served = "float32" if x.dtype is torch.float32 else f"float32 or {shown_dtype(x.dtype)}, the dtype of x"
        raise InputError(f"{name} is {shown_dtype(value.dtype)}; it must be {served}")


def check_like(name: str, value: Tensor, x: Tensor) -> None:
    """Refuse a tensor of another shape, device or dtype than x's."""
    check_tensor(name, value)
    if value.shape == x.shape and value.dtype is x.dtype and value.device == x.device:
        return
    if tuple(value.shape) != tuple(x.shape):
        raise InputError(f"{name} has shape {shown_shape(value.shape)}; it must have {shown_shape(x.shape)}, that of x")
    if value.device != x.device:
        raise InputError(f"{name} is on {value.device} and x on {x.device}; put both on one device")
    if value.dtype is not x.dtype:
        raise InputError(f"{name} is {shown_dtype(value.dtype)}; it must be {shown_dtype(x.dtype)}, the dtype of x")


def check_number(name: str, value: object, *, least: float, most: float = math.inf) -> None:
    """Refuse a parameter that is no number or out of its range."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if least <= value <= most:
            return  # one that dynamo traces symbolically gets no further: it cannot be asked whether it is NaN
        if not math.isnan(value):
            upper = "" if most == math.inf else f" and at most {most:g}"
            raise InputError(f"{name} is {value!r}; it must be at least {least:g}{upper}")
    raise InputError(f"{name} is {value!r}; it must be a number")


def check_written(name: str, value: Tensor | None, others: Sequence[tuple[str, Tensor | None]]) -> None:
    """Refuse a written argument that shares memory with another argument, or whose elements share memory."""
    if value is None:
        return
    if value.numel() > 1 and 0 in value.stride():
        raise InputError(f"{name} is written, and its elements share memory (it is expanded); give {name}.clone()")
    for other_name, other in others:
        if other is not None and _share_memory(value, other):
            raise InputError(
                f"{name} is written, and shares memory with {other_name}; give one of them memory of its own: clone()"
            )


def in_storages_of_their_own(tensors: Sequence[Tensor | None]) -> bool:
    """Whether no two tensors lie in one storage, hence none shares memory: the quick answer, on every call."""
    given = [storage_of(tensor) for tensor in tensors if tensor is not None]
    return len(set(given)) == len(given)


def _share_memory(written: Tensor, other: Tensor) -> bool:
    """Whether a written vector and another tensor have a byte in common."""
    if written.numel() == 0 or other.numel() == 0 or storage_of(written) != storage_of(other):
        return False
    first, past = _extent(written)
    other_first, other_past = _extent(other)
    if past <= other_first or other_past <= first:
        return False
    # Two vectors may interleave in one storage, as the columns of a matrix do: then the addresses decide.
    return written.dim() > 1 or other.dim() > 1 or not _addresses(written).isdisjoint(_addresses(other))


def storage_of(tensor: Tensor) -> int:
    """Which storage a tensor lies in; fake and meta tensors, which have no memory, have storages too."""
    return tensor.untyped_storage()._cdata


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the byte past its last."""
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def _addresses(vector: Tensor) -> set[int]:
    size, step = vector.element_size(), sum(vector.stride()) * vector.element_size()
    first, _ = _extent(vector)
    return {first + i * step + byte for i in range(vector.numel()) for byte in range(size)}


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself where it is contiguous and aligned, else a copy that is: what kernels are promised.

    A view with the negative bit is copied too, and so made true: it is not contiguous or, of one element, begins
    at the imaginary half of a complex number, which is not aligned.
    """
    if tensor.is_contiguous():
        return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()
    return tensor.contiguous()


def dense(tensor: Tensor | None) -> Tensor | None:
    """`contiguous` of an optional tensor."""
    return None if tensor is None else contiguous(tensor)


def laid_out(tensors: Sequence[Tensor | None], written: Container[int]) -> tuple[Any, ...]:
    """`contiguous` of every tensor given; those at the positions `written` as they are."""
    return tuple(tensor if at in written else dense(tensor) for at, tensor in enumerate(tensors))


def aligned(tensor: Tensor) -> Tensor:
    """The tensor itself where its memory begins at a multiple of 16 bytes, else a copy in the same order.

    A negative-bit view, `z.conj().imag`, never passes as it is, and a copy has its signs: it is not contiguous, or
    is one imaginary part alone, which begins at an odd multiple of its size.
    """
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()
