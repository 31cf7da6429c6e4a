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
from tileops.kernels.row_backward_sums_program import add_to_sum, write_sum
from tileops.kernels.row_plan import power_of_two_from
from tileops.kernels.shared_program import (
    WARP,
    elements_of_group,
    elements_of_thread,
    from_origin,
    group_merge_samples,
    group_sum,
    keep_packed,
    load_columns,
    load_columns_at,
    load_row,
    settle,
    take_origin,
    tilelang_dtype,
)


def row_backward_held(
    plan: BackwardPlan,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    need: tuple[bool, bool, bool],
    *,
    centred: bool,
) -> Any:
    """With x̂ = (x - mean) / deviation and g = grad * weight, in float32:

    grad_x = (g - mean(g) - x̂ * mean(g * x̂)) / deviation, and in partials[:, b] what the rows of block b add to the
    sum of grad * x̂ and to the sum of grad, as far as `need` wants each. Without `centred`, mean and mean(g) are 0.

    The program takes grad (rows, n), x (rows, n), weight (n) or None, grad_x (rows, n) or None, partials (sums,
    blocks, n) or None, grad_weight and grad_bias (n) or None, which a lone block writes instead, the number of
    blocks, and eps; one build serves every row count. Statistics are exact as in the forward: each thread centres
    squares on its own mean, and one barrier a row merges the warps.
    """
    row_plan, in_shared = plan.row, plan.sums_in_shared
    n, vector, lanes, steps = row_plan.n, row_plan.vector, row_plan.lanes, row_plan.steps
    of_x, of_weight, of_bias = need
    has_weight = weight_dtype is not None
    reads_weight = has_weight and not plan.keeps_weight
    element, weight_type = tilelang_dtype(dtype), tilelang_dtype(weight_dtype or torch.float32)
    bias_type = tilelang_dtype(bias_dtype or torch.float32)
    group, warps = min(lanes, WARP), max(lanes // WARP, 1)
    merged = power_of_two_from(warps)
    together = row_plan.rows_per_block
    kept_shape = (plan.sums, row_plan.elements // plan.quad, row_plan.threads, plan.quad) if in_shared else (1, 1, 1, 1)
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
    def sum_row(totals, sum_of_x, squares, held_x, held_grad, scale, weight, origin, lane):
        """Sum up the group's part of a row: `totals` (float32, local, 2) of g * x and g; squares; centred also x.

        Squares (float32, local, 1) are then those of deviations from the mean of the group.
        """
        totals[0] = 0.0
        totals[1] = 0.0
        sum_of_x[0] = 0.0
        squares[0] = 0.0
        for step in steps:
            if row_plan.holds(step, lane):
                if reads_weight:
                    load_columns_at(scale, step * vector, weight, row_plan.column(step, lane), vector)
                for j in T.unroll(vector):
                    i = step * vector + j
                    value = value_of(held_x[i], origin[0])
                    if centred:
                        sum_of_x[0] = sum_of_x[0] + value
                    else:
                        squares[0] = squares[0] + value * value
                    if of_x:
                        scaled = T.cast(held_grad[i], "float32")
                        if has_weight:
                            scaled = scaled * T.cast(scale[i], "float32")
                        totals[0] = totals[0] + scaled * value
                        totals[1] = totals[1] + scaled
        keep_packed(held_x, row_plan)
        keep_packed(held_grad, row_plan)
        if centred:
            count = elements_of_thread(row_plan, lane)
            mean_of_thread = sum_of_x[0] / T.max(count, 1.0)
            for step in steps:
                if row_plan.holds(step, lane):
                    for j in T.unroll(vector):
                        deviation = value_of(held_x[step * vector + j], origin[0]) - mean_of_thread
                        squares[0] = squares[0] + deviation * deviation
            keep_packed(held_x, row_plan)
            group_sum(totals, 2, group)
            group_merge_samples(sum_of_x, squares, mean_of_thread, count, elements_of_group(row_plan, lane), group)
        else:
            group_sum(totals, 1, group)
            group_sum(squares, 1, group)

    @traced(T.macro)
    def merge_warps(totals, sum_of_x, squares, slots, side, lane):
        """Merge a row's sums over its warps. `slots` has two sides, for a row and the next: one barrier each."""
        count = T.alloc_var("float32")
        if lane % WARP == 0:
            slots[side, lane // WARP, 0] = totals[0]
            slots[side, lane // WARP, 1] = totals[1]
            slots[side, lane // WARP, 2] = sum_of_x[0]
            slots[side, lane // WARP, 3] = squares[0]
            slots[side, lane // WARP, 4] = elements_of_group(row_plan, lane)
        T.sync_threads()
        totals[0] = 0.0
        totals[1] = 0.0
        sum_of_x[0] = 0.0
        squares[0] = 0.0
        count = 0.0
        if lane % merged < warps:
            totals[0] = slots[side, lane % merged, 0]
            totals[1] = slots[side, lane % merged, 1]
            sum_of_x[0] = slots[side, lane % merged, 2]
            squares[0] = slots[side, lane % merged, 3]
            count = slots[side, lane % merged, 4]
        if centred:
            mean_of_warp = sum_of_x[0] / T.max(count, 1.0)
            group_sum(totals, 2, merged)
            group_merge_samples(sum_of_x, squares, mean_of_warp, count, T.float32(n), merged)
        else:
            group_sum(totals, 1, merged)
            group_sum(squares, 1, merged)

    @traced(T.macro)
    def finish_row(
        grad_x, row, held_x, held_grad, scale, weight, origin, totals, sum_of_x, squares, sums, kept, eps, lane
    ):
        """Write the row's grad_x, and add what it gives to the sums."""
        result = T.alloc_local((vector,), element)
        to_weight = T.alloc_local((vector,), "float32")
        to_bias = T.alloc_local((vector,), "float32")
        mean = T.alloc_var("float32")
        mean = sum_of_x[0] * (1.0 / n) if centred else 0.0
        invstd = T.alloc_var("float32")
        invstd = T.rsqrt(squares[0] * (1.0 / n) + eps)
        mean_of_g = T.alloc_var("float32")
        mean_of_g = totals[1] * (1.0 / n) if centred else 0.0
        along = T.alloc_var("float32")
        along = (totals[0] - mean * totals[1]) * invstd * (1.0 / n)
        for step in steps:
            if row_plan.holds(step, lane):
                if reads_weight and of_x:
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
                    add_to_sum(sums, kept, plan, 0, step, to_weight)
                if of_bias:
                    add_to_sum(sums, kept, plan, plan.sums - 1, step, to_bias)

    @traced(T.prim_func)
    def row_backward_held(
        grad: T.Tensor((rows, n), element),
        x: T.Tensor((rows, n), element),
        weight: T.Tensor((n,), weight_type),
        grad_x: T.Tensor((rows, n), element),
        partials: T.Tensor((max(plan.sums, 1), parts, n), "float32"),
        grad_weight: T.Tensor((n,), weight_type),
        grad_bias: T.Tensor((n,), bias_type),
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
            totals = T.alloc_local((2,), "float32")
            sum_of_x = T.alloc_local((1,), "float32")
            squares = T.alloc_local((1,), "float32")
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
            if has_weight and not reads_weight:
                load_columns(scale, weight, row_plan, lane)
                settle(scale, row_plan.elements, rows)
            for which in T.unroll(plan.sums):
                for i in T.unroll(row_plan.elements):
                    if in_shared:
                        kept[which, i // plan.quad, thread, i % plan.quad] = 0.0
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
                    sum_row(totals, sum_of_x, squares, held_x, held_grad, scale, weight, origin, lane)
                    if lanes > WARP:
                        merge_warps(totals, sum_of_x, squares, slots, turn % 2, lane)
                if row < rows:
                    finish_row(
                        grad_x, row, held_x, held_grad, scale, weight, origin, totals, sum_of_x, squares, sums, kept,
                        eps, lane,
                    )  # fmt: skip
            if of_weight:
                write_sum(grad_weight, partials, plan, 0, blocks, block, sums, kept, groups)
            if of_bias:
                write_sum(grad_bias, partials, plan, plan.sums - 1, blocks, block, sums, kept, groups)

    return row_backward_held
