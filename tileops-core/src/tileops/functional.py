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
"""Ops that are kept, one for each set of parameters; the one longest out of use goes first."""


def layer_norm(
    input: Tensor,  # noqa: A002 - torch's name for it, here and below
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.layer_norm`. Shapes, dtypes, errors and numerics are those of `LayerNormFwdOp`."""
    return _op(LayerNormFwdOp, _sizes(normalized_shape), eps)(input, weight, bias)


def rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """`torch.nn.functional.rms_norm`. Shapes, dtypes, errors and numerics are those of `RMSNormFwdOp`."""
    return _op(RMSNormFwdOp, _sizes(normalized_shape), eps)(input, weight)


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
    return _op(BatchNormFwdOp, training, momentum, eps)(input, running_mean, running_var, weight, bias)[0]


def group_norm(
    input: Tensor,  # noqa: A002
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.group_norm`. Shapes, dtypes, errors and numerics are those of `GroupNormFwdOp`."""
    return _op(GroupNormFwdOp, num_groups, eps)(input, weight, bias)


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
    return _op(InstanceNormFwdOp, use_input_stats, momentum, eps)(input, running_mean, running_var, weight, bias)


def _sizes(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    return normalized_shape if isinstance(normalized_shape, tuple) else normalised(normalized_shape)


def _op(cls: Any, *parameters: Any) -> Any:
    """The op of these parameters. While dynamo traces it is made anew, which costs the compiled code nothing."""
    if is_dynamo_compiling():
        return cls(*parameters)
    try:
        return _made(cls, *parameters)
    except TypeError:  # the symbolic sizes of a trace have no hash; the op refuses whatever else has none
        return cls(*parameters)


@functools.lru_cache(maxsize=MOST_OPS)
def _made(cls: Any, *parameters: Any) -> Any:
    return cls(*parameters)
