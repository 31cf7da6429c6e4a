"""Batch norm's backward, in training and in inference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tileops.call_spec import size_class
from tileops.errors import InputError
from tileops.kernels.batch_norm import (
    BatchNormBwdCall,
    BatchNormBwdInfer,
    BatchNormBwdTrain,
    ElementwiseBatchNormBwd,
    HeldChannelBatchNormBwd,
    HeldColumnBatchNormBwd,
    SplitChannelBatchNormBwd,
    SplitColumnBatchNormBwd,
    statistics_dtype,
)
from tileops.kernels.batch_norm.interface import BATCH_CAP
from tileops.ops.backward_op import BackwardOp
from tileops.ops.checks import (
    aligned,
    check_beside,
    check_like,
    check_tensor,
    contiguous,
    dense,
    shown_dtype,
)
from tileops.ops.norm import batch_norm_sharding
from tileops.ops.norm.shape import (
    bias_dtype_of,
    channels_last,
    check_channels,
    dtype_of,
    empty_gradients,
    like_channels_last,
)


class BatchNormBwdOp(BackwardOp):
    """The gradients of batch norm.

    In training the statistics are functions of x, in inference they are constants: two kernel interfaces,
    `batch_norm_bwd_train` and `batch_norm_bwd_infer`.

    Args:
        training: Whether the statistics are those of x.
        need: Whether the gradients of x, weight and bias are wanted.
        bias_dtype: The dtype of the bias's gradient; None for that of the weight, of x where there is none.
        target: A target that takes the op over, instead of kernel selection.
    """

    interfaces = {"batch_norm_bwd_train": BatchNormBwdTrain, "batch_norm_bwd_infer": BatchNormBwdInfer}
    kernel_types = {
        "held_column": HeldColumnBatchNormBwd,
        "split_column": SplitColumnBatchNormBwd,
        "held_channel": HeldChannelBatchNormBwd,
        "split_channel": SplitChannelBatchNormBwd,
        "elementwise": ElementwiseBatchNormBwd,
    }
    any_layout = True  # channels-last memory is served as it is
    sharding = batch_norm_sharding.backward
    results = ("grad_x", "grad_weight", "grad_bias")

    def __init__(
        self,
        training: bool = True,
        need: Sequence[bool] = (True, True, True),
        bias_dtype: torch.dtype | None = None,
        *,
        target: str | None = None,
    ) -> None:
        super().__init__(need, target=target)
        self.training = bool(training)
        self.bias_dtype = bias_dtype

    def forward(
        self, grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of x, weight and bias of `BatchNormFwdOp`.

        Args:
            grad: The gradient of the output: x's shape and dtype, on x's device, any layout.
            x: The input of the forward: `(N, C, *spatial)`, floating point, any layout; channels-last memory is
                served as it is.
            mean: `(C,)`, float32 (float64 for float64), on x's device: the mean that the forward used.
            invstd: Likewise, `1 / sqrt(var + eps)`.
            weight: `(C,)`, float32 or x's dtype, on x's device.

        Returns:
            `(grad_x, grad_weight, grad_bias)`, new: x's shape, dtype and memory order; `(C,)` and the weight's
            dtype; `(C,)` and `bias_dtype`. None for what is not needed, and for the gradient of an absent weight.
            No argument is written.

        Raises:
            InputError: An argument does not fit.
            OpNotAvailableError: No kernel serves the call.
            AmbiguousDispatchError: Several kernels do and none is preferred.

        Numerics: sums in float32 (float64 for float64).
        Source: arXiv:1502.03167; agrees with the gradients of `torch.nn.functional.batch_norm`.
        """
        interface, call = self.request(x, weight)
        return gradients_of_batch(self.kernel_for(interface, call), call, grad, x, mean, invstd, weight)

    def request(self, x: Tensor, weight: Tensor | None = None) -> tuple[str, BatchNormBwdCall]:
        """The interface and the call spec. x alone says what device and dtype everything has."""
        call = batch_norm_bwd_call(x, weight, self.need, bias_dtype_of(self, x, weight))
        return "batch_norm_bwd_train" if self.training else "batch_norm_bwd_infer", call

    def check(self, grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None = None) -> None:
        """Refuse arguments that do not fit."""
        check_channels("batch norm", x, {"weight": weight})
        check_like("grad", grad, x)
        check_constants(x, mean, invstd)

    def empty_results(
        self, grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """A gradient of x without elements, and sums over no values."""
        return empty_gradients(self, x, weight, self.wanted(grad, x, mean, invstd, weight))


def batch_norm_bwd_call(
    x: Tensor, weight: Tensor | None, need: Sequence[bool], bias_dtype: torch.dtype
) -> BatchNormBwdCall:
    """The spec of a call for the gradients of a batch."""
    of_x, of_weight, of_bias = need
    return BatchNormBwdCall(
        device=x.device,
        n=size_class(x.shape[0], BATCH_CAP),
        c=x.shape[1],
        spatial=math.prod(x.shape[2:]),
        dtype=x.dtype,
        channels_last=channels_last(x),
        weight_dtype=dtype_of(weight),
        bias_dtype=bias_dtype if of_bias else None,
        need=(of_x, of_weight and weight is not None, of_bias),
    )


def gradients_of_batch(
    kernel: Callable[..., Any],
    call: BatchNormBwdCall,
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What a kernel of batch norm's backward returns, x and its gradient in the memory order that the call names."""
    if call.channels_last:
        x, grad = aligned(x), aligned(like_channels_last(grad))
    else:
        x, grad = contiguous(x), contiguous(grad)
    return kernel(grad, x, contiguous(mean), contiguous(invstd), dense(weight))


def check_constants(x: Tensor, mean: Tensor | None, invstd: Tensor | None) -> None:
    """Refuse statistics that are not what a forward call kept."""
    kept = statistics_dtype(x.dtype)
    for name, statistic in (("mean", mean), ("invstd", invstd)):
        check_tensor(name, statistic)
        check_beside(name, statistic, x, x.shape[1:2], of="one value per channel of x")
        if statistic is not None and statistic.dtype is not kept:
            raise InputError(f"{name} is {shown_dtype(statistic.dtype)}; it must be {shown_dtype(kept)}")
