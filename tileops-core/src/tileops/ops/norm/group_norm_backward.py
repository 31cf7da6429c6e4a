"""Group norm's backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tileops.kernels.group_norm import (
    GroupNormBwd,
    GroupNormBwdCall,
    HeldRowGroupNormBwd,
    ShortRowGroupNormBwd,
    SplitRowGroupNormBwd,
)
from tileops.ops.backward_op import BackwardOp
from tileops.ops.checks import check_like, check_number
from tileops.ops.norm.groups import (
    check_divides,
    check_groups,
    gradients_of_groups,
    group_norm_bwd_call,
)
from tileops.ops.norm.shape import bias_dtype_of, check_channels, empty_gradients, samples_alone
from tileops.sharding import ShardByShard


class GroupNormBwdOp(BackwardOp):
    """The gradients of group norm.

    Args:
        num_groups: Groups that the channels are divided into.
        eps: What was added to the variance, in the units of x squared.
        need: Whether the gradients of x, weight and bias are wanted.
        bias_dtype: The dtype of the bias's gradient; None for that of the weight, of x where there is none.
        target: A target that takes the op over, instead of kernel selection.
    """

    interfaces = {"group_norm_bwd": GroupNormBwd}
    kernel_types = {
        "short_row": ShortRowGroupNormBwd,
        "held_row": HeldRowGroupNormBwd,
        "split_row": SplitRowGroupNormBwd,
    }
    sharding = ShardByShard(samples_alone, sharded=("x", "grad"), sums=("grad_weight", "grad_bias"))
    any_layout = True  # the gradient of x has x's memory order
    results = ("grad_x", "grad_weight", "grad_bias")

    def __init__(
        self,
        num_groups: int,
        eps: float = 1e-5,
        need: Sequence[bool] = (True, True, True),
        bias_dtype: torch.dtype | None = None,
        *,
        target: str | None = None,
    ) -> None:
        super().__init__(need, target=target)
        self.num_groups = num_groups
        self.eps = eps
        self.bias_dtype = bias_dtype
        check_groups(num_groups)
        check_number("eps", eps, least=0.0)

    def forward(
        self, grad: Tensor, x: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of x, weight and bias of `GroupNormFwdOp`.

        Args:
            grad: The gradient of the output: x's shape and dtype, on x's device, any layout.
            x: The input of the forward: `(N, C, *spatial)`, floating point, any layout; C a multiple of `num_groups`.
            weight: `(C,)`, float32 or x's dtype, on x's device.

        Returns:
            `(grad_x, grad_weight, grad_bias)`, new: x's shape, dtype and memory order; `(C,)` and the weight's
            dtype; `(C,)` and `bias_dtype`. None for what is not needed, and for the gradient of an absent weight.
            No argument is written.

        Raises:
            InputError: An argument does not fit.
            OpNotAvailableError: No kernel serves the call.
            AmbiguousDispatchError: Several kernels do and none is preferred.

        Numerics: statistics are recomputed from x; they and the sums are in float32 (float64 for float64).
        Source: arXiv:1803.08494; agrees with the gradients of `torch.nn.functional.group_norm`.
        """
        return gradients_of_groups(self.kernel_for(*self.request(x, weight)), grad, x, weight)

    def request(self, x: Tensor, weight: Tensor | None = None) -> tuple[str, GroupNormBwdCall]:
        """The call spec. x alone says what device and dtype everything has."""
        bias_dtype = bias_dtype_of(self, x, weight)
        return "group_norm_bwd", group_norm_bwd_call(x, self.num_groups, self.eps, weight, self.need, bias_dtype)

    def check(self, grad: Tensor, x: Tensor, weight: Tensor | None = None) -> None:
        """Refuse arguments that do not fit."""
        check_channels("group norm", x, {"weight": weight})
        check_divides(x, self.num_groups)
        check_like("grad", grad, x)

    def empty_results(
        self, grad: Tensor, x: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """A gradient of x without elements, and sums over no values."""
        return empty_gradients(self, x, weight, self.wanted(grad, x, weight))
