"""What the norms over trailing axes share about shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tileops.errors import InputError
from tileops.ops.checks import check_beside, check_floating, check_like, check_tensor, fits, shown_shape
from tileops.ops.signature import argument_names
from tileops.torch_guards import Sizes


def normalised(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    """`normalized_shape` as a tuple; refuses what is no shape."""
    given = cast("Any", normalized_shape)
    sizes: tuple[Any, ...] = tuple(cast("Iterable[Any]", given)) if isinstance(given, Iterable) else (given,)
    if not sizes or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in sizes):
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


class AddsResidual:
    """What the ops share that add a residual and normalise the sum over the last axis.

    They take x, a residual of its shape, and parameters of the size of that axis. An op names it before `Op`.
    """

    def check(self, x: Tensor, residual: Tensor, *beside: Tensor | None) -> None:
        """Refuse arguments that do not fit."""
        check_tensor("x", x)
        check_tensor("residual", residual)
        shape = x.shape
        alike = residual.shape == shape and residual.dtype is x.dtype and residual.device == x.device
        if alike and shape and fits(x, shape[-1:], beside):
            return
        check_floating("x", x)
        if not shape:
            raise InputError("x has shape (); it must have an axis, the last of which is normalised over")
        check_like("residual", residual, x)
        for name, value in zip(argument_names(type(self))[2:], beside):
            check_beside(name, value, x, shape[-1:], of="the size of x's last axis")

    def call_sizes(self, x: Tensor, residual: Tensor, *beside: Tensor | None) -> Sizes:
        """Rows may be any number, the same for x and the residual: the last axis stays."""
        del residual
        n = x.shape[-1:]
        rows = (*[f"axis {at}" for at in range(x.dim() - 1)], *n)
        return [rows, rows, *([n] * len(beside))]

    def empty_results(self, x: Tensor, residual: Tensor, *beside: Tensor | None) -> tuple[Tensor, Tensor]:
        """Two new tensors without elements."""
        del residual, beside
        y, summed = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
        return y, summed


def dtype_of(tensor: Tensor | None) -> torch.dtype | None:
    """The dtype of an optional argument, as call specs hold it."""
    return None if tensor is None else tensor.dtype
