"""Batch norm of a batch that is sharded: the statistics are those of the whole batch.

The batch stays where it is. What moves are a few numbers for each channel: one gather forward, one reduction
backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tileops.errors import InputError
from tileops.kernels.batch_norm import statistics_dtype
from tileops.kernels.batch_norm.interface import per_channel
from tileops.ops.norm.shape import bias_dtype_of
from tileops.sharding import Run, ShardByShard, distributed, everywhere, pending, placements_along, replicated, shard_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

Results = tuple[Any, ...]


def forward(op: Any, run: Run, tensors: Sequence[Any]) -> Results:
    """The rule of `BatchNormFwdOp`."""
    op.check(*tensors)
    return _train(op, run, tensors) if op.training else infer(op, run, tensors)


def backward(op: Any, run: Run, tensors: Sequence[Any]) -> Results:
    """The rule of `BatchNormBwdOp`."""
    op.check(*tensors)
    x = tensors[1]
    return _train_backward(op, tensors) if op.training and x.numel() > 0 else infer_backward(op, run, tensors)


def _axes(op: Any, count: int) -> list[int]:
    """The axes that the values of a channel lie along."""
    del op
    return [axis for axis in range(count) if axis != 1]


infer = ShardByShard(_axes)
infer_backward = ShardByShard(_axes, sharded=("x", "grad"), sums=("grad_weight", "grad_bias"))


def _train(op: Any, run: Run, tensors: Sequence[Any]) -> Results:
    x, running_mean, running_var, weight, bias = tensors
    check_held_everywhere(running_mean=running_mean, running_var=running_var)
    placements = placements_along(x, _axes(op, x.dim()))
    own = shard_of(x, placements)
    if x.numel() == 0:
        y, mean, invstd = run(own, None, None, None, None)
    else:
        count, mean, squares = _statistics(own, x, placements)
        invstd = torch.rsqrt(squares / count + op.eps)
        inference = type(op)(training=False, eps=op.eps, target=op.target)
        y = inference(own, mean, squares / count, replicated(weight), replicated(bias))[0]
        move(running_mean, mean, op.momentum)
        move(running_var, squares / (count - 1), op.momentum)
    statistics = [distributed(one, x, everywhere(x.device_mesh)) for one in (mean, invstd)]
    return distributed(y, x, placements, shape=x.shape), *statistics


def _train_backward(op: Any, tensors: Sequence[Any]) -> Results:
    """Through the statistics, each value depends on all: on two sums over the whole batch."""
    grad, x, mean, invstd, weight = tensors
    kept = statistics_dtype(x.dtype)
    placements = placements_along(x, _axes(op, x.dim()))
    own, own_grad = (shard_of(one, placements).to(kept) for one in (x, grad))
    mean, invstd, scale = replicated(mean), replicated(invstd), replicated(weight)
    normal = (own - per_channel(mean, own)) * per_channel(invstd, own)
    axes = _axes(op, x.dim())
    shares = torch.stack([(own_grad * normal).sum(axes), own_grad.sum(axes)])
    of_weight, of_bias = replicated(distributed(shares, x, pending(placements)))
    factor = invstd if scale is None else invstd * scale.to(kept)
    through = (normal * per_channel(of_weight, own) + per_channel(of_bias, own)) / (x.numel() // x.shape[1])
    grad_x = ((own_grad - through) * per_channel(factor, own)).to(x.dtype)
    in_x, in_weight, in_bias = op.wanted(*tensors)
    whole = everywhere(x.device_mesh)
    return (
        distributed(grad_x, x, placements, shape=x.shape) if in_x else None,
        distributed(of_weight.to(weight.dtype), x, whole) if in_weight else None,
        distributed(of_bias.to(bias_dtype_of(op, x, weight)), x, whole) if in_bias else None,
    )


def _statistics(own: Tensor, x: DTensor, placements: Sequence[Placement]) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean, and sum of squared distances from the mean, of each channel of the whole batch.

    Each process takes those of its shard. They are merged by Chan's scheme, which subtracts no large squares.
    """
    channels = own.shape[1]
    values = own.numel() // channels
    wide = own.to(statistics_dtype(own.dtype))
    if values == 0:  # a batch that does not divide evenly leaves a process without any
        mine = wide.new_zeros(2 * channels + 1)
    else:
        variance, mean = torch.var_mean(wide, _axes(None, own.dim()), correction=0)
        mine = torch.cat([wide.new_full((1,), values), mean, variance * values])
    gathered = _gathered(mine, x, placements)
    counts, means, squares = gathered[:, :1], gathered[:, 1 : channels + 1], gathered[:, channels + 1 :]
    count = counts.sum()
    origin = means[0]  # where the first process has no value it is 0, as right as any
    mean = origin + (counts * (means - origin)).sum(0) / count
    return count, mean, (squares + counts * (means - mean).square()).sum(0)


def _gathered(mine: Tensor, x: DTensor, placements: Sequence[Placement]) -> Tensor:
    """A row of each process that has a shard of its own."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    rows = [Replicate() if one.is_replicate() else Shard(0) for one in placements]
    return replicated(DTensor.from_local(mine[None], x.device_mesh, rows, run_check=False))


def check_held_everywhere(**running: DTensor | None) -> None:
    """Refuse running statistics of which a process holds a part: they are written."""
    for name, one in running.items():
        if one is not None and list(one.placements) != everywhere(one.device_mesh):
            raise InputError(f"{name} is written, and placed as {one.placements}; every process must hold all of it")


def move(running: DTensor | None, batch: Tensor, momentum: float) -> None:
    """Move a running statistic towards the batch's, in place."""
    if running is not None:
        kept = running.to_local()
        wide = kept.to(batch.dtype)
        kept.copy_(wide + (batch - wide) * momentum)
