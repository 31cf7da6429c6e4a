"""What the norms over trailing axes share about shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tileops.errors import InputError
from tileops.ops.checks import shown_shape


def normalised(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    """`normalized_shape` as a tuple; refuses what is no shape."""
    sizes: tuple[Any, ...] = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not sizes or not all(isinstance(size, int) and size >= 0 for size in sizes):
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
