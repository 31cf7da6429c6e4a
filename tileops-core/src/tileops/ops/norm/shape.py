"""What the norms over trailing axes share about shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tileops.errors import InputError
from tileops.ops.checks import check_tensor, shown_dtype, shown_shape


def normalised(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    """`normalized_shape` as a tuple; refuses what is no shape."""
    given = cast("Any", normalized_shape)
    sizes: tuple[Any, ...] = tuple(cast("Iterable[Any]", given)) if isinstance(given, Iterable) else (given,)
    if not sizes or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in sizes):
        raise InputError(
            f"normalized_shape is {normalized_shape!r}; it must be one or more sizes of trailing axes, such as (4096,)"
        )
    return sizes


def check_trailing(x: Tensor, sizes: tuple[int, ...]) -> None:
    """Refuse an x whose trailing axes are not those that are normalised."""
    if tuple(x.shape[-len(sizes) :]) != sizes:
        raise InputError(f"x has shape {shown_shape(x.shape)}; its trailing axes must be {shown_shape(sizes)}")


def dtype_of(tensor: Tensor | None) -> torch.dtype | None:
    """The dtype of an optional argument, as call specs hold it."""
    return None if tensor is None else tensor.dtype


def machine_eps(dtype: torch.dtype) -> float:
    """What torch takes for `eps=None`: the machine epsilon of the dtype that it accumulates in."""
    return torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps


def channels_last(x: Tensor) -> bool:
    """Whether memory runs `(N, *spatial, C)`; False where that is the plain order too."""
    return not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def like_channels_last(x: Tensor) -> Tensor:
    """x with memory in the order `(N, *spatial, C)`; x itself where it is so already."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def empty_in_order(x: Tensor) -> Tensor:
    """A tensor like x and in its memory order, where that is one of the two that batch norm keeps."""
    kept = x.is_contiguous() or channels_last(x)
    return torch.empty_like(x, memory_format=torch.preserve_format if kept else torch.contiguous_format)


def has_facts_of(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and device."""
    return x.shape == other.shape and x.dtype is other.dtype and x.device == other.device


def check_gradient(grad: Tensor, x: Tensor) -> None:
    """Refuse a gradient that does not fit x."""
    check_tensor("grad", grad)
    if tuple(grad.shape) != tuple(x.shape):
        raise InputError(f"grad has shape {shown_shape(grad.shape)}; it must have {shown_shape(x.shape)}, that of x")
    if grad.device != x.device:
        raise InputError(f"grad is on {grad.device} and x on {x.device}; put both on one device")
    if grad.dtype is not x.dtype:
        raise InputError(f"grad is {shown_dtype(grad.dtype)}; it must be {shown_dtype(x.dtype)}, the dtype of x")


def viewed(gradient: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """The gradient of an affine tensor in that tensor's shape; kernels return it flat."""
    return gradient if gradient is None or len(shape) == 1 else gradient.view(shape)
