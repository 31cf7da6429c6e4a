# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""Layer norm of rows of any length, or of their sums: one block passes twice over its row, which stays in cache."""

from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.compiled_program import traced
from tileops.kernels.row_plan import RowPlan
from tileops.kernels.shared_program import (
    WARP,
    block_merge_moments,
    from_origin,
    load_columns_at,
    load_row_at,
    merge_moments,
    store_row_at,
    take_origin,
    tilelang_dtype,
)


def layer_norm_streamed_row(
    plan: RowPlan,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    adds_residual: bool = False,
) -> Any:
    """y[r, i] = (x[r, i] - mean) / sqrt(variance + eps) * weight[i] + bias[i], in float32, rounded once.

    The program takes x (rows, n), weight (n) or None, bias (n) or None, y (rows, n), eps; one build serves every
    row count. One that adds a residual takes x, residual, weight, bias, y, summed, eps: x + residual, rounded, goes to
    `summed` (rows, n), and stands in the place of x from then on.

    Each thread merges the exact moments of what it loads at a time (Chan et al.), so that no large
    mean cancels in the variance. The second pass goes backwards: it meets what was read last, which the L2
    cache still holds however long the row is.
    """
    n, vector, tile_steps = plan.n, plan.vector, plan.steps_in_flight
    tiles, steps_beyond = plan.tiles, plan.steps_beyond_tiles
    held_type = tilelang_dtype(dtype)
    weight_type = tilelang_dtype(weight_dtype or torch.float32)
    bias_type = tilelang_dtype(bias_dtype or torch.float32)
    has_weight, has_bias = weight_dtype is not None, bias_dtype is not None
    blocks_per_sm = plan.streaming_blocks_per_sm
    rows = T.dynamic("rows")

    @traced(T.macro)
    def accumulate(moments, held, count, origin):
        """Merge the moments of `held[:count]`."""
        total = T.alloc_local((2,), "float32")
        total[0] = 0.0
        for i in T.unroll(count):
            total[0] = total[0] + from_origin(held[i], origin[0], dtype)
        mean = total[0] * (1.0 / count)
        total[1] = 0.0
        for i in T.unroll(count):
            deviation = from_origin(held[i], origin[0], dtype) - mean
            total[1] = total[1] + deviation * deviation
        merge_moments(moments, T.float32(count), mean, total[1])

    @traced(T.macro)
    def write(y, row, column, held, first, origin, mean, inverse_deviation, weight, bias):
        """Write the vector of row `row` at `column`, held from `held[first]` on."""
        scale = T.alloc_local((vector,), weight_type)
        shift = T.alloc_local((vector,), bias_type)
        result = T.alloc_local((vector,), held_type)
        if has_weight:
            load_columns_at(scale, 0, weight, column, vector)
        if has_bias:
            load_columns_at(shift, 0, bias, column, vector)
        for j in T.unroll(vector):
            value = (from_origin(held[first + j], origin[0], dtype) - mean) * inverse_deviation
            if has_weight:
                value = value * T.cast(scale[j], "float32")
            if has_bias:
                value = value + T.cast(shift[j], "float32")
            result[j] = T.cast(value, held_type)
        store_row_at(y, row, column, result, 0, vector)

    @traced(T.macro)
    def normalise_rows(x, residual, weight, bias, y, summed, eps):
        """`summed` is x itself where the residual is None."""
        with T.Kernel(rows, threads=plan.threads) as row:
            T.annotate_min_blocks_per_sm(blocks_per_sm)
            held = T.alloc_local((tile_steps * vector,), held_type)
            moments = T.alloc_local((3,), "float32")
            origin = T.alloc_local((1,), "float32")
            slots = T.alloc_shared((plan.threads // WARP, 3), "float32")
            lane = T.get_thread_binding()

            take_origin(origin, x, residual, row, vector, dtype)
            for i in T.unroll(3):
                moments[i] = 0.0
            for tile in T.serial(tiles):
                for step in T.unroll(tile_steps):
                    column = plan.column(tile * tile_steps + step, lane)
                    load_row_at(held, step * vector, x, residual, row, column, vector)
                    if residual is not None:
                        store_row_at(summed, row, column, held, step * vector, vector)
                accumulate(moments, held, tile_steps * vector, origin)
            for step in steps_beyond:
                if plan.holds(step, lane):
                    load_row_at(held, 0, x, residual, row, plan.column(step, lane), vector)
                    if residual is not None:
                        store_row_at(summed, row, plan.column(step, lane), held, 0, vector)
                    accumulate(moments, held, vector, origin)
            block_merge_moments(moments, slots, plan.threads)
            mean = moments[1]
            inverse_deviation = T.rsqrt(moments[2] * (1.0 / n) + eps)

            for step in steps_beyond[::-1]:
                if plan.holds(step, lane):
                    load_row_at(held, 0, summed, None, row, plan.column(step, lane), vector)
                    write(y, row, plan.column(step, lane), held, 0, origin, mean, inverse_deviation, weight, bias)
            for tile in T.serial(tiles):
                first_step = (tiles - 1 - tile) * tile_steps
                for step in T.unroll(tile_steps):
                    column = plan.column(first_step + step, lane)
                    load_row_at(held, step * vector, summed, None, row, column, vector)
                for step in T.unroll(tile_steps):
                    column = plan.column(first_step + step, lane)
                    write(y, row, column, held, step * vector, origin, mean, inverse_deviation, weight, bias)

    if adds_residual:

        @traced(T.prim_func)
        def fused_add_layer_norm_streamed_row(
            x: T.Tensor((rows, n), held_type),
            residual: T.Tensor((rows, n), held_type),
            weight: T.Tensor((n,), weight_type),
            bias: T.Tensor((n,), bias_type),
            y: T.Tensor((rows, n), held_type),
            summed: T.Tensor((rows, n), held_type),
            eps: T.float32,
        ):
            normalise_rows(x, residual, weight, bias, y, summed, eps)

        return fused_add_layer_norm_streamed_row

    @traced(T.prim_func)
    def layer_norm_streamed_row(
        x: T.Tensor((rows, n), held_type),
        weight: T.Tensor((n,), weight_type),
        bias: T.Tensor((n,), bias_type),
        y: T.Tensor((rows, n), held_type),
        eps: T.float32,
    ):
        normalise_rows(x, None, weight, bias, y, x, eps)

    return layer_norm_streamed_row
