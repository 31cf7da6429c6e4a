"""What the norms over trailing axes share about shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tileops.errors import InputError
from tileops.ops.checks import shown_shape


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
