# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""The sums over rows of the backward: what a block keeps and leaves of them, and the program that adds that up."""

from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.compiled_program import macro, traced
from tileops.kernels.row_backward_plan import BackwardPlan
from tileops.kernels.shared_program import WARP, group_sum, tilelang_dtype

__all__ = ["add_to_sum", "sums_of_parts", "write_sum"]

ACROSS = 32
"""Columns of a block, and threads of each."""

IN_FLIGHT = 4
"""Parts that a thread loads together."""


@macro
def add_to_sum(sums, kept, plan: BackwardPlan, which: int, step: int, added):
    """Add `added` (float32, local, vector) to the thread's sum `which` at `step`: in `sums`, or shared, in `kept`."""
    thread = T.get_thread_binding()
    quad_sum = T.alloc_local((plan.quad,), "float32")
    if plan.sums_in_shared:
        for at in plan.quads_of_vector:
            for j in T.vectorized(plan.quad):
                quad_sum[j] = kept[which, step * len(plan.quads_of_vector) + at, thread, j]
            for j in T.unroll(plan.quad):
                quad_sum[j] = quad_sum[j] + added[at * plan.quad + j]
            for j in T.vectorized(plan.quad):
                kept[which, step * len(plan.quads_of_vector) + at, thread, j] = quad_sum[j]
    else:
        for j in T.unroll(plan.row.vector):
            sums[which, step * plan.row.vector + j] = sums[which, step * plan.row.vector + j] + added[j]


@macro
def write_sum(gradient, partials, plan: BackwardPlan, which: int, blocks, block, sums, kept, groups):
    """Write the sum `which` of the block: of its rows side by side, in order, where it takes several."""
    thread = T.get_thread_binding()
    lane = thread % plan.row.lanes
    quad_sum = T.alloc_local((plan.quad,), "float32")
    if plan.row.rows_per_block == 1:
        for step in plan.row.steps:
            if plan.row.holds(step, lane):
                for at in plan.quads_of_vector:
                    for j in T.vectorized(plan.quad):
                        if plan.sums_in_shared:
                            quad_sum[j] = kept[which, step * len(plan.quads_of_vector) + at, thread, j]
                        else:
                            quad_sum[j] = sums[which, step * plan.row.vector + at * plan.quad + j]
                    column = plan.row.column(step, lane) + at * plan.quad
                    put(gradient, partials, which, blocks, block, column, quad_sum, plan.quad)
    else:
        T.sync_threads()
        for step in plan.row.steps:
            if plan.row.holds(step, lane):
                for j in T.unroll(plan.row.vector):
                    column_of_value = plan.row.column(step, lane) + j
                    groups[thread // plan.row.lanes, column_of_value] = sums[which, step * plan.row.vector + j]
        T.sync_threads()
        for turn in T.serial(T.ceildiv(plan.row.n, plan.row.threads)):
            column = turn * plan.row.threads + thread
            if column < plan.row.n:
                quad_sum[0] = 0.0
                for other in T.serial(plan.row.rows_per_block):
                    quad_sum[0] = quad_sum[0] + groups[other, column]
                put(gradient, partials, which, blocks, block, column, quad_sum, 1)


@macro
def put(gradient, partials, which: int, blocks, block, column, values, count: int):
    """Write `values[:count]` (float32, local) of the sum `which` at `column`: of a lone block, that is the gradient."""
    if blocks == 1:
        rounded = T.alloc_local((count,), gradient.dtype)
        for j in T.unroll(count):
            rounded[j] = T.cast(values[j], gradient.dtype)
        for j in T.vectorized(count):
            gradient[column + j] = rounded[j]
    else:
        for j in T.vectorized(count):
            partials[which, block, column + j] = values[j]


def sums_of_parts(
    n: int, weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None, *, launched_early: bool
) -> Any:
    """The sum of partials (sums, parts, n) over the parts: into grad_weight (n), grad_bias (n), as far as wanted.

    The program takes partials, and the results or None. Thirty-two threads share a column, and the order in which
    they add is fixed. A program that is launched early waits on the device for what leaves the partials: its launch then
    takes place while that runs (architectures from 90 on).
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
            if launched_early:
                T.pdl_sync()
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
