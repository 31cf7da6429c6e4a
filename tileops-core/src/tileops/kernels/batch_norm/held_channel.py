"""Batch norm in training where a channel stays on chip, in one block or in one cluster of blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final, final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.batch_norm.interface import BatchNormTrain, BatchNormTrainCall
from tileops.kernels.batch_norm.launch import (
    Launch,
    Results,
    built_together,
    constants_of,
    identity_facts,
    launch_training,
    program_facts,
)
from tileops.kernels.batch_norm.regions import HeldPlan, held_plans, refusal_of, vector_width
from tileops.kernels.kernel_base import Entry

SM_WARPS: Final = 1
"""Warps that an SM has at least, as far as a batch has vectors for them.

More cost more in a block's start and its barriers than they gain, or make blocks too large for all to run at once.
Measured on an H200 in float16, µs of 1, 8, 16 and 32 warps: (2, 16, 4096) 2.8, 3.9, 3.9, 3.9; (1, 64, 12544) 4.0,
4.1, 4.9, 4.9; (32, 1024, 196) 10.4, 10.4, 10.5, 10.5; (16, 512, 784) 9.6 with each; in clusters (32, 128, 784) 9.6, 9.5,
9.0, 9.2; (64, 512, 784) 38.7, 38.5, 38.4, 38.4.
"""

REGISTERS: Final = 64
"""Registers of a thread: 1024 threads share an SM's 65536."""


@final
class HeldChannelBatchNorm(BatchNormTrain):
    """One block a channel up to 48 KiB; from architecture 90 on a cluster of 2 or 8 up to about 1.1 MiB."""

    supported_archs = at_least(80)

    @classmethod
    def refusal(cls, call: BatchNormTrainCall) -> str | None:
        """None where a block holds a channel, or a cluster."""
        return refusal_of("held_channel", call)

    @classmethod
    def entry_for(cls, call: BatchNormTrainCall) -> tuple[Hashable, Callable[[], Entry]]:
        """All batch sizes share one entry: it launches the first of its programs that holds the batch."""
        return (*identity_facts(call, call.spatial), *held_plans(call)), lambda: _entry(call)


def _entry(call: BatchNormTrainCall) -> Entry:
    """The programs as one entry, with the contract of `BatchNormTrain.forward`."""
    c, spatial, constants = call.c, call.spatial, constants_of(call)
    plans = held_plans(call)
    launches = built_together([lambda plan=plan: _launch(call, plan) for plan in plans])
    holders = [(plan.most_n, launch) for plan, launch in zip(plans, launches)]

    def run(
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Results:
        n = x.shape[0]
        launch = next(launch for most_n, launch in holders if n <= most_n)
        return launch_training(launch, x, (n, c, spatial), c, (running_mean, running_var, weight, bias), constants)

    return Entry(run, kernels=launches)


def _launch(call: BatchNormTrainCall, plan: HeldPlan) -> Launch:
    from tileops.kernels.batch_norm.held_channel_program import held_channel_program

    program = held_channel_program(
        *program_facts(call, call.spatial),
        vector=vector_width(call.spatial, call.dtype),
        blocks=plan.blocks,
        most_warps=plan.most_warps,
        fill_warps=-(-call.sm_count * SM_WARPS // (call.c * plan.blocks)),
        held_steps=plan.held,
        parked_steps=plan.parked,
        parking_group=plan.group,
        registers=REGISTERS,
    )
    return Launch(call, program)
