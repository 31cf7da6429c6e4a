"""Group norm of groups that a cluster of blocks holds."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.group_norm.cluster_plan import CLUSTER_ARCH
from tileops.kernels.group_norm.group_rows import build_cluster
from tileops.kernels.group_norm.held_row import facts_of
from tileops.kernels.group_norm.interface import GroupNorm, GroupNormCall


@final
class ClusterRowGroupNorm(GroupNorm):
    """Reads a group once into the registers and the shared memory of 2 to 8 blocks; serves up to about 1.1 MiB."""

    supported_archs = at_least(CLUSTER_ARCH)

    @classmethod
    def refusal(cls, call: GroupNormCall) -> str | None:
        """Groups of a served dtype that are too long for one block and that a cluster holds."""
        return facts_of(call).refusal_to_cluster(call.arch, call.smem_budget)

    @classmethod
    def entry_for(cls, call: GroupNormCall) -> tuple[Hashable, Callable[[], ClusterRowGroupNorm]]:
        """One program serves every batch size and every number of groups."""
        return (call.device, facts_of(call)), lambda: cls(call)

    def __init__(self, call: GroupNormCall) -> None:
        super().__init__(call)
        self._normalise = build_cluster(facts_of(call), call.arch, call.smem_budget)

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """One launch."""
        return self._normalise(x, weight, bias, None)
