# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""RMS norm of rows that fit in registers, or of their sums: one read, one reduction, one write."""

from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.compiled_program import traced
from tileops.kernels.row_plan import RowPlan
from tileops.kernels.shared_program import (
    WARP,
    block_sum,
    group_sum,
    keep_packed,
    load_columns,
    load_columns_at,
    load_row,
    store_row,
    store_row_at,
    tilelang_dtype,
)


def rms_norm_held_row(
    plan: RowPlan, dtype: torch.dtype, weight_dtype: torch.dtype | None, adds_residual: bool = False
) -> Any:
    """y[r, i] = x[r, i] / sqrt(mean(x[r, :] ** 2) + eps) * weight[i], in float32, rounded once.

    The program takes x (rows, n), weight (n) or None, y (rows, n), eps; one build serves every row count. One that
    adds a residual takes x, residual, weight, y, summed, eps: x + residual, rounded, goes to `summed` (rows, n), and
    stands in the place of x from then on.
    """
    n, vector = plan.n, plan.vector
    held_type = tilelang_dtype(dtype)
    weight_type = tilelang_dtype(weight_dtype or torch.float32)
    residual_registers = plan.registers_for(dtype if adds_residual else None)
    weight_registers = plan.registers_for(weight_dtype)
    has_weight = weight_dtype is not None
    weight_early = has_weight and not adds_residual and plan.loads_early(weight_registers)
    blocks_per_sm = plan.blocks_per_sm(weight_registers if weight_early else residual_registers)
    rows = T.dynamic("rows")

    @traced(T.macro)
    def normalise_rows(x, residual, weight, y, summed, eps):
        """`summed` is x itself where the residual is None."""
        with T.Kernel(T.ceildiv(rows, plan.rows_per_block), threads=plan.threads) as block:
            T.annotate_min_blocks_per_sm(blocks_per_sm)
            held = T.alloc_local((plan.elements,), held_type)
            scale = T.alloc_local((plan.elements,), weight_type)
            result = T.alloc_local((vector,), held_type)
            partial = T.alloc_local((vector,), "float32")
            total = T.alloc_local((1,), "float32")
            slots = T.alloc_shared((max(plan.lanes // WARP, 1), 1), "float32")
            thread = T.get_thread_binding()
            lane = thread % plan.lanes
            row = block * plan.rows_per_block + thread // plan.lanes

            # A group past the last row reads the last row again: the exchanges below need every lane.
            load_row(held, x, residual, T.min(row, rows - 1), plan, lane)
            # The weight arrives while the row is summed, where registers allow.
            if weight_early:
                load_columns(scale, weight, plan, lane)

            # Stored at once: the memory takes it while the row is summed.
            if residual is not None and row < rows:
                store_row(summed, row, held, plan, lane)

            # One partial sum for each element of a vector keeps the chains of additions short.
            for j in T.unroll(vector):
                partial[j] = 0.0
            for step in plan.steps:
                if plan.holds(step, lane):
                    for j in T.unroll(vector):
                        value = T.cast(held[step * vector + j], "float32")
                        partial[j] = partial[j] + value * value
            total[0] = 0.0
            for j in T.unroll(vector):
                total[0] = total[0] + partial[j]
            keep_packed(held, plan)
            if plan.lanes > WARP:
                block_sum(total, slots, 1, plan.threads)
            else:
                group_sum(total, 1, plan.lanes)
            scale_of_row = T.rsqrt(total[0] * (1.0 / n) + eps)

            if row < rows:
                for step in plan.steps:
                    if plan.holds(step, lane):
                        column = plan.column(step, lane)
                        if has_weight and not weight_early:
                            load_columns_at(scale, step * vector, weight, column, vector)
                        for j in T.unroll(vector):
                            i = step * vector + j
                            value = T.cast(held[i], "float32") * scale_of_row
                            if has_weight:
                                value = value * T.cast(scale[i], "float32")
                            result[j] = T.cast(value, held_type)
                        store_row_at(y, row, column, result, 0, vector)

    if adds_residual:

        @traced(T.prim_func)
        def fused_add_rms_norm_held_row(
            x: T.Tensor((rows, n), held_type),
            residual: T.Tensor((rows, n), held_type),
            weight: T.Tensor((n,), weight_type),
            y: T.Tensor((rows, n), held_type),
            summed: T.Tensor((rows, n), held_type),
            eps: T.float32,
        ):
            normalise_rows(x, residual, weight, y, summed, eps)

        return fused_add_rms_norm_held_row

    @traced(T.prim_func)
    def rms_norm_held_row(
        x: T.Tensor((rows, n), held_type),
        weight: T.Tensor((n,), weight_type),
        y: T.Tensor((rows, n), held_type),
        eps: T.float32,
    ):
        normalise_rows(x, None, weight, y, x, eps)

    return rms_norm_held_row
