"""Ops under the names and signatures of `torch.nn.functional`.

Each function makes the op that its parameters name, once, and calls it. Gradients, tracing, selection and
errors are the op's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from tileops.norm import BatchNormFwdOp, GroupNormFwdOp, InstanceNormFwdOp, LayerNormFwdOp, RMSNormFwdOp
from tileops.ops.norm.shape import normalised

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm"]

MOST_OPS: Final = 4096
"""Ops of a class that are kept, one for each set of parameters; the one longest out of use goes first."""


def layer_norm(
    input: Tensor,  # noqa: A002 - torch's name for it, here and below
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.layer_norm`. Shapes, dtypes, errors and numerics are those of `LayerNormFwdOp`."""
    try:
        op = LayerNormFwdOp(normalized_shape, eps) if is_dynamo_compiling() else _layer_norm(normalized_shape, eps)
    except TypeError:
        op = _of_unhashable(_layer_norm, normalized_shape, eps)
    return op(input, weight, bias)


def rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """`torch.nn.functional.rms_norm`. Shapes, dtypes, errors and numerics are those of `RMSNormFwdOp`."""
    try:
        op = RMSNormFwdOp(normalized_shape, eps) if is_dynamo_compiling() else _rms_norm(normalized_shape, eps)
    except TypeError:
        op = _of_unhashable(_rms_norm, normalized_shape, eps)
    return op(input, weight)


def batch_norm(
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.batch_norm`. Shapes, dtypes, errors and numerics are those of `BatchNormFwdOp`."""
    op = (BatchNormFwdOp if is_dynamo_compiling() else _batch_norm)(training, momentum, eps)
    return op(input, running_mean, running_var, weight, bias)[0]


def group_norm(
    input: Tensor,  # noqa: A002
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.group_norm`. Shapes, dtypes, errors and numerics are those of `GroupNormFwdOp`."""
    try:
        op = GroupNormFwdOp(num_groups, eps) if is_dynamo_compiling() else _group_norm(num_groups, eps)
    except TypeError:  # a symbolic number has no hash; the op refuses whatever else has none
        op = GroupNormFwdOp(num_groups, eps)
    return op(input, weight, bias)


def instance_norm(
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.instance_norm`. Shapes, dtypes, errors and numerics are those of `InstanceNormFwdOp`."""
    op = (InstanceNormFwdOp if is_dynamo_compiling() else _instance_norm)(use_input_stats, momentum, eps)
    return op(input, running_mean, running_var, weight, bias)


# While dynamo traces, an op is made anew, which costs the compiled code nothing.
_made: Final = functools.lru_cache(maxsize=MOST_OPS, typed=True)
_layer_norm, _rms_norm, _batch_norm = _made(LayerNormFwdOp), _made(RMSNormFwdOp), _made(BatchNormFwdOp)
_group_norm, _instance_norm = _made(GroupNormFwdOp), _made(InstanceNormFwdOp)


def _of_unhashable(made: Any, normalized_shape: Any, eps: float | None) -> Any:
    """The op of sizes in a list; of the symbolic sizes of a trace, one that is not kept. It refuses all else."""
    sizes = normalised(normalized_shape)
    try:
        return made(sizes, eps)
    except TypeError:
        return made.__wrapped__(sizes, eps)
