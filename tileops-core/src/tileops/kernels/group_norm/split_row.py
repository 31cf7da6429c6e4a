"""Group norm of groups of any length."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.group_norm.group_rows import build_split
from tileops.kernels.group_norm.held_row import facts_of
from tileops.kernels.group_norm.interface import GroupNorm, GroupNormCall


@final
class SplitRowGroupNorm(GroupNorm):
    """Several blocks a group in two launches: moments of its parts, then the output; serves any group."""

    supported_archs = at_least(80)
    general = True

    @classmethod
    def refusal(cls, call: GroupNormCall) -> str | None:
        """Groups of any length, of a served dtype."""
        return facts_of(call).refusal()

    @classmethod
    def entry_for(cls, call: GroupNormCall) -> tuple[Hashable, Callable[[], SplitRowGroupNorm]]:
        """The two programs serve every batch size; how long a part is is an argument of their launches."""
        return (call.device, facts_of(call)), lambda: cls(call)

    def __init__(self, call: GroupNormCall) -> None:
        super().__init__(call)
        self._normalise = build_split(facts_of(call), call.arch, call.sm_count)

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Two launches."""
        return self._normalise(x, weight, bias, None)
