"""What the norms over trailing axes share about shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor

from tileops.errors import InputError
from tileops.ops.checks import check_beside, check_floating, fits, shown_shape
from tileops.ops.signature import argument_names
from tileops.torch_guards import Sizes

_SIZES: Final = (int, torch.SymInt)
"""The types of a size; symbolic in a trace whose sizes may change."""


def normalised(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    """`normalized_shape` as a tuple; refuses what is no shape."""
    given = cast("Any", normalized_shape)
    sizes: tuple[Any, ...] = tuple(cast("Iterable[Any]", given)) if isinstance(given, Iterable) else (given,)
    if not sizes or not all(isinstance(n, _SIZES) and not isinstance(n, bool) and n >= 0 for n in sizes):
        raise InputError(
            f"normalized_shape is {normalized_shape!r}; it must be one or more sizes of trailing axes, such as (4096,)"
        )
    return sizes


class NormalisesRows:
    """What the ops that normalise over trailing axes share. They take x, and parameters of the shape of those axes.

    An op names it before `Op`.
    """

    normalized_shape: tuple[int, ...]

    def check(self, x: Tensor, *beside: Tensor | None) -> None:
        """Refuse arguments that do not fit."""
        shape = self.normalized_shape
        if fits(x, shape, beside):
            if x.shape[-1:] == shape:
                return
            if len(shape) > 1 and x.shape[-len(shape) :] == shape:
                return
        check_floating("x", x)
        if tuple(x.shape[-len(shape) :]) != shape:
            raise InputError(f"x has shape {shown_shape(x.shape)}; its trailing axes must be {shown_shape(shape)}")
        for name, value in zip(argument_names(type(self))[1:], beside):
            check_beside(name, value, x, shape, of="the normalized_shape")

    def call_sizes(self, x: Tensor, *beside: Tensor | None) -> Sizes:
        """Rows may be any number: those of the normalised axes stay."""
        shape = self.normalized_shape
        return [(None,) * (x.dim() - len(shape)) + shape, *([shape] * len(beside))]

    def empty_results(self, x: Tensor, *beside: Tensor | None) -> Tensor:
        """A new tensor without elements."""
        del beside
        return torch.empty_like(x, memory_format=torch.contiguous_format)


def dtype_of(tensor: Tensor | None) -> torch.dtype | None:
    """The dtype of an optional argument, as call specs hold it."""
    return None if tensor is None else tensor.dtype
