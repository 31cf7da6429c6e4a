"""Instance norm's backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tileops.errors import InputError
from tileops.kernels.batch_norm import BatchNormBwdCall, BatchNormBwdInfer, ElementwiseBatchNormBwd
from tileops.kernels.group_norm import (
    GroupNormBwd,
    GroupNormBwdCall,
    HeldRowGroupNormBwd,
    ShortRowGroupNormBwd,
    SplitRowGroupNormBwd,
)
from tileops.ops.backward_op import BackwardOp
from tileops.ops.checks import check_like, check_number
from tileops.ops.norm import instance_norm_sharding
from tileops.ops.norm.batch_norm_backward import batch_norm_bwd_call, check_constants, gradients_of_batch
from tileops.ops.norm.groups import gradients_of_groups, group_norm_bwd_call
from tileops.ops.norm.shape import bias_dtype_of, check_channels, empty_gradients


class InstanceNormBwdOp(BackwardOp):
    """The gradients of instance norm.

    By the statistics of its input it is group norm's backward with one channel a group, the interface
    `group_norm_bwd`; by running statistics it is batch norm's in inference, `batch_norm_bwd_infer`.

    Args:
        use_input_stats: Whether the statistics are those of each channel of each sample.
        eps: What was added to the variance, in the units of x squared.
        need: Whether the gradients of x, weight and bias are wanted.
        bias_dtype: The dtype of the bias's gradient; None for that of the weight, of x where there is none.
        target: A target that takes the op over, instead of kernel selection.
    """

    interfaces = {"group_norm_bwd": GroupNormBwd, "batch_norm_bwd_infer": BatchNormBwdInfer}
    kernel_types = {
        "short_row": ShortRowGroupNormBwd,
        "held_row": HeldRowGroupNormBwd,
        "split_row": SplitRowGroupNormBwd,
        "elementwise": ElementwiseBatchNormBwd,
    }
    sharding = instance_norm_sharding.backward
    any_layout = True  # the gradient of x has x's memory order
    results = ("grad_x", "grad_weight", "grad_bias")

    def __init__(
        self,
        use_input_stats: bool = True,
        eps: float = 1e-5,
        need: Sequence[bool] = (True, True, True),
        bias_dtype: torch.dtype | None = None,
        *,
        target: str | None = None,
    ) -> None:
        super().__init__(need, target=target)
        self.use_input_stats = bool(use_input_stats)
        self.eps = eps
        self.bias_dtype = bias_dtype
        check_number("eps", eps, least=0.0)

    def forward(
        self,
        grad: Tensor,
        x: Tensor,
        mean: Tensor | None = None,
        invstd: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of x, weight and bias of `InstanceNormFwdOp`.

        Args:
            grad: The gradient of the output: x's shape and dtype, on x's device, any layout.
            x: The input of the forward: `(N, C, *spatial)`, floating point, any layout.
            mean: `(C,)`, float32 (float64 for float64), on x's device: the running mean that the forward used. None
                where it used the statistics of x.
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

        Numerics: statistics of x are recomputed from it; they and the sums are in float32 (float64 for float64).
        Source: arXiv:1607.08022; agrees with the gradients of `torch.nn.functional.instance_norm`.
        """
        interface, call = self.request(x, weight)
        kernel = self.kernel_for(interface, call)
        if isinstance(call, GroupNormBwdCall):
            return gradients_of_groups(kernel, grad, x, weight)
        assert mean is not None
        assert invstd is not None
        return gradients_of_batch(kernel, call, grad, x, mean, invstd, weight)

    def request(self, x: Tensor, weight: Tensor | None = None) -> tuple[str, GroupNormBwdCall | BatchNormBwdCall]:
        """The interface and the call spec. x alone says what device and dtype everything has."""
        bias_dtype = bias_dtype_of(self, x, weight)
        if self.use_input_stats:
            return "group_norm_bwd", group_norm_bwd_call(x, x.shape[1], self.eps, weight, self.need, bias_dtype)
        return "batch_norm_bwd_infer", batch_norm_bwd_call(x, weight, self.need, bias_dtype)

    def check(
        self,
        grad: Tensor,
        x: Tensor,
        mean: Tensor | None = None,
        invstd: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> None:
        """Refuse arguments that do not fit."""
        check_channels("instance norm", x, {"weight": weight})
        check_like("grad", grad, x)
        if not self.use_input_stats:
            check_constants(x, mean, invstd)
        elif mean is not None or invstd is not None:
            raise InputError(
                "mean and invstd are given; with use_input_stats=True the statistics are those of x: leave them out"
            )

    def empty_results(
        self,
        grad: Tensor,
        x: Tensor,
        mean: Tensor | None = None,
        invstd: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """A gradient of x without elements, and sums over no values."""
        return empty_gradients(self, x, weight, self.wanted(grad, x, mean, invstd, weight))
