"""Instance norm, by the statistics of its input or by running ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tileops.call_spec import size_class
from tileops.errors import InputError
from tileops.kernels.batch_norm import BatchNormInfer, ElementwiseBatchNorm
from tileops.kernels.group_norm import ClusterRowGroupNorm, GroupNorm, HeldRowGroupNorm, SplitRowGroupNorm
from tileops.kernels.group_norm.interface import ROWS_CAP
from tileops.kernels.instance_norm import (
    ClusterRowInstanceNormTrain,
    HeldRowInstanceNormTrain,
    InstanceNormTrain,
    InstanceNormTrainCall,
    SplitRowInstanceNormTrain,
)
from tileops.ops.checks import check_number, contiguous, dense, shown_shape
from tileops.ops.norm import instance_norm_sharding
from tileops.ops.norm.groups import group_norm_call, in_order_of
from tileops.ops.norm.instance_norm_backward import InstanceNormBwdOp
from tileops.ops.norm.running import (
    check_pair,
    check_running_written,
    constants_of,
    normalised_by_running,
    updating,
)
from tileops.ops.norm.shape import check_channels, dtype_of, empty_in_order
from tileops.ops.op_base import Op
from tileops.torch_boundary import TorchOp


class InstanceNormFwdOp(Op):
    """Normalise each channel of each sample, then scale and shift it.

    By the statistics of its input it is group norm with one channel a group, the interface `group_norm`; where it
    updates running statistics too, it has one of its own, `instance_norm_train`. By running statistics it is batch
    norm in inference, `batch_norm_fwd_infer`.

    Args:
        use_input_stats: Whether the statistics are those of each channel of each sample (and running ones are updated
            where they are given) or the running ones.
        momentum: Share of the batch's statistics in the new running ones, 0 to 1.
        eps: Added to the variance, in the units of x squared.
        target: A target that takes the op over, instead of kernel selection.
    """

    interfaces = {
        "group_norm": GroupNorm,
        "instance_norm_train": InstanceNormTrain,
        "batch_norm_fwd_infer": BatchNormInfer,
    }
    kernel_types = {
        "held_row": HeldRowGroupNorm,
        "cluster_row": ClusterRowGroupNorm,
        "split_row": SplitRowGroupNorm,
        "held_row_train": HeldRowInstanceNormTrain,
        "cluster_row_train": ClusterRowInstanceNormTrain,
        "split_row_train": SplitRowInstanceNormTrain,
        "elementwise": ElementwiseBatchNorm,
    }
    backward = InstanceNormBwdOp
    sharding = instance_norm_sharding.forward
    any_layout = True  # the result has x's memory order
    torch_ops = {
        "": TorchOp(where={"use_input_stats": True}, omits=("momentum",), absent=("running_mean", "running_var")),
        "train": TorchOp(where={"use_input_stats": True}, writes=("running_mean", "running_var")),
        "infer": TorchOp(where={"use_input_stats": False}, omits=("momentum",), writes=()),
    }

    def __init__(
        self, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5, *, target: str | None = None
    ) -> None:
        super().__init__(target=target)
        self.use_input_stats = bool(use_input_stats)
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
    ) -> Tensor:
        """Return `(x - mean) / sqrt(var + eps) * weight + bias` for each channel of each sample.

        Args:
            x: `(N, C, *spatial)`, floating point, any layout; by the statistics of the input more than one element
                of space.
            running_mean: `(C,)`, float32 or x's dtype, on x's device. Needed where `use_input_stats` is False. Else it
                is optional and written in place: `(1 - momentum) * running_mean + momentum * m`, `m` the mean over
                the batch of each channel's means.
            running_var: Likewise, with the mean over the batch of the unbiased variances. Given exactly where
                running_mean is.
            weight: `(C,)`, float32 or x's dtype, on x's device.
            bias: Likewise.

        Returns:
            A new tensor of x's shape, dtype and memory order.

        Raises:
            InputError: An argument does not fit; nothing was written.
            OpNotAvailableError: No kernel serves the call.
            AmbiguousDispatchError: Several kernels do and none is preferred.

        Numerics: mean and population variance in float32 (float64 for float64), eps inside the root.
        Source: arXiv:1607.08022; agrees with `torch.nn.functional.instance_norm`.
        """
        if running_mean is None or running_var is None:
            kernel = self.kernel_for("group_norm", group_norm_call(x, x.shape[1], self.eps, weight, bias))
            return in_order_of(x, kernel(contiguous(x), dense(weight), dense(bias)))
        if not self.use_input_stats:
            return normalised_by_running(self, x, running_mean, running_var, weight, bias)
        call = InstanceNormTrainCall(
            device=x.device,
            rows=size_class(x.shape[0] * x.shape[1], ROWS_CAP),
            spatial=math.prod(x.shape[2:]),
            dtype=x.dtype,
            eps=self.eps,
            momentum=self.momentum,
            weight_dtype=dtype_of(weight),
            bias_dtype=dtype_of(bias),
        )
        kernel = self.kernel_for("instance_norm_train", call)
        return in_order_of(x, updating(kernel, contiguous(x), running_mean, running_var, weight, bias))

    def saved(self, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        """x, the running statistics where they are what this call used, and the weight."""
        del results
        x, running_mean, running_var, weight, _ = arguments
        constants = (None, None) if self.use_input_stats else constants_of(x, running_mean, running_var, self.eps)
        return x, *constants, weight

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
        check_channels("instance norm", x, beside)
        check_pair(running_mean, running_var)
        if not self.use_input_stats:
            if running_mean is None:
                raise InputError(
                    "running_mean and running_var are None; without input statistics both are needed "
                    "(use_input_stats=False)"
                )
        elif math.prod(x.shape[2:]) == 1:
            raise InputError(
                f"x has shape {shown_shape(x.shape)}: one element of space, which has no variance; by the statistics "
                "of its input, instance norm takes at least two"
            )
        elif running_mean is not None:
            check_running_written(x, beside)

    def empty_results(
        self,
        x: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """A new tensor without elements; the running statistics stay."""
        del running_mean, running_var, weight, bias
        return empty_in_order(x)
