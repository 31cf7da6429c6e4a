"""What the norms share about shapes and memory orders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, cast

import torch
from torch import Tensor

from tileops.errors import InputError
from tileops.ops.checks import check_beside, check_floating, check_like, check_tensor, fits, shown_shape
from tileops.ops.signature import argument_names
from tileops.sharding import ShardByShard, ShardingRule
from tileops.torch_guards import Sizes

SIZE_TYPES: Final = (int, torch.SymInt)
"""The types of a size; symbolic in a trace whose sizes may change."""


def normalised(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    """`normalized_shape` as a tuple; refuses what is no shape."""
    given = cast("Any", normalized_shape)
    sizes: tuple[Any, ...] = tuple(cast("Iterable[Any]", given)) if isinstance(given, Iterable) else (given,)
    if not sizes or not all(isinstance(n, SIZE_TYPES) and not isinstance(n, bool) and n >= 0 for n in sizes):
        raise InputError(
            f"normalized_shape is {normalized_shape!r}; it must be one or more sizes of trailing axes, such as (4096,)"
        )
    return sizes


def _leading_axes(op: Any, count: int) -> range:
    """The axes of x that are not normalised."""
    return range(count - len(op.normalized_shape))


class NormalisesRows:
    """What the ops that normalise over trailing axes share. They take x, and parameters of the shape of those axes.

    An op names it before `Op`.
    """

    normalized_shape: tuple[int, ...]
    sharding: ClassVar[ShardingRule | None] = ShardByShard(_leading_axes)

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
        names = argument_names(type(self))
        for name, value in zip(names[names.index("x") + 1 :], beside):
            check_beside(name, value, x, shape, of="the normalized_shape")

    def call_sizes(self, x: Tensor, *beside: Tensor | None) -> Sizes:
        """Rows may be any number: those of the normalised axes stay."""
        shape = self.normalized_shape
        return [(*batch_axes(x, len(shape)), *shape), *([shape] * len(beside))]

    def empty_results(self, x: Tensor, *beside: Tensor | None) -> Tensor:
        """A new tensor without elements."""
        del beside
        return torch.empty_like(x, memory_format=torch.contiguous_format)


def _all_but_last(op: Any, count: int) -> range:
    del op
    return range(count - 1)


class AddsResidual:
    """What the ops share that add a residual and normalise the sum over the last axis.

    They take x, a residual of its shape, and parameters of the size of that axis. An op names it before `Op`.
    """

    sharding: ClassVar[ShardingRule | None] = ShardByShard(_all_but_last, sharded=("x", "residual"))

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
        rows = (*batch_axes(x, 1), *n)
        return [rows, rows, *([n] * len(beside))]

    def empty_results(self, x: Tensor, residual: Tensor, *beside: Tensor | None) -> tuple[Tensor, Tensor]:
        """Two new tensors without elements."""
        del residual, beside
        y, summed = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
        return y, summed


class GradientsOfRows:
    """What the backward ops of `NormalisesRows` share. They take the gradient, x and the weight.

    An op names it before `BackwardOp`.
    """

    normalized_shape: tuple[int, ...]
    sharding: ClassVar[ShardingRule | None] = ShardByShard(
        _leading_axes, sharded=("x", "grad"), sums=("grad_weight", "grad_bias")
    )

    def check(self, grad: Tensor, x: Tensor, weight: Tensor | None = None) -> None:
        """Refuse arguments that do not fit."""
        check_tensor("x", x)
        check_like("grad", grad, x)
        NormalisesRows.check(cast("Any", self), x, weight)

    def call_sizes(self, grad: Tensor, x: Tensor, weight: Tensor | None = None) -> Sizes | None:
        """Those of the forward; None where gradients are viewed in a shape of several axes."""
        sizes = NormalisesRows.call_sizes(cast("Any", self), x, weight)
        return [sizes[0], *sizes] if len(self.normalized_shape) == 1 else None


def check_channels(what: str, x: Tensor, beside: Mapping[str, Tensor | None]) -> None:
    """Refuse an x that is not `(N, C, *spatial)`, and tensors beside it without one value per channel.

    Args:
        what: What takes them, for the message.
        x: The input.
        beside: The other arguments, by name; absent ones pass.
    """
    check_floating("x", x)
    if x.dim() < 2:
        raise InputError(f"x has shape {shown_shape(x.shape)}; {what} takes (N, C, *spatial), two axes or more")
    if not fits(x, x.shape[1:2], tuple(beside.values())):
        for name, value in beside.items():
            check_beside(name, value, x, x.shape[1:2], of="one value per channel of x")


def samples_alone(op: Any, count: int) -> tuple[int, ...]:
    """The axes of `(N, C, *spatial)` that an op whose samples are normalised one by one may be sharded along."""
    del op, count
    return (0,)


def bias_dtype_of(op: Any, x: Tensor, weight: Tensor | None) -> torch.dtype:
    """The dtype of the bias's gradient: the parameter of that name, else that of the weight, else x's."""
    return op.bias_dtype or (x if weight is None else weight).dtype


def empty_gradients(
    op: Any, x: Tensor, weight: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of `(N, C, *spatial)`: a gradient of x without elements, and of each channel a sum over no values."""
    of_x, of_weight, of_bias = wanted
    return (
        empty_in_order(x) if of_x else None,
        x.new_zeros(x.shape[1], dtype=dtype_of(weight)) if of_weight else None,
        x.new_zeros(x.shape[1], dtype=bias_dtype_of(op, x, weight)) if of_bias else None,
    )


def batch_axes(x: Tensor, normalised_axes: int) -> list[str]:
    """Names of the sizes of x before its normalised axes: any sizes, the same in all tensors that have them."""
    return [f"axis {at}" for at in range(x.dim() - normalised_axes)]


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


def viewed(gradient: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """The gradient of an affine tensor in that tensor's shape; kernels return it flat."""
    return gradient if gradient is None or len(shape) == 1 else gradient.view(shape)
