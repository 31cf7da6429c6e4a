"""How the backward kernels of group norm are built and called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tileops.kernels.group_norm.group_rows import GroupRows, Launch, compiled_together
from tileops.kernels.group_norm.held_backward_plan import LEAST_VECTORS, HeldBackwardPlan
from tileops.kernels.group_norm.short_backward_plan import parts_of_samples, short_backward_plan
from tileops.kernels.group_norm.split_plan import IN_FLIGHT, piece_plan, split_plan
from tileops.kernels.row_backward import EARLY_LAUNCH_ARCH
from tileops.kernels.row_plan import vector_elements

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclasses.dataclass(frozen=True)
class GroupBackward:
    """What the programs of a backward are built from. Equal ones on one device are one build.

    Args:
        channels: Channels of a group.
        spatial: Elements of a channel.
        dtype: Of x and the gradients of x and of the output.
        eps: What the forward added to the variance.
        weight_dtype: Of the weight and its gradient; None where there is none.
        bias_dtype: Of the gradient of the bias.
        need: Whether the gradients of x, weight and bias are wanted.
    """

    channels: int
    spatial: int
    dtype: torch.dtype
    eps: float
    weight_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None
    need: tuple[bool, bool, bool]

    @property
    def n(self) -> int:
        """Elements of a row."""
        return self.channels * self.spatial

    @property
    def dtypes_of_sums(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """The dtypes of the gradients of weight and bias; None for what is not wanted."""
        _, of_weight, of_bias = self.need
        return self.weight_dtype if of_weight else None, self.bias_dtype if of_bias else None

    def refusal(self) -> str | None:
        """Why no program serves such rows; None where one does."""
        affine = (self.weight_dtype, self.bias_dtype)
        return GroupRows(self.channels, self.spatial, self.dtype, self.eps, *affine).refusal()

    def refusal_to_hold(self, plan: HeldBackwardPlan | None) -> str | None:
        """Why no `plan` holds x and the gradient of such a row in registers; None where one does."""
        unserved = self.refusal()
        if unserved is None and plan is None:
            return (
                f"groups of {self.channels} channels of {self.spatial} elements; serves channels of {LEAST_VECTORS} "
                f"vectors of {vector_elements(self.spatial, self.dtype)} or more, in groups that registers hold beside "
                "their gradient"
            )
        return unserved

    def refusal_as_short(self) -> str | None:
        """Why a part of a warp does not take such a row; None where it does."""
        unserved = self.refusal()
        vector = vector_elements(self.spatial, self.dtype)
        if unserved is None and self.spatial >= LEAST_VECTORS * vector:
            return f"channels of {self.spatial} elements; serves fewer than {LEAST_VECTORS} vectors of {vector}"
        if unserved is None and short_backward_plan(self.n, self.dtype) is None:
            return f"groups of {self.n} elements; serves those that a warp holds at their alignment"
        return unserved


def build_short(facts: GroupBackward, arch: int, sm_count: int) -> Callable[..., Gradients]:
    """Compile the programs for short rows; returns what `build_held` does."""
    from tileops.kernels.compiled_program import compiled_once
    from tileops.kernels.group_norm.short_backward_program import group_norm_short_backward

    plan = short_backward_plan(facts.n, facts.dtype)
    assert plan is not None, "refusal() refuses such rows"
    dtypes = (facts.dtype, facts.weight_dtype, facts.bias_dtype)
    built: list[Any] = compiled_together(
        lambda: compiled_once(group_norm_short_backward, arch, plan, facts.channels, *dtypes, facts.need),
        lambda: build_sums(facts, arch),
    )
    launch, add_parts = built
    n, channels, of_x, eps = facts.n, facts.channels, facts.need[0], float(facts.eps)

    def run(grad: Tensor, x: Tensor, weight: Tensor | None) -> Gradients:
        samples, groups = x.shape[0], x.shape[1] // channels
        parts = parts_of_samples(plan, samples, groups, sm_count)
        grad_x = torch.empty_like(x) if of_x else None
        sums, partials = empty_sums(facts, x), empty_added(facts, x, parts)
        flat = None if grad_x is None else grad_x.view(-1, n)
        launch(grad.view(-1, n), x.view(-1, n), weight, flat, *sums, partials, groups, parts, eps)
        if parts > 1:
            add_parts(partials, *sums)
        return (grad_x, *sums)

    return run


def build_held(facts: GroupBackward, plan: HeldBackwardPlan, arch: int) -> Callable[..., Gradients]:
    """Compile the programs for rows that a block holds.

    Returns:
        A function of the gradient, x and weight (or None), as the interface has them.
    """
    # Imported here: importing tilelang takes seconds, and only a kernel that is built needs it.
    from tileops.kernels.group_norm.held_backward_program import group_norm_held_backward

    built: list[Any] = compiled_together(
        lambda: group_norm_held_backward(plan, facts.dtype, facts.weight_dtype, facts.need, arch),
        lambda: build_sums(facts, arch),
    )
    launch, add_samples = built
    n, channels, of_x, eps = facts.n, facts.channels, facts.need[0], float(facts.eps)

    def run(grad: Tensor, x: Tensor, weight: Tensor | None) -> Gradients:
        rows = x.view(-1, n)
        grad_x = torch.empty_like(x) if of_x else None
        sums, added = empty_sums(facts, x), empty_added(facts, x, x.shape[0])
        launch(
            grad.view(-1, n),
            rows,
            weight if of_x else None,
            None if grad_x is None else grad_x.view(-1, n),
            None if added is None else added.view(-1, rows.shape[0], channels),
            eps,
        )
        add_samples(added, *sums)
        return (grad_x, *sums)

    return run


def build_split(facts: GroupBackward, arch: int, sm_count: int) -> Callable[..., Gradients]:
    """Compile the programs for rows of any length; returns what `build_held` does."""
    from tileops.kernels.compiled_program import compiled_once
    from tileops.kernels.group_norm.split_backward_program import (
        SUMS,
        group_norm_piece_sums,
        group_norm_split_gradients,
    )

    n, channels, spatial, of_x = facts.n, facts.channels, facts.spatial, facts.need[0]
    pieces, rows_plan = piece_plan(spatial, facts.dtype), split_plan(n, facts.dtype, IN_FLIGHT // 2)
    built: list[Any] = compiled_together(
        lambda: compiled_once(group_norm_piece_sums, arch, pieces, channels, facts.dtype),
        lambda: compiled_once(
            group_norm_split_gradients, arch, rows_plan, pieces, facts.dtype, facts.weight_dtype, facts.need
        ),
        lambda: build_sums(facts, arch),
    )
    measure, apply, add_samples = built
    eps = float(facts.eps)

    def run(grad: Tensor, x: Tensor, weight: Tensor | None) -> Gradients:
        rows = x.numel() // n
        of_pieces = x.new_empty((SUMS, rows * channels, pieces.pieces), dtype=torch.float32)
        measure(grad.view(-1, spatial), x.view(-1, spatial), of_pieces)
        part_vectors, parts = rows_plan.cut(rows, sm_count) if of_x else (0, 1)
        grad_x = torch.empty_like(x) if of_x else None
        sums, added = empty_sums(facts, x), empty_added(facts, x, x.shape[0])
        apply(
            grad.view(-1, n),
            x.view(-1, n),
            weight if of_x else None,
            of_pieces.view(SUMS, rows, -1),
            None if grad_x is None else grad_x.view(-1, n),
            None if added is None else added.view(-1, rows, channels),
            parts,
            part_vectors,
            eps,
        )
        add_samples(added, *sums)
        return (grad_x, *sums)

    return run


def build_sums(facts: GroupBackward, arch: int) -> Launch:
    """The program that adds up `(sums wanted, samples, channels)` over the samples, into what `empty_sums` gives."""
    from tileops.kernels.compiled_program import compiled_once
    from tileops.kernels.group_norm.split_backward_program import sums_over_batch

    if not any(facts.need[1:]):
        return _nothing
    return compiled_once(sums_over_batch, arch, *facts.dtypes_of_sums, launched_early=arch >= EARLY_LAUNCH_ARCH)


def _nothing(*_: object) -> None:
    """No sums are wanted."""


def empty_sums(facts: GroupBackward, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias, as far as wanted, to be filled."""
    weight_dtype, bias_dtype = facts.dtypes_of_sums
    return (
        None if weight_dtype is None else x.new_empty(x.shape[1], dtype=weight_dtype),
        None if bias_dtype is None else x.new_empty(x.shape[1], dtype=bias_dtype),
    )


def empty_added(facts: GroupBackward, x: Tensor, parts: int) -> Tensor | None:
    """For what `parts` of the batch add to the gradients of weight and bias; None where neither is wanted."""
    count = sum(facts.need[1:])
    return x.new_empty((count, parts, x.shape[1]), dtype=torch.float32) if count else None
