"""Batch norm in training, one cluster of blocks a channel."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.batch_norm.interface import BatchNormTrain, BatchNormTrainCall
from tileops.kernels.batch_norm.launch import identity_facts, launch_training, program_facts
from tileops.kernels.batch_norm.regions import (
    CLUSTER_ARCH,
    CLUSTER_SHARERS,
    CLUSTER_THREADS,
    ClusterPlan,
    cluster_plan,
    refusal_of,
    vector_width,
)


@final
class ClusterChannelBatchNorm(BatchNormTrain):
    """One cluster of up to 8 blocks a channel, which their registers and shared memory hold: 48 KiB to about 1.2 MiB."""

    supported_archs = at_least(CLUSTER_ARCH)

    @classmethod
    def refusal(cls, call: BatchNormTrainCall) -> str | None:
        """None where a cluster holds a channel and one block is not enough for it."""
        return refusal_of("cluster_channel", call)

    @classmethod
    def entry_for(cls, call: BatchNormTrainCall) -> tuple[Hashable, Callable[[], ClusterChannelBatchNorm]]:
        """Batch sizes share a program as far as they ask for the same cluster."""
        return (*identity_facts(call, call.spatial), _plan(call)), lambda: cls(call)

    def __init__(self, call: BatchNormTrainCall | None = None) -> None:
        super().__init__(call)
        assert call is not None
        from tileops.kernels.batch_norm.cluster_channel_program import cluster_channel_program

        plan = _plan(call)
        self._shape = (call.c, call.spatial)
        self._launch: Callable[..., Any] = cluster_channel_program(
            *program_facts(call, call.spatial),
            vector=vector_width(call.spatial, call.dtype),
            blocks=plan.blocks,
            threads=CLUSTER_THREADS,
            held_steps=plan.held,
            parked_steps=plan.parked,
            min_blocks=CLUSTER_SHARERS,
        )

    def forward(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One launch."""
        shape = (x.shape[0], *self._shape)
        return launch_training(self._launch, x, shape, self._shape[0], (running_mean, running_var, weight, bias))


def _plan(call: BatchNormTrainCall) -> ClusterPlan:
    plan = cluster_plan(call)
    assert plan is not None, "refused"
    return plan
