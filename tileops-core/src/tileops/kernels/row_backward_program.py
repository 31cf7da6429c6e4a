# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""The backward of layer norm and RMS norm, for rows that fit in registers: x and the gradient are read once.

A fixed number of blocks walks over the rows. The sums over rows stay with the threads that own the columns, so a
block writes them once; a second program adds up what the blocks left, in a fixed order.
"""

from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.compiled_program import traced
from tileops.kernels.row_backward_plan import BackwardPlan
from tileops.kernels.row_plan import power_of_two_from
from tileops.kernels.shared_program import (
    WARP,
    elements_of_group,
    from_origin,
    group_sum,
    keep_packed,
    load_columns,
    load_columns_at,
    load_row,
    take_origin,
    tilelang_dtype,
)

__all__ = ["row_backward_held", "sums_of_parts"]

ACROSS = 32
"""Columns of a block of `sums_of_parts`, and threads of each."""

IN_FLIGHT = 4
"""Parts that a thread of it loads together."""


def row_backward_held(
    plan: BackwardPlan,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    need: tuple[bool, bool, bool],
    *,
    centred: bool,
) -> Any:
    """With x̂ = (x - mean) / deviation and g = grad * weight, in float32:

    grad_x = (g - mean(g) - x̂ * mean(g * x̂)) / deviation, and in partials[:, b] what the rows of block b add to the
    sum of grad * x̂ and to the sum of grad, as far as `need` wants each. Without `centred`, mean and mean(g) are 0.

    The program takes grad (rows, n), x (rows, n), weight (n) or None, grad_x (rows, n) or None, partials (sums,
    blocks, n) or None, the number of blocks, and eps; one build serves every row count. Statistics are exact as in the
    forward: each warp centres squares on its own mean, and one barrier a row merges the warps.
    """
    row_plan, in_shared = plan.row, plan.sums_in_shared
    n, vector, lanes, steps = row_plan.n, row_plan.vector, row_plan.lanes, row_plan.steps
    of_x, of_weight, of_bias = need
    has_weight = weight_dtype is not None
    element, weight_type = tilelang_dtype(dtype), tilelang_dtype(weight_dtype or torch.float32)
    group, warps = min(lanes, WARP), max(lanes // WARP, 1)
    merged = power_of_two_from(warps)
    # Places in `totals`. The first are plain sums; squares are one where nothing is centred.
    g_x, squares, x_, g = (0, 3, 1, 2) if centred else (0, 1, 2, 3)
    plain = 3 if centred else 2
    together = row_plan.rows_per_block
    # In shared memory a thread's sums lie 16 bytes side by side, and beside those of the next thread.
    quad = min(vector, 4)
    quads_of_vector = tuple(range(vector // quad))
    kept_shape = (plan.sums, row_plan.elements // quad, row_plan.threads, quad) if in_shared else (1, 1, 1, 1)
    groups_shape = (together, n) if together > 1 and plan.sums else (1, 1)
    rows, parts = T.dynamic("rows"), T.dynamic("parts") if plan.sums else 1

    def value_of(element, origin):
        return from_origin(element, origin, dtype) if centred else T.cast(element, "float32")

    @traced(T.macro)
    def load(held_x, held_grad, origin, x, grad, row, lane):
        load_row(held_x, x, None, row, row_plan, lane)
        load_row(held_grad, grad, None, row, row_plan, lane)
        if centred:
            take_origin(origin, x, None, row, vector, dtype)

    @traced(T.macro)
    def sum_row(totals, held_x, held_grad, scale, weight, origin, lane):
        """`totals` (float32, local, 4) becomes the group's sums of g * x, squares, and centred also g and x.

        Squares are then those of deviations from the group's mean.
        """
        for i in T.unroll(4):
            totals[i] = 0.0
        for step in steps:
            if row_plan.holds(step, lane):
                if in_shared and has_weight:
                    load_columns_at(scale, step * vector, weight, row_plan.column(step, lane), vector)
                for j in T.unroll(vector):
                    i = step * vector + j
                    value = value_of(held_x[i], origin[0])
                    if centred:
                        totals[x_] = totals[x_] + value
                    else:
                        totals[squares] = totals[squares] + value * value
                    if of_x:
                        scaled = T.cast(held_grad[i], "float32")
                        if has_weight:
                            scaled = scaled * T.cast(scale[i], "float32")
                        totals[g] = totals[g] + scaled
                        totals[g_x] = totals[g_x] + scaled * value
        keep_packed(held_x, row_plan)
        keep_packed(held_grad, row_plan)
        group_sum(totals, plain, group)
        if centred:
            mean = totals[x_] / elements_of_group(row_plan, lane)
            deviations = T.alloc_local((1,), "float32")
            deviations[0] = 0.0
            for step in steps:
                if row_plan.holds(step, lane):
                    for j in T.unroll(vector):
                        deviation = value_of(held_x[step * vector + j], origin[0]) - mean
                        deviations[0] = deviations[0] + deviation * deviation
            keep_packed(held_x, row_plan)
            group_sum(deviations, 1, group)
            totals[squares] = deviations[0]

    @traced(T.macro)
    def merge_warps(totals, slots, side, lane):
        """Merge `totals` over the warps of a row. `slots` has two sides, for a row and the next: one barrier each."""
        warp = T.alloc_local((5,), "float32")
        if lane % WARP == 0:
            for i in T.unroll(4):
                slots[side, lane // WARP, i] = totals[i]
            slots[side, lane // WARP, 4] = elements_of_group(row_plan, lane)
        T.sync_threads()
        for i in T.unroll(5):
            warp[i] = 0.0
        if lane % merged < warps:
            for i in T.unroll(5):
                warp[i] = slots[side, lane % merged, i]
        for i in T.unroll(4):
            totals[i] = warp[i]
        group_sum(totals, plain, merged)
        if centred:
            deviations = T.alloc_local((1,), "float32")
            # The squares of a warp are about its own mean; those of a slot that no warp fills are 0.
            deviation = warp[x_] / T.max(warp[4], 1.0) - totals[x_] * (1.0 / n)
            deviations[0] = warp[squares] + warp[4] * deviation * deviation
            group_sum(deviations, 1, merged)
            totals[squares] = deviations[0]

    @traced(T.macro)
    def add_to_sum(sums, kept, which, step, added):
        """Add `added` (float32, local, vector) to the thread's sum `which` at `step`."""
        if in_shared:
            thread = T.get_thread_binding()
            quad_sum = T.alloc_local((quad,), "float32")
            for at in quads_of_vector:
                place = step * len(quads_of_vector) + at
                for j in T.vectorized(quad):
                    quad_sum[j] = kept[which, place, thread, j]
                for j in T.unroll(quad):
                    quad_sum[j] = quad_sum[j] + added[at * quad + j]
                for j in T.vectorized(quad):
                    kept[which, place, thread, j] = quad_sum[j]
        else:
            for j in T.unroll(vector):
                sums[which, step * vector + j] = sums[which, step * vector + j] + added[j]

    @traced(T.macro)
    def finish_row(grad_x, row, held_x, held_grad, scale, weight, origin, totals, sums, kept, eps, lane):
        """Write the row's grad_x, and add what it gives to the sums."""
        result = T.alloc_local((vector,), element)
        to_weight = T.alloc_local((vector,), "float32")
        to_bias = T.alloc_local((vector,), "float32")
        mean = T.alloc_var("float32")
        mean = totals[x_] * (1.0 / n) if centred else 0.0
        invstd = T.alloc_var("float32")
        invstd = T.rsqrt(totals[squares] * (1.0 / n) + eps)
        mean_of_g = T.alloc_var("float32")
        mean_of_g = totals[g] * (1.0 / n) if centred else 0.0
        along = T.alloc_var("float32")
        along = (totals[g_x] - mean * totals[g]) * invstd * (1.0 / n)
        for step in steps:
            if row_plan.holds(step, lane):
                if in_shared and has_weight and of_x:
                    load_columns_at(scale, step * vector, weight, row_plan.column(step, lane), vector)
                for j in T.unroll(vector):
                    i = step * vector + j
                    unit = (value_of(held_x[i], origin[0]) - mean) * invstd
                    to_bias[j] = T.cast(held_grad[i], "float32")
                    to_weight[j] = to_bias[j] * unit
                    if of_x:
                        scaled = to_bias[j]
                        if has_weight:
                            scaled = scaled * T.cast(scale[i], "float32")
                        result[j] = T.cast((scaled - mean_of_g - unit * along) * invstd, element)
                if of_x:
                    for j in T.vectorized(vector):
                        grad_x[row, row_plan.column(step, lane) + j] = result[j]
                if of_weight:
                    add_to_sum(sums, kept, 0, step, to_weight)
                if of_bias:
                    add_to_sum(sums, kept, plan.sums - 1, step, to_bias)

    @traced(T.macro)
    def write_sums(partials, block, sums, kept, groups, thread, lane):
        """Write the sums of the block: of its rows side by side, in order, where it takes several."""
        quad_sum = T.alloc_local((quad,), "float32")
        for which in T.unroll(plan.sums):
            if together == 1:
                for step in steps:
                    if row_plan.holds(step, lane):
                        for at in quads_of_vector:
                            for j in T.vectorized(quad):
                                if in_shared:
                                    quad_sum[j] = kept[which, step * len(quads_of_vector) + at, thread, j]
                                else:
                                    quad_sum[j] = sums[which, step * vector + at * quad + j]
                            for j in T.vectorized(quad):
                                partials[which, block, row_plan.column(step, lane) + at * quad + j] = quad_sum[j]
            else:
                T.sync_threads()
                for step in steps:
                    if row_plan.holds(step, lane):
                        for j in T.unroll(vector):
                            groups[thread // lanes, row_plan.column(step, lane) + j] = sums[which, step * vector + j]
                T.sync_threads()
                for turn in T.serial(T.ceildiv(n, row_plan.threads)):
                    column = turn * row_plan.threads + thread
                    if column < n:
                        quad_sum[0] = 0.0
                        for other in T.serial(together):
                            quad_sum[0] = quad_sum[0] + groups[other, column]
                        partials[which, block, column] = quad_sum[0]

    @traced(T.prim_func)
    def row_backward_held(
        grad: T.Tensor((rows, n), element),
        x: T.Tensor((rows, n), element),
        weight: T.Tensor((n,), weight_type),
        grad_x: T.Tensor((rows, n), element),
        partials: T.Tensor((max(plan.sums, 1), parts, n), "float32"),
        blocks: T.int32,
        eps: T.float32,
    ):
        with T.Kernel(blocks, threads=row_plan.threads) as block:
            T.annotate_min_blocks_per_sm(plan.blocks_per_sm)
            held_x = T.alloc_local((row_plan.elements,), element)
            held_grad = T.alloc_local((row_plan.elements,), element)
            origin = T.alloc_local((1,), "float32")
            next_x = T.alloc_local((row_plan.elements,), element)
            next_grad = T.alloc_local((row_plan.elements,), element)
            next_origin = T.alloc_local((1,), "float32")
            scale = T.alloc_local((row_plan.elements,), weight_type)
            totals = T.alloc_local((4,), "float32")
            sums = T.alloc_local((max(plan.sums, 1), row_plan.elements), "float32")
            kept = T.alloc_shared(kept_shape, "float32")
            groups = T.alloc_shared(groups_shape, "float32")
            slots = T.alloc_shared((2, warps, 5), "float32")
            thread = T.get_thread_binding()
            lane = thread % lanes
            first = block * together + thread // lanes
            stride = blocks * together

            next_origin[0] = 0.0
            # A group past the last row reads the last row: the exchanges need every lane.
            load(next_x, next_grad, next_origin, x, grad, T.min(first, rows - 1), lane)
            if has_weight and not in_shared:
                load_columns(scale, weight, row_plan, lane)
            for which in T.unroll(plan.sums):
                for i in T.unroll(row_plan.elements):
                    if in_shared:
                        kept[which, i // quad, thread, i % quad] = 0.0
                    else:
                        sums[which, i] = 0.0

            for turn in T.serial(T.ceildiv(rows - block * together, stride)):
                row = first + turn * stride
                for step in steps:
                    for j in T.vectorized(vector):
                        held_x[step * vector + j] = next_x[step * vector + j]
                    for j in T.vectorized(vector):
                        held_grad[step * vector + j] = next_grad[step * vector + j]
                origin[0] = next_origin[0]
                # The next row is under way while this one is worked on.
                if row + stride < rows:
                    load(next_x, next_grad, next_origin, x, grad, row + stride, lane)
                if of_x or of_weight:
                    sum_row(totals, held_x, held_grad, scale, weight, origin, lane)
                    if lanes > WARP:
                        merge_warps(totals, slots, turn % 2, lane)
                if row < rows:
                    finish_row(grad_x, row, held_x, held_grad, scale, weight, origin, totals, sums, kept, eps, lane)
            write_sums(partials, block, sums, kept, groups, thread, lane)

    return row_backward_held


def sums_of_parts(n: int, weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None) -> Any:
    """The sum of partials (sums, parts, n) over the parts: into grad_weight (n), grad_bias (n), as far as wanted.

    The program takes partials, and the results or None. Thirty-two threads share a column, and the order in which
    they add is fixed.
    """
    has_weight, has_bias = weight_dtype is not None, bias_dtype is not None
    weight_type = tilelang_dtype(weight_dtype or torch.float32)
    bias_type = tilelang_dtype(bias_dtype or torch.float32)
    count = has_weight + has_bias
    parts = T.dynamic("parts")

    @traced(T.prim_func)
    def sums_of_parts(
        partials: T.Tensor((count, parts, n), "float32"),
        grad_weight: T.Tensor((n,), weight_type),
        grad_bias: T.Tensor((n,), bias_type),
    ):
        with T.Kernel(T.ceildiv(n, ACROSS), count, threads=ACROSS * WARP) as (tile, which):
            total = T.alloc_local((1,), "float32")
            slots = T.alloc_shared((WARP, ACROSS + 1), "float32")  # the odd length spreads a column over the banks
            thread = T.get_thread_binding()
            column = tile * ACROSS + thread % ACROSS
            total[0] = 0.0
            for turn in T.serial(T.ceildiv(parts, WARP * IN_FLIGHT)):
                for at in T.unroll(IN_FLIGHT):
                    part = (turn * IN_FLIGHT + at) * WARP + thread // ACROSS
                    if (part < parts) and (column < n):
                        total[0] = total[0] + partials[which, part, column]
            slots[thread // ACROSS, thread % ACROSS] = total[0]
            T.sync_threads()
            total[0] = slots[thread % WARP, thread // WARP]
            group_sum(total, 1, WARP)
            summed = tile * ACROSS + thread // WARP
            if (thread % WARP == 0) and (summed < n):
                if has_weight and has_bias:
                    if which == 0:
                        grad_weight[summed] = T.cast(total[0], weight_type)
                    else:
                        grad_bias[summed] = T.cast(total[0], bias_type)
                elif has_weight:
                    grad_weight[summed] = T.cast(total[0], weight_type)
                else:
                    grad_bias[summed] = T.cast(total[0], bias_type)

    return sums_of_parts
