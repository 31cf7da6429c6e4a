"""Batch norm, in training and in inference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tileops.call_spec import size_class
from tileops.errors import InputError
from tileops.kernels.batch_norm import (
    BatchNormInfer,
    BatchNormTrain,
    BatchNormTrainCall,
    ElementwiseBatchNorm,
    HeldChannelBatchNorm,
    HeldColumnBatchNorm,
    SplitChannelBatchNorm,
    SplitColumnBatchNorm,
    statistics_dtype,
)
from tileops.kernels.batch_norm.interface import BATCH_CAP
from tileops.ops.checks import aligned, check_number, contiguous, dense, shown_shape
from tileops.ops.norm import batch_norm_sharding
from tileops.ops.norm.batch_norm_backward import BatchNormBwdOp
from tileops.ops.norm.running import (
    check_pair,
    check_running_written,
    constants_of,
    normalised_by_running,
    updating,
)
from tileops.ops.norm.shape import channels_last, check_channels, dtype_of, empty_in_order
from tileops.ops.op_base import Op
from tileops.torch_boundary import TorchOp

Results = tuple[Tensor, Tensor | None, Tensor | None]


class BatchNormFwdOp(Op):
    """Normalise each channel of a batch, then scale and shift.

    Training and inference differ in what they read, write and return, so they are two kernel interfaces:
    `batch_norm_fwd_train` and `batch_norm_fwd_infer`.

    Args:
        training: Whether the statistics are the batch's (and the running ones are updated) or the running ones.
        momentum: Share of the batch's statistics in the new running ones, 0 to 1.
        eps: Added to the variance, in the units of x squared.
        target: A target that takes the op over, instead of kernel selection.
    """

    interfaces = {"batch_norm_fwd_train": BatchNormTrain, "batch_norm_fwd_infer": BatchNormInfer}
    kernel_types = {
        "held_column": HeldColumnBatchNorm,
        "split_column": SplitColumnBatchNorm,
        "held_channel": HeldChannelBatchNorm,
        "split_channel": SplitChannelBatchNorm,
        "elementwise": ElementwiseBatchNorm,
    }
    backward = BatchNormBwdOp
    sharding = batch_norm_sharding.forward
    results = ("output", "save_mean", "save_invstd")
    any_layout = True  # channels-last memory is served as it is
    torch_ops = {
        "train": TorchOp(where={"training": True}, writes=("running_mean", "running_var")),
        "infer": TorchOp(where={"training": False}, omits=("momentum",), writes=(), returns=("output",)),
    }

    def __init__(
        self, training: bool = False, momentum: float = 0.1, eps: float = 1e-5, *, target: str | None = None
    ) -> None:
        super().__init__(target=target)
        self.training = bool(training)
        self.momentum = momentum
        self.eps = eps
        check_number("momentum", momentum, least=0.0, most=1.0)
        check_number("eps", eps, least=0.0)

    def forward(
        self,
        x: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Results:
        """Return `(x - mean) * invstd * weight + bias` for each channel, and the statistics used in training.

        Args:
            x: `(N, C, *spatial)`, floating point, any layout; channels-last memory is served as it is.
            running_mean: `(C,)`, float32 or x's dtype, on x's device. Needed in inference. In training it is
                optional and written in place: `(1 - momentum) * running_mean + momentum * mean`.
            running_var: Likewise, with the unbiased variance. Given exactly where running_mean is.
            weight: `(C,)`, float32 or x's dtype, on x's device.
            bias: Likewise.

        Returns:
            `(output, save_mean, save_invstd)`. The output is new and has x's shape, dtype and memory order. In
            training the statistics are new, `(C,)`, float32 (float64 for float64); in inference both are None.

        Raises:
            InputError: An argument does not fit; nothing was written.
            OpNotAvailableError: No kernel serves the call.
            AmbiguousDispatchError: Several kernels do and none is preferred.

        Numerics: statistics in float32 by a shifted or Welford scheme, eps inside the root.
        Source: arXiv:1502.03167; agrees with `torch.nn.functional.batch_norm`.
        """
        if self.training:
            return self._train(x, running_mean, running_var, weight, bias)
        assert running_mean is not None
        assert running_var is not None
        return normalised_by_running(self, x, running_mean, running_var, weight, bias), None, None

    def _train(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Results:
        last = channels_last(x)
        call = BatchNormTrainCall(
            device=x.device,
            n=size_class(x.shape[0], BATCH_CAP),
            c=x.shape[1],
            spatial=math.prod(x.shape[2:]),
            dtype=x.dtype,
            eps=self.eps,
            momentum=self.momentum,
            channels_last=last,
            weight_dtype=dtype_of(weight),
            bias_dtype=dtype_of(bias),
            running=running_mean is not None,
        )
        kernel = self.kernel_for("batch_norm_fwd_train", call)
        x = aligned(x) if last else contiguous(x)
        if running_mean is None or running_var is None:
            return kernel(x, None, None, dense(weight), dense(bias))
        return updating(kernel, x, running_mean, running_var, weight, bias)

    def saved(self, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        """x, the statistics that this call used, and the weight."""
        x, running_mean, running_var, weight, _ = arguments
        if self.training:
            return x, *results[1:], weight
        return x, *constants_of(x, running_mean, running_var, self.eps), weight

    def check(
        self,
        x: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """Refuse arguments that do not fit."""
        beside = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
        check_channels("batch norm", x, beside)
        check_pair(running_mean, running_var)
        self._check_values(x, running_mean)
        if self.training and running_mean is not None:
            check_running_written(x, beside)

    def _check_values(self, x: Tensor, running_mean: Tensor | None) -> None:
        """Refuse a call without statistics, and one whose statistics are of single values."""
        if not self.training and running_mean is None:
            raise InputError("running_mean and running_var are None; in inference both are needed (training=False)")
        values = x.numel() // x.shape[1] if x.shape[1] else 0
        if self.training and values == 1:
            raise InputError(
                f"x has shape {shown_shape(x.shape)}: one value per channel, which has no variance; training takes at "
                "least two"
            )

    def empty_results(
        self,
        x: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Results:
        """A new tensor without elements; statistics over no values are NaN, and the running ones stay."""
        del running_mean, running_var, weight, bias
        y = empty_in_order(x)
        if not self.training:
            return y, None, None
        statistics = [x.new_full((x.shape[1],), math.nan, dtype=statistics_dtype(x.dtype)) for _ in range(2)]
        return y, statistics[0], statistics[1]
