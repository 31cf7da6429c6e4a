"""Group norm of groups that fit in registers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.group_norm.group_rows import GroupRows, build_held
from tileops.kernels.group_norm.interface import GroupNorm, GroupNormCall


@final
class HeldRowGroupNorm(GroupNorm):
    """Reads a group once into the registers of 1 to 512 threads; serves up to 64 KiB, 40 where there are clusters."""

    supported_archs = at_least(80)

    @classmethod
    def refusal(cls, call: GroupNormCall) -> str | None:
        """Groups of a served dtype that 512 threads can hold, 32 registers each."""
        return facts_of(call).refusal_to_hold(call.arch, call.smem_budget)

    @classmethod
    def entry_for(cls, call: GroupNormCall) -> tuple[Hashable, Callable[[], HeldRowGroupNorm]]:
        """One program serves every batch size and every number of groups."""
        return (call.device, facts_of(call)), lambda: cls(call)

    def __init__(self, call: GroupNormCall) -> None:
        super().__init__(call)
        self._normalise = build_held(facts_of(call), call.arch)

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """One launch."""
        return self._normalise(x, weight, bias, None)


def facts_of(call: GroupNormCall) -> GroupRows:
    """What the programs are built from."""
    return GroupRows(call.channels, call.spatial, call.dtype, call.eps, call.weight_dtype, call.bias_dtype)
