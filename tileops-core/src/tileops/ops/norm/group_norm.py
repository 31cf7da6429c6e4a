"""Group norm."""

from __future__ import annotations

import torch
from torch import Tensor

from tileops.kernels.group_norm import ClusterRowGroupNorm, GroupNorm, HeldRowGroupNorm, SplitRowGroupNorm
from tileops.ops.checks import check_number, contiguous, dense
from tileops.ops.norm.group_norm_backward import GroupNormBwdOp
from tileops.ops.norm.groups import check_divides, check_groups, group_norm_call, in_order_of
from tileops.ops.norm.shape import check_channels, empty_in_order, samples_alone
from tileops.ops.op_base import Op
from tileops.sharding import ShardByShard
from tileops.torch_boundary import TorchOp
from tileops.torch_guards import Sizes


class GroupNormFwdOp(Op):
    """Normalise each group of channels of each sample, then scale and shift each channel.

    Args:
        num_groups: Groups that the channels are divided into, in their order, all of one size.
        eps: Added to the variance, in the units of x squared.
        target: A target that takes the op over, instead of kernel selection.
    """

    interfaces = {"group_norm": GroupNorm}
    kernel_types = {"held_row": HeldRowGroupNorm, "cluster_row": ClusterRowGroupNorm, "split_row": SplitRowGroupNorm}
    backward = GroupNormBwdOp
    sharding = ShardByShard(samples_alone)
    any_layout = True  # the result has x's memory order
    torch_ops = {"": TorchOp(autocast={"cuda": torch.float32})}

    def __init__(self, num_groups: int, eps: float = 1e-5, *, target: str | None = None) -> None:
        super().__init__(target=target)
        self.num_groups = num_groups
        self.eps = eps
        check_groups(num_groups)
        check_number("eps", eps, least=0.0)

    def forward(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Return `(x - mean) / sqrt(var + eps) * weight + bias`, statistics over each group of each sample.

        Args:
            x: `(N, C, *spatial)`, floating point, any layout; C a multiple of `num_groups`.
            weight: `(C,)`, float32 or x's dtype, on x's device.
            bias: Likewise.

        Returns:
            A new tensor of x's shape, dtype and memory order. No argument is written.

        Raises:
            InputError: An argument does not fit.
            OpNotAvailableError: No kernel serves the call.
            AmbiguousDispatchError: Several kernels do and none is preferred.

        Numerics: mean and population variance in float32 (float64 for float64), eps inside the root.
        Source: arXiv:1803.08494; agrees with `torch.nn.functional.group_norm`.
        """
        kernel = self.kernel_for("group_norm", group_norm_call(x, self.num_groups, self.eps, weight, bias))
        return in_order_of(x, kernel(contiguous(x), dense(weight), dense(bias)))

    def check(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> None:
        """Refuse arguments that do not fit."""
        check_channels("group norm", x, {"weight": weight, "bias": bias})
        check_divides(x, self.num_groups)

    def call_sizes(self, x: Tensor, *beside: Tensor | None) -> Sizes:
        """All sizes: the number of rows has a class in the spec."""
        return [tuple(x.shape), *([tuple(x.shape[1:2])] * len(beside))]

    def empty_results(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """A new tensor without elements."""
        del weight, bias
        return empty_in_order(x)
