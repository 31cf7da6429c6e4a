"""Batch norm's backward in training where a channel stays on chip, in one block or in one cluster of blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.batch_norm.backward_interface import BatchNormBwdCall, BatchNormBwdTrain
from tileops.kernels.batch_norm.backward_launch import Gradients, Results, identity_facts, program_facts
from tileops.kernels.batch_norm.held_channel import REGISTERS, SM_WARPS
from tileops.kernels.batch_norm.launch import Launch, built_together, viewed
from tileops.kernels.batch_norm.regions import HeldPlan, held_plans, refusal_of, vector_width
from tileops.kernels.kernel_base import Entry


@final
class HeldChannelBatchNormBwd(BatchNormBwdTrain):
    """One block a channel up to 24 KiB; from architecture 90 on a cluster of 2 or 8 up to 256 KiB."""

    supported_archs = at_least(80)

    @classmethod
    def refusal(cls, call: BatchNormBwdCall) -> str | None:
        """None where a block holds a channel of x and of the gradient, or a cluster."""
        return refusal_of("held_channel", call)

    @classmethod
    def entry_for(cls, call: BatchNormBwdCall) -> tuple[Hashable, Callable[[], Entry]]:
        """All batch sizes share one entry: it launches the first of its programs that holds the batch."""
        return (*identity_facts(call, call.spatial), *held_plans(call)), lambda: _entry(call)


def _entry(call: BatchNormBwdCall) -> Entry:
    """The programs as one entry, with the contract of `BatchNormBwdTrain.forward`."""
    c, spatial, results = call.c, call.spatial, Results.of(call)
    plans = held_plans(call)
    launches = built_together([lambda plan=plan: _launch(call, plan) for plan in plans])
    holders = [(plan.most_n, launch) for plan, launch in zip(plans, launches)]

    def run(grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None) -> Gradients:
        n = x.shape[0]
        shape = (n, c, spatial)
        grad_x, *sums = gradients = results.empty(x)
        launch = next(launch for most_n, launch in holders if n <= most_n)
        launch(viewed(grad, shape), viewed(x, shape), mean, invstd, weight, viewed(grad_x, shape), *sums)
        return gradients

    return Entry(run, kernels=launches)


def _launch(call: BatchNormBwdCall, plan: HeldPlan) -> Launch:
    from tileops.kernels.batch_norm.held_channel_backward_program import held_channel_backward_program

    program = held_channel_backward_program(
        *program_facts(call, call.spatial),
        vector=vector_width(call.spatial, call.dtype),
        blocks=plan.blocks,
        most_warps=plan.most_warps,
        fill_warps=-(-call.sm_count * SM_WARPS // (call.c * plan.blocks)),
        held_steps=plan.held,
        registers=REGISTERS,
    )
    return Launch(call, program)
