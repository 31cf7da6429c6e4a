"""Instance norm that updates running statistics, of channels that fit in registers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.group_norm.group_rows import build_held
from tileops.kernels.instance_norm.interface import InstanceNormTrain, InstanceNormTrainCall
from tileops.kernels.instance_norm.training import build_training, facts_of, identity_of


@final
class HeldRowInstanceNormTrain(InstanceNormTrain):
    """Reads a channel of a sample once into the registers of 1 to 512 threads; see `HeldRowGroupNorm`."""

    supported_archs = at_least(80)

    @classmethod
    def refusal(cls, call: InstanceNormTrainCall) -> str | None:
        """Channels of a served dtype that 512 threads can hold, 32 registers each."""
        return facts_of(call).refusal_to_hold(call.arch, call.smem_budget)

    @classmethod
    def entry_for(cls, call: InstanceNormTrainCall) -> tuple[Hashable, Callable[[], HeldRowInstanceNormTrain]]:
        """One build serves every batch size and every number of channels."""
        return identity_of(call), lambda: cls(call)

    def __init__(self, call: InstanceNormTrainCall) -> None:
        super().__init__(call)
        self._train = build_training(call, lambda: build_held(facts_of(call), call.arch))

    def forward(
        self, x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Two launches: the output, then the running statistics."""
        return self._train(x, running_mean, running_var, weight, bias)
