"""What group norm and instance norm share: calls of the group-norm interfaces, on tensors of any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tileops.call_spec import size_class
from tileops.errors import InputError
from tileops.kernels.group_norm import GroupNormBwdCall, GroupNormCall
from tileops.kernels.group_norm.interface import ROWS_CAP
from tileops.ops.checks import contiguous, dense
from tileops.ops.norm.shape import SIZE_TYPES, channels_last, dtype_of, like_channels_last


def group_norm_call(x: Tensor, groups: int, eps: float, weight: Tensor | None, bias: Tensor | None) -> GroupNormCall:
    """The spec of a call that normalises each group of channels of each sample."""
    return GroupNormCall(
        device=x.device,
        rows=size_class(x.shape[0] * groups, ROWS_CAP),
        channels=x.shape[1] // groups,
        spatial=math.prod(x.shape[2:]),
        dtype=x.dtype,
        eps=eps,
        weight_dtype=dtype_of(weight),
        bias_dtype=dtype_of(bias),
    )


def group_norm_bwd_call(
    x: Tensor, groups: int, eps: float, weight: Tensor | None, need: Sequence[bool], bias_dtype: torch.dtype
) -> GroupNormBwdCall:
    """The spec of the call for its gradients."""
    of_x, of_weight, of_bias = need
    return GroupNormBwdCall(
        device=x.device,
        rows=size_class(x.shape[0] * groups, ROWS_CAP),
        channels=x.shape[1] // groups,
        spatial=math.prod(x.shape[2:]),
        dtype=x.dtype,
        eps=eps,
        weight_dtype=dtype_of(weight),
        bias_dtype=bias_dtype if of_bias else None,
        need=(of_x, of_weight and weight is not None, of_bias),
    )


def in_order_of(x: Tensor, result: Tensor) -> Tensor:
    """A contiguous result in the memory order of x: another one only where that is channels-last."""
    return like_channels_last(result) if channels_last(x) else result


def gradients_of_groups(
    kernel: Callable[..., Any], grad: Tensor, x: Tensor, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What a kernel of group norm's backward returns, the gradient of x in x's memory order."""
    grad_x, grad_weight, grad_bias = kernel(contiguous(grad), contiguous(x), dense(weight))
    return None if grad_x is None else in_order_of(x, grad_x), grad_weight, grad_bias


def check_groups(num_groups: object) -> None:
    """Refuse what is no number of groups."""
    if not isinstance(num_groups, SIZE_TYPES) or isinstance(num_groups, bool) or num_groups < 1:
        raise InputError(f"num_groups is {num_groups!r}; it must be a number of groups, 1 or more")


def check_divides(x: Tensor, num_groups: int) -> None:
    """Refuse channels that do not divide into the groups."""
    if x.shape[1] % num_groups != 0:
        raise InputError(f"x has {x.shape[1]} channels; they must divide evenly into num_groups, which is {num_groups}")
