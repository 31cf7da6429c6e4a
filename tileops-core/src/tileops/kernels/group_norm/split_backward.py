"""Group norm's backward, of groups of any length."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.group_norm.backward_interface import GroupNormBwd, GroupNormBwdCall
from tileops.kernels.group_norm.group_backward import GroupBackward, build_split


@final
class SplitRowGroupNormBwd(GroupNormBwd):
    """Sums of pieces of channels, then the gradient of x, then sums over the batch; serves any group."""

    supported_archs = at_least(80)
    general = True

    @classmethod
    def refusal(cls, call: GroupNormBwdCall) -> str | None:
        """Groups of any length, of a served dtype."""
        return facts_of(call).refusal()

    @classmethod
    def entry_for(cls, call: GroupNormBwdCall) -> tuple[Hashable, Callable[[], SplitRowGroupNormBwd]]:
        """One build serves every batch size and every number of groups."""
        return (call.device, facts_of(call)), lambda: cls(call)

    def __init__(self, call: GroupNormBwdCall) -> None:
        super().__init__(call)
        self._gradients = build_split(facts_of(call), call.arch, call.sm_count)

    def forward(self, grad: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor | None, ...]:
        """Launch the programs."""
        return self._gradients(grad, x, weight)


def facts_of(call: GroupNormBwdCall) -> GroupBackward:
    """What the programs are built from."""
    return GroupBackward(
        call.channels, call.spatial, call.dtype, call.eps, call.weight_dtype, call.bias_dtype, call.need
    )
