"""Group norm's backward, of groups that fit in registers beside their gradient."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.group_norm.backward_interface import GroupNormBwd, GroupNormBwdCall
from tileops.kernels.group_norm.group_backward import build_held
from tileops.kernels.group_norm.held_backward_plan import HeldBackwardPlan, held_backward_plan
from tileops.kernels.group_norm.split_backward import facts_of


@final
class HeldRowGroupNormBwd(GroupNormBwd):
    """Reads x and the gradient of a group once, whole warps a channel; sums over the batch follow."""

    supported_archs = at_least(80)

    @classmethod
    def refusal(cls, call: GroupNormBwdCall) -> str | None:
        """Groups of a served dtype whose channels fill warps, and that a block or a cluster holds."""
        return facts_of(call).refusal_to_hold(plan_of(call))

    @classmethod
    def entry_for(cls, call: GroupNormBwdCall) -> tuple[Hashable, Callable[[], HeldRowGroupNormBwd]]:
        """One build serves every batch size and every number of groups that one plan is for."""
        return (call.device, facts_of(call), plan_of(call)), lambda: cls(call)

    def __init__(self, call: GroupNormBwdCall) -> None:
        super().__init__(call)
        plan = plan_of(call)
        assert plan is not None, "refusal() refuses such groups"
        self._gradients = build_held(facts_of(call), plan, call.arch)

    def forward(self, grad: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor | None, ...]:
        """Launch the programs."""
        return self._gradients(grad, x, weight)


def plan_of(call: GroupNormBwdCall) -> HeldBackwardPlan | None:
    """How registers hold the groups of a call; None where they do not."""
    return held_backward_plan(call.channels, call.spatial, call.dtype, call.rows, call.arch, call.sm_count)
