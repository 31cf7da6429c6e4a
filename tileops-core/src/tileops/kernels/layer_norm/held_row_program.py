# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""Layer norm of rows that fit in registers, or of their sums: one read, one reduction, one write."""

from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.compiled_program import traced
from tileops.kernels.row_plan import RowPlan
from tileops.kernels.shared_program import (
    WARP,
    elements_of_group,
    elements_of_thread,
    from_origin,
    group_merge_samples,
    keep_packed,
    load_columns,
    load_columns_at,
    load_row,
    merge_samples_of_warps,
    store_row,
    store_row_at,
    take_origin,
    tilelang_dtype,
)


def layer_norm_held_row(
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

    The variance is centred exactly: each thread sums its elements, then their squared deviations from its own mean,
    both from registers; the threads of a warp merge theirs, and the warps of a block behind a single barrier. No
    large mean can cancel in it, as it would in E[x^2] - E[x]^2.
    """
    n, vector = plan.n, plan.vector
    held_type = tilelang_dtype(dtype)
    weight_type = tilelang_dtype(weight_dtype or torch.float32)
    bias_type = tilelang_dtype(bias_dtype or torch.float32)
    has_weight, has_bias = weight_dtype is not None, bias_dtype is not None
    residual_registers = plan.registers_for(dtype if adds_residual else None)
    weight_registers = plan.registers_for(weight_dtype)
    weight_early = has_weight and not adds_residual and plan.loads_early(weight_registers)
    blocks_per_sm = plan.blocks_per_sm(weight_registers if weight_early else residual_registers)
    group = min(plan.lanes, WARP)
    rows = T.dynamic("rows")

    @traced(T.macro)
    def normalise_rows(x, residual, weight, bias, y, summed, eps):
        """`summed` is x itself where the residual is None."""
        with T.Kernel(T.ceildiv(rows, plan.rows_per_block), threads=plan.threads) as block:
            T.annotate_min_blocks_per_sm(blocks_per_sm)
            held = T.alloc_local((plan.elements,), held_type)
            scale = T.alloc_local((plan.elements,), weight_type)
            shift = T.alloc_local((vector,), bias_type)
            result = T.alloc_local((vector,), held_type)
            partial = T.alloc_local((vector,), "float32")
            total = T.alloc_local((1,), "float32")
            squares = T.alloc_local((1,), "float32")
            origin = T.alloc_local((1,), "float32")
            slots = T.alloc_shared((max(plan.lanes // WARP, 1), 2), "float32")
            thread = T.get_thread_binding()
            lane = thread % plan.lanes
            row = block * plan.rows_per_block + thread // plan.lanes

            # A group past the last row reads the last row again: the exchanges below need every lane.
            load_row(held, x, residual, T.min(row, rows - 1), plan, lane)
            take_origin(origin, x, residual, T.min(row, rows - 1), vector, dtype)
            # The weight arrives while the row is summed, where registers allow.
            if weight_early:
                load_columns(scale, weight, plan, lane)

            # Stored at once: the memory takes it while the row is summed.
            if residual is not None and row < rows:
                store_row(summed, row, held, plan, lane)

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

            group_merge_samples(total, squares, mean_of_thread, count, elements_of_group(plan, lane), group)
            if plan.lanes > WARP:
                merge_samples_of_warps(total, squares, slots, plan)
            inverse_deviation = T.rsqrt(squares[0] * (1.0 / n) + eps)
            mean = total[0] * (1.0 / n)

            if row < rows:
                for step in plan.steps:
                    if plan.holds(step, lane):
                        column = plan.column(step, lane)
                        if has_weight and not weight_early:
                            load_columns_at(scale, step * vector, weight, column, vector)
                        if has_bias:
                            load_columns_at(shift, 0, bias, column, vector)
                        for j in T.unroll(vector):
                            i = step * vector + j
                            value = (from_origin(held[i], origin[0], dtype) - mean) * inverse_deviation
                            if has_weight:
                                value = value * T.cast(scale[i], "float32")
                            if has_bias:
                                value = value + T.cast(shift[j], "float32")
                            result[j] = T.cast(value, held_type)
                        store_row_at(y, row, column, result, 0, vector)

    if adds_residual:

        @traced(T.prim_func)
        def fused_add_layer_norm_held_row(
            x: T.Tensor((rows, n), held_type),
            residual: T.Tensor((rows, n), held_type),
            weight: T.Tensor((n,), weight_type),
            bias: T.Tensor((n,), bias_type),
            y: T.Tensor((rows, n), held_type),
            summed: T.Tensor((rows, n), held_type),
            eps: T.float32,
        ):
            normalise_rows(x, residual, weight, bias, y, summed, eps)

        return fused_add_layer_norm_held_row

    @traced(T.prim_func)
    def layer_norm_held_row(
        x: T.Tensor((rows, n), held_type),
        weight: T.Tensor((n,), weight_type),
        bias: T.Tensor((n,), bias_type),
        y: T.Tensor((rows, n), held_type),
        eps: T.float32,
    ):
        normalise_rows(x, None, weight, bias, y, x, eps)

    return layer_norm_held_row
