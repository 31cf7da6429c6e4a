"""Instance norm of a batch that is sharded: each sample is normalised where it is.

Only what the running statistics need of each process moves: two numbers for each channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tileops.kernels.batch_norm import statistics_dtype
from tileops.ops.norm.batch_norm_sharding import check_held_everywhere, move
from tileops.sharding import Run, ShardByShard, distributed, pending, placements_along, replicated, shard_of

Results = tuple[Any, ...]


def forward(op: Any, run: Run, tensors: Sequence[Any]) -> Results:
    """The rule of `InstanceNormFwdOp`."""
    op.check(*tensors)
    x, running_mean = tensors[:2]
    updates = op.use_input_stats and running_mean is not None and x.numel() > 0
    return _updating(op, tensors) if updates else _shard_by_shard(op, run, tensors)


def _axes(op: Any, count: int) -> list[int]:
    """The axes along which a shard needs no other: those of the batch, and where statistics are given those of space."""
    return [axis for axis in range(count) if axis == 0 or (axis != 1 and not op.use_input_stats)]


_shard_by_shard = ShardByShard(_axes)
backward = ShardByShard(_axes, sharded=("x", "grad"), sums=("grad_weight", "grad_bias"))
"""The rule of `InstanceNormBwdOp`."""


def _updating(op: Any, tensors: Sequence[Any]) -> Results:
    """Each process takes the statistics of its samples; the running ones move towards the mean of all samples."""
    x, running_mean, running_var, weight, bias = tensors
    check_held_everywhere(running_mean=running_mean, running_var=running_var)
    placements = placements_along(x, _axes(op, x.dim()))
    own = shard_of(x, placements)
    # With momentum 1 a kernel leaves the statistics of the samples alone; without any, zeros.
    statistics = own.new_zeros(2, x.shape[1], dtype=statistics_dtype(x.dtype))
    alone = type(op)(momentum=1.0, eps=op.eps, target=op.target)
    y = alone(own, *statistics, replicated(weight), replicated(bias))
    shares = statistics * (own.shape[0] / x.shape[0])
    mean, variance = replicated(distributed(shares, x, pending(placements)))
    move(running_mean, mean, op.momentum)
    move(running_var, variance, op.momentum)
    return (distributed(y, x, placements, shape=x.shape),)
