# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""The backward of layer norm and RMS norm, for rows of any length: x and the gradient are read twice.

The first program leaves the statistics of each row. The second takes stripes of columns down the rows, where it
writes the gradient of x and keeps the sums over rows in registers. It walks backwards: what was read last, the L2
cache still holds.
"""

from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.compiled_program import traced
from tileops.kernels.row_plan import RowPlan
from tileops.kernels.shared_program import (
    WARP,
    block_merge_moments,
    block_sum,
    from_origin,
    load_columns_at,
    load_row_at,
    merge_moments,
    take_origin,
    tilelang_dtype,
)

__all__ = ["BLOCKS_PER_SM", "ROWS_IN_FLIGHT", "STATISTICS", "row_backward_statistics", "row_backward_streamed"]

STATISTICS = 5
"""What the first program leaves of a row: origin, mean from there, 1 / deviation, mean(g), mean(g * x̂)."""

ROWS_IN_FLIGHT = 4
"""Rows of which a thread loads its vectors together, where it walks down a stripe."""

BLOCKS_PER_SM = 2
"""Blocks of 256 threads on a stripe that share an SM: 128 registers hold rows in flight, their statistics and sums."""


def row_backward_statistics(
    plan: RowPlan, dtype: torch.dtype, weight_dtype: torch.dtype | None, *, centred: bool
) -> Any:
    """The statistics of x and of g = grad * weight, row by row, one block each.

    The program takes grad (rows, n), x (rows, n), weight (n) or None, statistics (rows, STATISTICS) float32, and eps.
    Each thread merges the exact moments of what it loads at a time (Chan et al.), as the forward does. Without
    `centred`, the mean and mean(g) are 0.
    """
    n, vector, tile_steps = plan.n, plan.vector, max(1, plan.steps_in_flight // 2)
    tiles = plan.vectors // plan.lanes // tile_steps
    steps_beyond = plan.steps[tiles * tile_steps :]
    has_weight = weight_dtype is not None
    element, weight_type = tilelang_dtype(dtype), tilelang_dtype(weight_dtype or torch.float32)
    warps = plan.threads // WARP
    rows = T.dynamic("rows")

    def value_of(element, origin):
        return from_origin(element, origin, dtype) if centred else T.cast(element, "float32")

    @traced(T.macro)
    def accumulate(moments, totals, held_x, held_grad, scale, origin, count):
        """Add `held[:count]`: to the moments of x, or its squares, and to the sums of g and g * x."""
        total = T.alloc_local((2,), "float32")
        total[0] = 0.0
        total[1] = 0.0
        for i in T.unroll(count):
            value = value_of(held_x[i], origin[0])
            scaled = T.cast(held_grad[i], "float32")
            if has_weight:
                scaled = scaled * T.cast(scale[i], "float32")
            totals[0] = totals[0] + scaled
            totals[1] = totals[1] + scaled * value
            total[0] = total[0] + value
            if not centred:
                total[1] = total[1] + value * value
        if centred:
            mean = total[0] * (1.0 / count)
            for i in T.unroll(count):
                deviation = value_of(held_x[i], origin[0]) - mean
                total[1] = total[1] + deviation * deviation
            merge_moments(moments, T.float32(count), mean, total[1])
        else:
            totals[2] = totals[2] + total[1]

    @traced(T.macro)
    def load(held_x, held_grad, scale, at, x, grad, weight, row, column):
        load_row_at(held_x, at, x, None, row, column, vector)
        load_row_at(held_grad, at, grad, None, row, column, vector)
        if has_weight:
            load_columns_at(scale, at, weight, column, vector)

    @traced(T.prim_func)
    def row_backward_statistics(
        grad: T.Tensor((rows, n), element),
        x: T.Tensor((rows, n), element),
        weight: T.Tensor((n,), weight_type),
        statistics: T.Tensor((rows, STATISTICS), "float32"),
        eps: T.float32,
    ):
        with T.Kernel(rows, threads=plan.threads) as row:
            T.annotate_min_blocks_per_sm(plan.streaming_blocks_per_sm)
            held_x = T.alloc_local((tile_steps * vector,), element)
            held_grad = T.alloc_local((tile_steps * vector,), element)
            scale = T.alloc_local((tile_steps * vector,), weight_type)
            moments = T.alloc_local((3,), "float32")
            totals = T.alloc_local((3,), "float32")
            origin = T.alloc_local((1,), "float32")
            slots = T.alloc_shared((warps, 3), "float32")
            slots_of_totals = T.alloc_shared((warps, 3), "float32")
            lane = T.get_thread_binding()

            origin[0] = 0.0
            if centred:
                take_origin(origin, x, None, row, vector, dtype)
            for i in T.unroll(3):
                moments[i] = 0.0
                totals[i] = 0.0
            for tile in T.serial(tiles):
                for step in T.unroll(tile_steps):
                    column = plan.column(tile * tile_steps + step, lane)
                    load(held_x, held_grad, scale, step * vector, x, grad, weight, row, column)
                accumulate(moments, totals, held_x, held_grad, scale, origin, tile_steps * vector)
            for step in steps_beyond:
                if plan.holds(step, lane):
                    load(held_x, held_grad, scale, 0, x, grad, weight, row, plan.column(step, lane))
                    accumulate(moments, totals, held_x, held_grad, scale, origin, vector)
            block_sum(totals, slots_of_totals, 3, plan.threads)
            if centred:
                block_merge_moments(moments, slots, plan.threads)
            else:
                moments[2] = totals[2]
                totals[0] = 0.0
            if lane == 0:
                invstd = T.rsqrt(moments[2] * (1.0 / n) + eps)
                statistics[row, 0] = origin[0]
                statistics[row, 1] = moments[1]
                statistics[row, 2] = invstd
                statistics[row, 3] = totals[0] * (1.0 / n)
                statistics[row, 4] = (totals[1] - moments[1] * totals[0]) * invstd * (1.0 / n)

    return row_backward_statistics


def row_backward_streamed(
    plan: RowPlan,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    need: tuple[bool, bool, bool],
) -> Any:
    """What `row_backward_held` computes, from the statistics of the rows.

    The program takes grad (rows, n), x (rows, n), weight (n) or None, statistics (rows, STATISTICS), grad_x (rows,
    n) or None, partials (sums, parts, n) or None, and the number of parts into which the rows are cut; one build
    serves every row count. A block takes the columns of one stripe down the rows of one part.
    """
    n, vector = plan.n, plan.vector
    stripes = len(plan.steps)
    of_x, of_weight, of_bias = need
    sums_kept = of_weight + of_bias
    has_weight = weight_dtype is not None
    element, weight_type = tilelang_dtype(dtype), tilelang_dtype(weight_dtype or torch.float32)
    rows, parts_kept = T.dynamic("rows"), T.dynamic("parts_kept") if sums_kept else 1

    @traced(T.prim_func)
    def row_backward_streamed(
        grad: T.Tensor((rows, n), element),
        x: T.Tensor((rows, n), element),
        weight: T.Tensor((n,), weight_type),
        statistics: T.Tensor((rows, STATISTICS), "float32"),
        grad_x: T.Tensor((rows, n), element),
        partials: T.Tensor((max(sums_kept, 1), parts_kept, n), "float32"),
        parts: T.int32,
    ):
        with T.Kernel(parts * stripes, threads=plan.threads) as block:
            T.annotate_min_blocks_per_sm(BLOCKS_PER_SM)
            held_x = T.alloc_local((ROWS_IN_FLIGHT, vector), element)
            held_grad = T.alloc_local((ROWS_IN_FLIGHT, vector), element)
            held_statistics = T.alloc_local((ROWS_IN_FLIGHT, STATISTICS), "float32")
            scale = T.alloc_local((vector,), weight_type)
            result = T.alloc_local((vector,), element)
            sums = T.alloc_local((2, vector), "float32")
            # Stripes first: blocks that run together read whole rows.
            vector_of_row = block % stripes * plan.lanes + T.get_thread_binding()
            column = vector_of_row * vector
            part = parts - 1 - block // stripes
            length = T.ceildiv(rows, parts)
            first = part * length
            end = T.min(first + length, rows)

            for i in T.unroll(vector):
                sums[0, i] = 0.0
                sums[1, i] = 0.0
            if vector_of_row < plan.vectors:
                if has_weight:
                    load_columns_at(scale, 0, weight, column, vector)
                for turn in T.serial(T.ceildiv(end - first, ROWS_IN_FLIGHT)):
                    last = end - 1 - turn * ROWS_IN_FLIGHT
                    for at in T.unroll(ROWS_IN_FLIGHT):
                        if last - at >= first:
                            for j in T.vectorized(vector):
                                held_x[at, j] = x[last - at, column + j]
                            for j in T.vectorized(vector):
                                held_grad[at, j] = grad[last - at, column + j]
                            for i in T.unroll(STATISTICS):
                                held_statistics[at, i] = statistics[last - at, i]
                    for at in T.unroll(ROWS_IN_FLIGHT):
                        if last - at >= first:
                            invstd = held_statistics[at, 2]
                            for j in T.unroll(vector):
                                value = from_origin(held_x[at, j], held_statistics[at, 0], dtype)
                                unit = (value - held_statistics[at, 1]) * invstd
                                slope = T.cast(held_grad[at, j], "float32")
                                sums[0, j] = sums[0, j] + slope * unit
                                sums[1, j] = sums[1, j] + slope
                                if of_x:
                                    scaled = slope
                                    if has_weight:
                                        scaled = scaled * T.cast(scale[j], "float32")
                                    along = held_statistics[at, 3] + unit * held_statistics[at, 4]
                                    result[j] = T.cast((scaled - along) * invstd, element)
                            if of_x:
                                for j in T.vectorized(vector):
                                    grad_x[last - at, column + j] = result[j]
                for j in T.unroll(vector):
                    if of_weight:
                        partials[0, part, column + j] = sums[0, j]
                    if of_bias:
                        partials[sums_kept - 1, part, column + j] = sums[1, j]

    return row_backward_streamed
