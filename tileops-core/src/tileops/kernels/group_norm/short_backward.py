"""Group norm's backward, of short groups of short channels."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.group_norm.backward_interface import GroupNormBwd, GroupNormBwdCall
from tileops.kernels.group_norm.group_backward import build_short
from tileops.kernels.group_norm.split_backward import facts_of


@final
class ShortRowGroupNormBwd(GroupNormBwd):
    """A block walks over the samples of one group, whose elements it sums in registers."""

    supported_archs = at_least(80)

    @classmethod
    def refusal(cls, call: GroupNormBwdCall) -> str | None:
        """Groups of a served dtype that a warp holds, of channels that do not fill one."""
        return facts_of(call).refusal_as_short()

    @classmethod
    def entry_for(cls, call: GroupNormBwdCall) -> tuple[Hashable, Callable[[], ShortRowGroupNormBwd]]:
        """One build serves every batch size and every number of groups."""
        return (call.device, facts_of(call)), lambda: cls(call)

    def __init__(self, call: GroupNormBwdCall) -> None:
        super().__init__(call)
        self._gradients = build_short(facts_of(call), call.arch, call.sm_count)

    def forward(self, grad: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor | None, ...]:
        """Launch the programs."""
        return self._gradients(grad, x, weight)
