"""How the backward kernels of group norm are built and called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tileops.kernels.group_norm.group_rows import GroupRows, Launch, compiled_together
from tileops.kernels.group_norm.held_backward_plan import LEAST_VECTORS, held_backward_plan
from tileops.kernels.group_norm.split_plan import IN_FLIGHT, piece_plan, split_plan
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

    def refusal_to_hold(self) -> str | None:
        """Why a block cannot hold x and the gradient of such a row in registers; None where it can."""
        unserved = self.refusal()
        if unserved is None and held_backward_plan(self.channels, self.spatial, self.dtype) is None:
            return (
                f"groups of {self.channels} channels of {self.spatial} elements; serves channels of {LEAST_VECTORS} "
                f"vectors of {vector_elements(self.spatial, self.dtype)} or more, in groups that the registers of a "
                "block hold beside their gradient"
            )
        return unserved


def build_held(facts: GroupBackward, arch: int) -> Callable[..., Gradients]:
    """Compile the programs for rows that a block holds.

    Returns:
        A function of the gradient, x and weight (or None), as the interface has them.
    """
    # Imported here: importing tilelang takes seconds, and only a kernel that is built needs it.
    from tileops.kernels.group_norm.held_backward_program import group_norm_held_backward

    plan = held_backward_plan(facts.channels, facts.spatial, facts.dtype)
    assert plan is not None, "refusal() refuses such rows"
    built: list[Any] = compiled_together(
        lambda: group_norm_held_backward(plan, facts.dtype, facts.weight_dtype, facts.need, arch),
        lambda: build_sums(facts, arch),
    )
    launch, add_samples = built
    n, channels, of_x, eps = facts.n, facts.channels, facts.need[0], float(facts.eps)

    def run(grad: Tensor, x: Tensor, weight: Tensor | None) -> Gradients:
        rows = x.view(-1, n)
        grad_x = torch.empty_like(x) if of_x else None
        added = empty_added(facts, x)
        launch(
            grad.view(-1, n),
            rows,
            weight if of_x else None,
            None if grad_x is None else grad_x.view(-1, n),
            None if added is None else added.view(-1, rows.shape[0], channels),
            eps,
        )
        return (grad_x, *add_samples(added))

    return run


def build_split(facts: GroupBackward, arch: int, sm_count: int) -> Callable[..., Gradients]:
    """Compile the programs for rows of any length; returns what `build_held` does."""
    from tileops.kernels.compiled_program import compile_program
    from tileops.kernels.group_norm.split_backward_program import (
        SUMS,
        group_norm_piece_sums,
        group_norm_split_gradients,
    )

    n, channels, spatial, of_x = facts.n, facts.channels, facts.spatial, facts.need[0]
    pieces, rows_plan = piece_plan(spatial, facts.dtype), split_plan(n, facts.dtype, IN_FLIGHT // 2)
    gradients = group_norm_split_gradients(rows_plan, pieces, facts.dtype, facts.weight_dtype, facts.need)
    built: list[Any] = compiled_together(
        lambda: compile_program(group_norm_piece_sums(pieces, channels, facts.dtype), arch),
        lambda: compile_program(gradients, arch),
        lambda: build_sums(facts, arch),
    )
    measure, apply, add_samples = built
    eps = float(facts.eps)

    def run(grad: Tensor, x: Tensor, weight: Tensor | None) -> Gradients:
        rows = x.numel() // n
        sums = x.new_empty((SUMS, rows * channels, pieces.pieces), dtype=torch.float32)
        measure(grad.view(-1, spatial), x.view(-1, spatial), sums)
        part_vectors, parts = rows_plan.cut(rows, sm_count) if of_x else (0, 1)
        grad_x = torch.empty_like(x) if of_x else None
        added = empty_added(facts, x)
        apply(
            grad.view(-1, n),
            x.view(-1, n),
            weight if of_x else None,
            sums.view(SUMS, rows, -1),
            None if grad_x is None else grad_x.view(-1, n),
            None if added is None else added.view(-1, rows, channels),
            parts,
            part_vectors,
            eps,
        )
        return (grad_x, *add_samples(added))

    return run


def build_sums(facts: GroupBackward, arch: int) -> Callable[[Tensor | None], tuple[Tensor | None, Tensor | None]]:
    """A function of what `empty_added` gave, filled, that returns the gradients of weight and bias, as far as wanted."""
    if not any(facts.need[1:]):
        return lambda _: (None, None)
    from tileops.kernels.compiled_program import compile_program
    from tileops.kernels.group_norm.split_backward_program import sums_over_batch

    dtypes = facts.dtypes_of_sums
    launch: Launch = compile_program(sums_over_batch(*dtypes), arch)

    def add(added: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        assert added is not None
        grad_weight, grad_bias = (
            None if dtype is None else added.new_empty(added.shape[2], dtype=dtype) for dtype in dtypes
        )
        launch(added, grad_weight, grad_bias)
        return grad_weight, grad_bias

    return add


def empty_added(facts: GroupBackward, x: Tensor) -> Tensor | None:
    """For what each channel of each sample adds to the gradients of weight and bias; None where neither is wanted."""
    count = sum(facts.need[1:])
    return x.new_empty((count, *x.shape[:2]), dtype=torch.float32) if count else None
