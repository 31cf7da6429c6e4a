"""Running statistics, as batch norm and instance norm read and write them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tileops.errors import InputError
from tileops.kernels.batch_norm import BatchNormInferCall, statistics_dtype
from tileops.ops.checks import aligned, check_written, contiguous, dense, in_storages_of_their_own
from tileops.ops.norm.shape import channels_last, dtype_of
from tileops.torch_boundary import note_written


def normalised_by_running(
    op: Any, x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """x by the running statistics, in its own memory order: a call of `batch_norm_fwd_infer`, which the op has."""
    last = channels_last(x)
    call = BatchNormInferCall(
        device=x.device,
        c=x.shape[1],
        spatial=math.prod(x.shape[2:]),
        dtype=x.dtype,
        eps=op.eps,
        channels_last=last,
        weight_dtype=dtype_of(weight),
        bias_dtype=dtype_of(bias),
    )
    kernel = op.kernel_for("batch_norm_fwd_infer", call)
    mean, variance = _as_kernels_take(running_mean, x), _as_kernels_take(running_var, x)
    return kernel(aligned(x) if last else contiguous(x), mean, variance, dense(weight), dense(bias))


def updating(
    kernel: Callable[..., Any],
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Any:
    """The results of a kernel that writes running statistics.

    Kernels write contiguous ones of one dtype; a view of another kind is updated through a copy.
    """
    mean, variance = _as_kernels_take(running_mean, x), _as_kernels_take(running_var, x)
    results = kernel(x, mean, variance, dense(weight), dense(bias))
    note_written(running_mean, running_var)
    if mean is not running_mean:
        running_mean.copy_(mean)
    if variance is not running_var:
        running_var.copy_(variance)
    return results


def _as_kernels_take(running: Tensor, x: Tensor) -> Tensor:
    return contiguous(running.to(statistics_dtype(x.dtype)))


def constants_of(x: Tensor, running_mean: Tensor, running_var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The mean, and `1 / sqrt(var + eps)`, that a call by running statistics used: what its backward takes."""
    kept = statistics_dtype(x.dtype)
    return running_mean.to(kept), torch.rsqrt(running_var.to(kept) + eps)


def check_pair(running_mean: Tensor | None, running_var: Tensor | None) -> None:
    """Refuse one running statistic without the other."""
    if (running_mean is None) != (running_var is None):
        given, missing = ("running_mean", "running_var")[:: 1 if running_var is None else -1]
        raise InputError(f"{given} is given without {missing}; give both running statistics, or neither in training")


def check_running_written(x: Tensor, beside: Mapping[str, Tensor | None]) -> None:
    """Refuse running statistics whose memory is not theirs alone. They are the first two of `beside`."""
    others = [("x", x), *beside.items()]
    alone = in_storages_of_their_own([tensor for _, tensor in others])
    for name, written in list(beside.items())[:2]:
        others.remove((name, written))
        check_written(name, written, [] if alone else others)
