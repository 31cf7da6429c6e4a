"""How the backward kernels of row norms are built and called, which the norms share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from tileops.kernels.row_backward_plan import (
    BackwardPlan,
    held_backward_plan,
    longest_held_backward_row,
    streamed_backward_plan,
)
from tileops.kernels.row_plan import ceil_div, streamed_row_plan

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
Launch = Callable[..., Any]

EARLY_LAUNCH_ARCH: Final = 90
"""The first architecture that launches a program before the one it follows has ended."""

TURNS_AT_STRIPES: Final = 4
"""Blocks that walk down stripes, for each that the device runs at a time: the last turn, part empty, costs little."""


@dataclasses.dataclass(frozen=True)
class RowBackward:
    """What a program of a backward is built from. Equal ones on one device are one build.

    Args:
        n: Elements of a row.
        dtype: Of x and the gradients of x and of the output.
        eps: What the forward added to the variance or the mean square.
        weight_dtype: Of the weight and its gradient; None where there is none.
        bias_dtype: Of the gradient of the bias.
        need: Whether the gradients of x, weight and bias are wanted.
        centred: Whether rows are centred on their mean: layer norm's, not RMS norm's.
    """

    n: int
    dtype: torch.dtype
    eps: float
    weight_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None
    need: tuple[bool, bool, bool]
    centred: bool

    @property
    def sums(self) -> int:
        """How many sums over rows are wanted."""
        return sum(self.need[1:])

    @property
    def dtypes_of_sums(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """The dtypes of the gradients of weight and bias; None for what is not wanted."""
        _, of_weight, of_bias = self.need
        return self.weight_dtype if of_weight else None, self.bias_dtype if of_bias else None

    def held_plan(self, smem_budget: int) -> BackwardPlan | None:
        """How a block holds rows and sums; None where it cannot."""
        return held_backward_plan(self.n, self.dtype, self.weight_dtype, self.sums, smem_budget)

    def refusal_to_hold(self, smem_budget: int) -> str | None:
        """Why a block cannot hold such a row; None where it can."""
        if self.held_plan(smem_budget) is not None:
            return None
        most = longest_held_backward_row(self.n, self.dtype, self.sums, smem_budget)
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"row of {self.n} elements; with {self.sums} sums over rows, {smem_budget} bytes of shared memory serve "
            f"up to {most} of {dtype} at its alignment"
        )


def build_held(facts: RowBackward, arch: int, sm_count: int, smem_budget: int) -> Callable[..., Gradients]:
    """Compile the programs for rows that a block holds.

    Returns:
        A function of the gradient, x and weight (or None), as the interfaces have them.
    """
    # Imported here: importing tilelang takes seconds, and only a kernel that is built needs it.
    from tileops.kernels.compiled_program import compiled_once
    from tileops.kernels.row_backward_program import row_backward_held

    plan = facts.held_plan(smem_budget)
    assert plan is not None, "refusal() refuses such rows"
    launch: Launch = compiled_once(
        row_backward_held, arch, plan, facts.dtype, facts.weight_dtype, facts.bias_dtype, facts.need,
        centred=facts.centred,
    )  # fmt: skip
    add_parts = _build_sums(facts, arch)
    most_blocks = sm_count * plan.blocks_per_sm
    n, eps, rows_per_block, of_x = facts.n, float(facts.eps), plan.row.rows_per_block, facts.need[0]

    def run(grad: Tensor, x: Tensor, weight: Tensor | None) -> Gradients:
        rows = x.view(-1, n)
        blocks = min(most_blocks, ceil_div(rows.shape[0], rows_per_block))
        grad_x = torch.empty_like(x) if of_x else None
        sums, partials = _empty_sums(facts, x), _empty_partials(facts, x, blocks)
        written = None if grad_x is None else grad_x.view(-1, n)
        launch(grad.view(-1, n), rows, _flat(weight), written, partials, *sums, blocks, eps)
        if blocks > 1:  # the only block writes the sums itself
            add_parts(partials, *sums)
        return grad_x, *sums

    return run


def build_streamed(facts: RowBackward, arch: int, sm_count: int) -> Callable[..., Gradients]:
    """Compile the programs for rows of any length; returns what `build_held` does."""
    from tileops.kernels.compiled_program import compiled_once
    from tileops.kernels.row_backward_streamed_program import (
        BLOCKS_PER_SM,
        ROWS_IN_FLIGHT,
        STATISTICS,
        row_backward_statistics,
        row_backward_streamed,
    )

    n, dtype, eps, of_x = facts.n, facts.dtype, float(facts.eps), facts.need[0]
    stripe = streamed_backward_plan(n, dtype)
    measure: Launch = compiled_once(
        row_backward_statistics, arch, streamed_row_plan(n, dtype), dtype, facts.weight_dtype, centred=facts.centred
    )
    launch: Launch = compiled_once(row_backward_streamed, arch, stripe, dtype, facts.weight_dtype, facts.need)
    add_parts = _build_sums(facts, arch)
    most_parts = ceil_div(TURNS_AT_STRIPES * BLOCKS_PER_SM * sm_count, len(stripe.steps))

    def run(grad: Tensor, x: Tensor, weight: Tensor | None) -> Gradients:
        rows, grads, flat = x.view(-1, n), grad.view(-1, n), _flat(weight)
        parts = min(most_parts, ceil_div(rows.shape[0], ROWS_IN_FLIGHT))
        statistics = x.new_empty((rows.shape[0], STATISTICS), dtype=torch.float32)
        grad_x = torch.empty_like(x) if of_x else None
        sums, partials = _empty_sums(facts, x), _empty_partials(facts, x, parts)
        measure(grads, rows, flat, statistics, eps)
        written = None if grad_x is None else grad_x.view(-1, n)
        launch(grads, rows, flat, statistics, written, partials, parts)
        add_parts(partials, *sums)
        return grad_x, *sums

    return run


def _build_sums(facts: RowBackward, arch: int) -> Launch:
    """A function of the partial sums and of the gradients of weight and bias, which it fills as far as wanted."""
    if not facts.sums:
        return lambda *_: None
    from tileops.kernels.compiled_program import compiled_once
    from tileops.kernels.row_backward_sums_program import sums_of_parts

    return compiled_once(sums_of_parts, arch, facts.n, *facts.dtypes_of_sums, launched_early=arch >= EARLY_LAUNCH_ARCH)


def _empty_sums(facts: RowBackward, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    of_weight, of_bias = (
        None if dtype is None else x.new_empty(facts.n, dtype=dtype) for dtype in facts.dtypes_of_sums
    )
    return of_weight, of_bias


def _empty_partials(facts: RowBackward, x: Tensor, parts: int) -> Tensor | None:
    return x.new_empty((facts.sums, parts, facts.n), dtype=torch.float32) if facts.sums else None


def _flat(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.view(-1)
