# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""Group norm of rows that a cluster of blocks holds: one read, one write, one launch.

Every block takes the moments of its part of the row and puts them into the shared memory of all blocks of its cluster;
each then merges the same moments in the same order. What registers do not hold is parked in shared memory, each
thread's values in a place of its own, so that no barrier is needed for them.

TileLang places no barriers in such a program: in a branch for one warp they would never be reached by the others. All
that it needs are written here.
"""

import functools
from collections.abc import Callable
from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.batch_norm.cluster_program import clusters
from tileops.kernels.batch_norm.held_channel_program import merge_block, merge_cluster
from tileops.kernels.batch_norm.statistics_program import add_moments
from tileops.kernels.compiled_program import compile_sized_program, traced
from tileops.kernels.group_norm.cluster_plan import ClusterPlan
from tileops.kernels.group_norm.group_row_program import (
    affine_shape,
    affine_type,
    affine_width,
    groups_of,
    load_affine,
    load_chunk,
    write_normalised,
)
from tileops.kernels.shared_program import WARP, take_origin, tilelang_dtype

__all__ = ["group_norm_cluster_row"]


@functools.cache  # as `compiled_once`
def group_norm_cluster_row(
    plan: ClusterPlan,
    channels: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    arch: int,
    *,
    keeps_statistics: bool,
) -> Callable[..., Any]:
    """Compile what `group_norm_held_row` traces, with the same parameters, for a cluster of `plan.blocks` a row."""
    n, vector, held_steps, group = plan.n, plan.vector, plan.held_steps, plan.parking_group
    threads, spatial = plan.warps * WARP, plan.n // channels
    width = affine_width(vector, spatial)
    element = tilelang_dtype(dtype)
    has_weight, has_bias = weight_dtype is not None, bias_dtype is not None
    parked_shape = (plan.parked_steps, threads, vector) if plan.parked_steps else (1, 1, 1)
    rows: Any = T.dynamic("rows")
    all_channels = T.dynamic("all_channels") if has_weight or has_bias else channels

    @traced(T.macro)
    def park(moments, x, parked, origin, row, thread, first, end, groups):
        """Copy further vectors of the row into shared memory, `group` at a time, and add their moments."""
        passing = T.alloc_local((group, vector), element)
        start = T.alloc_var("int32")
        start = first
        for turn in T.serial(groups):
            load_chunk(x, passing, row, start, end, threads, group, vector)
            for step in T.unroll(group):
                for j in T.vectorized(vector):
                    parked[turn * group + step, thread, j] = passing[step, j]
            add_moments(moments, passing, origin, dtype, start, threads, end, group, vector)
            start = start + group * threads

    @traced(T.macro)
    def write(y, held, steps, row, group_index, first, end, origin, mean, inverse_deviation, weight, bias):
        """Write the vectors held from `first` on."""
        passing = T.alloc_local((vector,), element)
        scale = T.alloc_local((steps * width,), affine_type(weight_dtype))
        shift = T.alloc_local((steps * width,), affine_type(bias_dtype))
        for step in T.unroll(steps):
            if first + step * threads < end:
                column = (first + step * threads) * vector
                if has_weight:
                    load_affine(scale, step * width, weight, group_index, column, vector, channels, spatial)
                if has_bias:
                    load_affine(shift, step * width, bias, group_index, column, vector, channels, spatial)
        for step in T.unroll(steps):
            if first + step * threads < end:
                for j in T.unroll(vector):
                    passing[j] = held[step, j]
                write_normalised(
                    y, row, (first + step * threads) * vector, passing, 0, origin, mean, inverse_deviation,
                    scale, shift, step * width, vector, spatial, dtype, has_weight, has_bias,
                )  # fmt: skip

    @traced(T.prim_func)
    def main(
        x: T.Tensor((rows, n), element),
        weight: T.Tensor(affine_shape(weight_dtype, all_channels), affine_type(weight_dtype)),
        bias: T.Tensor(affine_shape(bias_dtype, all_channels), affine_type(bias_dtype)),
        y: T.Tensor((rows, n), element),
        statistics: T.Tensor((2, rows), "float32"),
        eps: T.float32,
    ):
        with clusters(rows, plan.blocks, plan.warps) as block:
            T.cluster_arrive_relaxed()
            warp = T.get_thread_binding(1)
            thread = warp * WARP + T.get_thread_binding(0)
            row = T.truncdiv(block, plan.blocks)
            rank = T.truncmod(block, plan.blocks)
            held = T.alloc_local((held_steps, vector), element)
            passing = T.alloc_local((group, vector), element)
            origin = T.alloc_local((1,), "float32")
            moments = T.alloc_local((3,), "float32")
            sum_slots = T.alloc_shared((plan.warps, 2), "float32")
            square_slots = T.alloc_shared((plan.warps, 1), "float32")
            mine = T.alloc_shared((3,), "float32")
            peers = T.alloc_shared((plan.blocks, 3), "float32")
            parked = T.alloc_shared(parked_shape, element)
            group_index = T.alloc_var("int32")
            first = T.alloc_var("int32")
            end = T.alloc_var("int32")
            groups = T.alloc_var("int32")

            first = rank * plan.block_vectors + thread
            end = T.min((rank + 1) * plan.block_vectors, plan.vectors)
            load_chunk(x, held, row, first, end, threads, held_steps, vector)
            take_origin(origin, x, None, row, vector, dtype)
            if has_weight or has_bias:
                group_index = T.truncmod(row, groups_of(all_channels, channels))
            for i in T.unroll(3):
                moments[i] = 0.0
            add_moments(moments, held, origin, dtype, first, threads, end, held_steps, vector)
            if plan.parked_steps:
                # Counted at run time, so that the compiler leaves the loops be: unrolled, they would want more
                # registers than there are.
                groups = T.truncdiv(
                    end - (first - thread) - held_steps * threads + group * threads - 1, group * threads
                )
                park(moments, x, parked, origin, row, thread, first + held_steps * threads, end, groups)
            merge_block(moments, sum_slots, square_slots, plan.warps)
            merge_cluster(moments, mine, peers, rank, warp, plan.blocks)

            mean = moments[1]
            inverse_deviation = T.alloc_var("float32")
            inverse_deviation = T.rsqrt(moments[2] * (1.0 / n) + eps)
            write(y, held, held_steps, row, group_index, first, end, origin, mean, inverse_deviation, weight, bias)
            if plan.parked_steps:
                first = first + held_steps * threads
                for turn in T.serial(groups):
                    for step in T.unroll(group):
                        for j in T.vectorized(vector):
                            passing[step, j] = parked[turn * group + step, thread, j]
                    write(
                        y, passing, group, row, group_index, first, end, origin, mean, inverse_deviation, weight, bias
                    )
                    first = first + group * threads
            if keeps_statistics and (rank == 0) and (thread == 0):
                statistics[0, row] = origin[0] + mean
                statistics[1, row] = moments[2] * (1.0 / max(n - 1, 1))

    return compile_sized_program(main, arch, plan.registers)
