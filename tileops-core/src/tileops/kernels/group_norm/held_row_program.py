# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""Group norm of rows that fit in the registers of one block: one read, one reduction, one write."""

from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.compiled_program import traced
from tileops.kernels.group_norm.group_row_program import (
    affine_shape,
    affine_type,
    affine_width,
    groups_of,
    load_affine,
    write_normalised,
)
from tileops.kernels.row_plan import RowPlan
from tileops.kernels.shared_program import (
    WARP,
    elements_of_group,
    elements_of_thread,
    from_origin,
    group_merge_samples,
    keep_packed,
    load_row,
    merge_samples_of_warps,
    take_origin,
    tilelang_dtype,
)

__all__ = ["group_norm_held_row"]


def group_norm_held_row(
    plan: RowPlan,
    channels: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    *,
    keeps_statistics: bool,
) -> Any:
    """y[r, i] = (x[r, i] - mean) / sqrt(variance + eps) * weight[c] + bias[c], in float32, rounded once.

    c is the channel of element i of row r. The program takes x (rows, n), weight (all channels) or None, bias
    likewise, y (rows, n), statistics and eps; one build serves every batch size and number of groups. Where it
    `keeps_statistics`, they are (2, rows) in float32 and become the mean and the unbiased variance of each row;
    else None.

    The variance is centred exactly: each thread sums its elements, then their squared deviations from its own mean,
    both from registers; the threads of a warp merge theirs, and the warps of a block behind a single barrier.
    """
    n, vector, spatial = plan.n, plan.vector, plan.n // channels
    width = affine_width(vector, spatial)
    element = tilelang_dtype(dtype)
    has_weight, has_bias = weight_dtype is not None, bias_dtype is not None
    # One value for the row of one channel; else `width` for each vector.
    affine_values = 1 if channels == 1 else len(plan.steps) * width
    affine_early = plan.loads_early(affine_values * (has_weight + has_bias))
    blocks_per_sm = plan.blocks_per_sm(affine_values * (has_weight + has_bias) if affine_early else 0)
    group_lanes = min(plan.lanes, WARP)
    rows = T.dynamic("rows")
    all_channels = T.dynamic("all_channels") if has_weight or has_bias else channels

    def affine_at(step):
        return 0 if channels == 1 else step * width

    @traced(T.macro)
    def load_affine_steps(held, weight, group, lane):
        if channels == 1:
            load_affine(held, 0, weight, group, 0, 1, 1, 1)
        else:
            for step in plan.steps:
                if plan.holds(step, lane):
                    column = plan.column(step, lane)
                    load_affine(held, step * width, weight, group, column, vector, channels, spatial)

    @traced(T.macro)
    def take_moments(total, squares, held, origin, slots, lane):
        """`total` and `squares` (float32, local, 1) become those of the row, about its mean; see `from_origin`."""
        partial = T.alloc_local((vector,), "float32")
        # The mean of the thread's elements. One partial sum for each element of a vector keeps the chains short.
        for j in T.unroll(vector):
            partial[j] = 0.0
        for step in plan.steps:
            if plan.holds(step, lane):
                for j in T.unroll(vector):
                    partial[j] = partial[j] + from_origin(held[step * vector + j], origin[0], dtype)
        total[0] = 0.0
        for j in T.unroll(vector):
            total[0] = total[0] + partial[j]
        keep_packed(held, plan)
        count = elements_of_thread(plan, lane)
        mean_of_thread = total[0] / T.max(count, 1.0)
        # Squared deviations from that mean.
        for j in T.unroll(vector):
            partial[j] = 0.0
        for step in plan.steps:
            if plan.holds(step, lane):
                for j in T.unroll(vector):
                    deviation = from_origin(held[step * vector + j], origin[0], dtype) - mean_of_thread
                    partial[j] = partial[j] + deviation * deviation
        squares[0] = 0.0
        for j in T.unroll(vector):
            squares[0] = squares[0] + partial[j]
        keep_packed(held, plan)
        group_merge_samples(total, squares, mean_of_thread, count, elements_of_group(plan, lane), group_lanes)
        if plan.lanes > WARP:
            merge_samples_of_warps(total, squares, slots, plan)

    @traced(T.prim_func)
    def group_norm_held_row(
        x: T.Tensor((rows, n), element),
        weight: T.Tensor(affine_shape(weight_dtype, all_channels), affine_type(weight_dtype)),
        bias: T.Tensor(affine_shape(bias_dtype, all_channels), affine_type(bias_dtype)),
        y: T.Tensor((rows, n), element),
        statistics: T.Tensor((2, rows), "float32"),
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(rows, plan.rows_per_block), threads=plan.threads) as block:
            T.annotate_min_blocks_per_sm(blocks_per_sm)
            held = T.alloc_local((plan.elements,), element)
            scale = T.alloc_local((affine_values,), affine_type(weight_dtype))
            shift = T.alloc_local((affine_values,), affine_type(bias_dtype))
            total = T.alloc_local((1,), "float32")
            squares = T.alloc_local((1,), "float32")
            origin = T.alloc_local((1,), "float32")
            slots = T.alloc_shared((max(plan.lanes // WARP, 1), 2), "float32")
            group = T.alloc_var("int32")
            thread = T.get_thread_binding()
            lane = thread % plan.lanes
            row = block * plan.rows_per_block + thread // plan.lanes

            # Lanes past the last row read the last row again: the exchanges need every lane.
            load_row(held, x, None, T.min(row, rows - 1), plan, lane)
            take_origin(origin, x, None, T.min(row, rows - 1), vector, dtype)
            # Weight and bias arrive while the row is summed, where registers allow.
            if has_weight or has_bias:
                group = T.truncmod(row, groups_of(all_channels, channels))
            if affine_early and has_weight:
                load_affine_steps(scale, weight, group, lane)
            if affine_early and has_bias:
                load_affine_steps(shift, bias, group, lane)

            take_moments(total, squares, held, origin, slots, lane)
            mean = total[0] * (1.0 / n)
            inverse_deviation = T.rsqrt(squares[0] * (1.0 / n) + eps)

            if row < rows:
                for step in plan.steps:
                    if plan.holds(step, lane):
                        column = plan.column(step, lane)
                        if has_weight and not affine_early:
                            load_affine(scale, affine_at(step), weight, group, column, vector, channels, spatial)
                        if has_bias and not affine_early:
                            load_affine(shift, affine_at(step), bias, group, column, vector, channels, spatial)
                        write_normalised(
                            y, row, column, held, step * vector, origin, mean, inverse_deviation, scale, shift,
                            affine_at(step), vector, spatial, dtype, has_weight, has_bias,
                        )  # fmt: skip
                if keeps_statistics and lane == 0:
                    statistics[0, row] = origin[0] + mean
                    statistics[1, row] = squares[0] * (1.0 / max(n - 1, 1))

    return group_norm_held_row
