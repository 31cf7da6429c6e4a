"""Instance norm that updates running statistics, of channels of any length."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.group_norm.group_rows import build_split
from tileops.kernels.instance_norm.interface import InstanceNormTrain, InstanceNormTrainCall
from tileops.kernels.instance_norm.training import build_training, facts_of, identity_of


@final
class SplitRowInstanceNormTrain(InstanceNormTrain):
    """Several blocks a channel of a sample: moments of its parts, then the output; serves any channel."""

    supported_archs = at_least(80)
    general = True

    @classmethod
    def refusal(cls, call: InstanceNormTrainCall) -> str | None:
        """Channels of any length, of a served dtype."""
        return facts_of(call).refusal()

    @classmethod
    def entry_for(cls, call: InstanceNormTrainCall) -> tuple[Hashable, Callable[[], SplitRowInstanceNormTrain]]:
        """One build serves every batch size and every number of channels."""
        return identity_of(call), lambda: cls(call)

    def __init__(self, call: InstanceNormTrainCall) -> None:
        super().__init__(call)
        self._train = build_training(call, lambda: build_split(facts_of(call), call.arch, call.sm_count))

    def forward(
        self, x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Three launches: two for the output, then the running statistics."""
        return self._train(x, running_mean, running_var, weight, bias)
