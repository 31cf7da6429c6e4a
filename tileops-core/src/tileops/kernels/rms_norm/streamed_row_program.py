# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""RMS norm of rows of any length, or of their sums: one block passes twice over its row, which stays in cache."""

from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.compiled_program import traced
from tileops.kernels.row_plan import RowPlan
from tileops.kernels.shared_program import (
    WARP,
    block_sum,
    load_columns_at,
    load_row_at,
    store_row_at,
    tilelang_dtype,
)


def rms_norm_streamed_row(
    plan: RowPlan, dtype: torch.dtype, weight_dtype: torch.dtype | None, adds_residual: bool = False
) -> Any:
    """y[r, i] = x[r, i] / sqrt(mean(x[r, :] ** 2) + eps) * weight[i], in float32, rounded once.

    The program takes x (rows, n), weight (n) or None, y (rows, n), eps; one build serves every row count. One
    that adds a residual takes x, residual, weight, y, summed, eps: x + residual, rounded, goes to `summed` (rows, n),
    and stands in the place of x from then on.

    The second pass goes backwards: it meets what was read last, which the L2 cache still holds however long the
    row is.
    """
    n, vector, tile_steps = plan.n, plan.vector, plan.steps_in_flight
    tiles, steps_beyond = plan.tiles, plan.steps_beyond_tiles
    held_type = tilelang_dtype(dtype)
    weight_type = tilelang_dtype(weight_dtype or torch.float32)
    has_weight = weight_dtype is not None
    blocks_per_sm = plan.streaming_blocks_per_sm
    rows = T.dynamic("rows")

    @traced(T.macro)
    def accumulate(partial, held, count):
        """Add the squares of `held[:count]`: one partial sum for each element of a vector."""
        for i in T.unroll(count):
            value = T.cast(held[i], "float32")
            partial[i % vector] = partial[i % vector] + value * value

    @traced(T.macro)
    def write(y, row, column, held, first, scale_of_row, weight):
        """Write the vector of row `row` at `column`, held from `held[first]` on."""
        scale = T.alloc_local((vector,), weight_type)
        result = T.alloc_local((vector,), held_type)
        if has_weight:
            load_columns_at(scale, 0, weight, column, vector)
        for j in T.unroll(vector):
            value = T.cast(held[first + j], "float32") * scale_of_row
            if has_weight:
                value = value * T.cast(scale[j], "float32")
            result[j] = T.cast(value, held_type)
        store_row_at(y, row, column, result, 0, vector)

    @traced(T.macro)
    def normalise_rows(x, residual, weight, y, summed, eps):
        """`summed` is x itself where the residual is None."""
        with T.Kernel(rows, threads=plan.threads) as row:
            T.annotate_min_blocks_per_sm(blocks_per_sm)
            held = T.alloc_local((tile_steps * vector,), held_type)
            partial = T.alloc_local((vector,), "float32")
            total = T.alloc_local((1,), "float32")
            slots = T.alloc_shared((plan.threads // WARP, 1), "float32")
            lane = T.get_thread_binding()

            for j in T.unroll(vector):
                partial[j] = 0.0
            for tile in T.serial(tiles):
                for step in T.unroll(tile_steps):
                    column = plan.column(tile * tile_steps + step, lane)
                    load_row_at(held, step * vector, x, residual, row, column, vector)
                    if residual is not None:
                        store_row_at(summed, row, column, held, step * vector, vector)
                accumulate(partial, held, tile_steps * vector)
            for step in steps_beyond:
                if plan.holds(step, lane):
                    load_row_at(held, 0, x, residual, row, plan.column(step, lane), vector)
                    if residual is not None:
                        store_row_at(summed, row, plan.column(step, lane), held, 0, vector)
                    accumulate(partial, held, vector)
            total[0] = 0.0
            for j in T.unroll(vector):
                total[0] = total[0] + partial[j]
            block_sum(total, slots, 1, plan.threads)
            scale_of_row = T.rsqrt(total[0] * (1.0 / n) + eps)

            for step in steps_beyond[::-1]:
                if plan.holds(step, lane):
                    load_row_at(held, 0, summed, None, row, plan.column(step, lane), vector)
                    write(y, row, plan.column(step, lane), held, 0, scale_of_row, weight)
            for tile in T.serial(tiles):
                first_step = (tiles - 1 - tile) * tile_steps
                for step in T.unroll(tile_steps):
                    column = plan.column(first_step + step, lane)
                    load_row_at(held, step * vector, summed, None, row, column, vector)
                for step in T.unroll(tile_steps):
                    column = plan.column(first_step + step, lane)
                    write(y, row, column, held, step * vector, scale_of_row, weight)

    if adds_residual:

        @traced(T.prim_func)
        def fused_add_rms_norm_streamed_row(
            x: T.Tensor((rows, n), held_type),
            residual: T.Tensor((rows, n), held_type),
            weight: T.Tensor((n,), weight_type),
            y: T.Tensor((rows, n), held_type),
            summed: T.Tensor((rows, n), held_type),
            eps: T.float32,
        ):
            normalise_rows(x, residual, weight, y, summed, eps)

        return fused_add_rms_norm_streamed_row

    @traced(T.prim_func)
    def rms_norm_streamed_row(
        x: T.Tensor((rows, n), held_type),
        weight: T.Tensor((n,), weight_type),
        y: T.Tensor((rows, n), held_type),
        eps: T.float32,
    ):
        normalise_rows(x, None, weight, y, x, eps)

    return rms_norm_streamed_row
