# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""One cluster of blocks a channel, which stays on chip: one read, one write, one launch.

A cluster may be one block. Of several, every block takes the moments of its part and puts them into the shared
memory of all blocks of its cluster; each then merges the same moments in the same order. What registers do not hold
is parked in shared memory, each thread's values in a place of its own, so that no barrier is needed for them.

A block is as large as its launch asks for: (WARP, warps) threads. TileLang places no barriers in such a program;
all that it needs are written here.
"""

import functools
from collections.abc import Callable
from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.batch_norm.cluster_program import clusters, tell_cluster
from tileops.kernels.batch_norm.statistics_program import (
    FLOAT32,
    add_moments,
    affine_dtype,
    block_warps,
    channel_origin,
    hold,
    keep_statistics,
    read_affine,
    read_running,
    store_held,
)
from tileops.kernels.compiled_program import compile_sized_program, macro, traced
from tileops.kernels.shared_program import (
    WARP,
    merge_moments,
    sized_block_sum,
    tilelang_dtype,
)

__all__ = ["held_channel_program"]


@macro
def park(
    moments, x, parked, origin, dtype: torch.dtype, channel, thread, first, stride, items, groups,
    group: int, run_vectors: int, vector: int,
):  # fmt: skip
    """Copy further vectors of the channel into shared memory, ``group`` at a time, and add their moments."""
    passing = T.alloc_local((group, vector), tilelang_dtype(dtype))
    turn_first = T.alloc_var("int32")
    turn_first = first
    for turn in T.serial(groups):
        hold(x, passing, channel, 0, turn_first, stride, items, group, run_vectors, vector)
        for step in T.unroll(group):
            for lane in T.vectorized(vector):
                parked[turn * group + step, thread, lane] = passing[step, lane]
        add_moments(moments, passing, origin, dtype, turn_first, stride, items, group, vector)
        turn_first = turn_first + group * stride


@macro
def store_parked(
    y, parked, origin, dtype: torch.dtype, channel, thread, centre, scale, shift, first, stride, items,
    groups, group: int, run_vectors: int, vector: int,
):  # fmt: skip
    """``store_held`` of the values parked."""
    passing = T.alloc_local((group, vector), tilelang_dtype(dtype))
    turn_first = T.alloc_var("int32")
    turn_first = first
    for turn in T.serial(groups):
        for step in T.unroll(group):
            for lane in T.vectorized(vector):
                passing[step, lane] = parked[turn * group + step, thread, lane]
        store_held(
            y, passing, origin, dtype, channel, centre, scale, shift, 0, turn_first, stride, items,
            group, run_vectors, vector,
        )  # fmt: skip
        turn_first = turn_first + group * stride


@macro
def merge_block(moments, sum_slots, square_slots, warps):
    """Merge the ``moments`` of a block's threads: sums for the mean, then every thread's deviations from it."""
    sums = T.alloc_local((2,), FLOAT32)
    squares = T.alloc_local((1,), FLOAT32)
    sums[0] = moments[0] * moments[1]
    sums[1] = moments[0]
    sized_block_sum(sums, sum_slots, 2, warps)
    # A block without a part (a small batch in a wide cluster) counts nothing and centres on 0.
    sums[0] = sums[0] / T.max(sums[1], 1.0)
    squares[0] = moments[2] + (moments[1] - sums[0]) * moments[0] * (moments[1] - sums[0])
    sized_block_sum(squares, square_slots, 1, warps)
    moments[0] = sums[1]
    moments[1] = sums[0]
    moments[2] = squares[0]


@macro
def merge_cluster(moments, mine, peers, rank, warp, blocks: int):
    """Merge the ``moments`` (float32, local, 3) of a cluster's blocks, in the order of their ranks."""
    tell_cluster(moments, mine, peers, rank, warp, blocks, 3)
    for i in T.unroll(3):
        moments[i] = 0.0
    for block in T.unroll(blocks):
        merge_moments(moments, peers[block, 0], peers[block, 1], peers[block, 2])


@functools.cache
def held_channel_program(
    arch: int,
    c: int,
    spatial: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    running: bool,
    *,
    vector: int,
    blocks: int,
    most_warps: int,
    fill_warps: int,
    held_steps: int,
    parked_steps: int,
    parking_group: int,
    registers: int,
) -> Callable[..., Any]:
    """Compile ``(x, running_mean, running_var, weight, bias, y, mean, invstd, eps, momentum)``.

    x and y are (n, c, spatial).

    Serves every batch size up to ``blocks * most_warps * WARP * (held_steps + parked_steps) * vector // spatial``;
    ``parked_steps`` is a multiple of ``parking_group``. ``fill_warps`` is as ``block_warps`` takes it, and
    ``registers`` how many a thread may take.
    """
    element = tilelang_dtype(dtype)
    run_vectors = spatial // vector
    n = T.dynamic("n")
    warps = block_warps(T.ceildiv(n * run_vectors, blocks), held_steps, fill_warps, most_warps)

    @traced(T.prim_func)
    def main(
        x: T.Tensor((n, c, spatial), element),
        running_mean: T.Tensor((c,), FLOAT32),
        running_var: T.Tensor((c,), FLOAT32),
        weight: T.Tensor((c,), affine_dtype(weight_dtype)),
        bias: T.Tensor((c,), affine_dtype(bias_dtype)),
        y: T.Tensor((n, c, spatial), element),
        mean: T.Tensor((c,), FLOAT32),
        invstd: T.Tensor((c,), FLOAT32),
        eps: T.float32,
        momentum: T.float32,
    ):
        with clusters(c, blocks, warps) as block:
            if blocks > 1:
                T.cluster_arrive_relaxed()
            warp = T.get_thread_binding(1)
            thread = warp * WARP + T.get_thread_binding(0)
            channel = block // blocks
            rank = block % blocks
            items = n * run_vectors
            # The blocks take turns, so that a small batch leaves none of them idle.
            stride = T.alloc_var("int32")
            stride = blocks * (warps * WARP)
            first = T.alloc_var("int32")
            first = rank * (warps * WARP) + thread
            held = T.alloc_local((held_steps, vector), element)
            affine = T.alloc_local((2,), FLOAT32)
            kept = T.alloc_local((2,), FLOAT32)
            origin = T.alloc_local((1,), FLOAT32)
            moments = T.alloc_local((3,), FLOAT32)
            sum_slots = T.alloc_shared((most_warps, 2), FLOAT32)
            square_slots = T.alloc_shared((most_warps, 1), FLOAT32)
            mine = T.alloc_shared((3,), FLOAT32)
            peers = T.alloc_shared((blocks, 3), FLOAT32)
            parked = T.alloc_shared((max(1, parked_steps), most_warps * WARP, vector), element)
            # What follows `held`, in groups: as many as the batch fills, counted at run time also so that the compiler
            # leaves the loops be. Unrolled, they would want more registers than there are.
            further = first + held_steps * stride
            groups = T.alloc_var("int32")
            groups = T.truncdiv(
                T.max(items - held_steps * stride, 0) + parking_group * stride - 1, parking_group * stride
            )

            hold(x, held, channel, 0, first, stride, items, held_steps, run_vectors, vector)
            channel_origin(origin, x, channel, vector, dtype)
            read_affine(affine, channel, weight, bias, weight_dtype is not None, bias_dtype is not None)
            read_running(kept, channel, running_mean, running_var, running)
            for i in T.unroll(3):
                moments[i] = 0.0
            add_moments(moments, held, origin, dtype, first, stride, items, held_steps, vector)
            if parked_steps:
                park(
                    moments, x, parked, origin, dtype, channel, thread, further, stride, items, groups,
                    parking_group, run_vectors, vector,
                )  # fmt: skip
            merge_block(moments, sum_slots, square_slots, warps)
            if blocks > 1:
                merge_cluster(moments, mine, peers, rank, warp, blocks)

            scale = T.alloc_var(FLOAT32)
            scale = T.rsqrt(moments[2] / moments[0] + eps) * affine[0]
            store_held(
                y, held, origin, dtype, channel, moments[1], scale, affine[1], 0, first, stride, items,
                held_steps, run_vectors, vector,
            )  # fmt: skip
            if parked_steps:
                store_parked(
                    y, parked, origin, dtype, channel, thread, moments[1], scale, affine[1], further, stride,
                    items, groups, parking_group, run_vectors, vector,
                )  # fmt: skip
            if (rank == 0) and (thread == 0):
                keep_statistics(
                    channel, moments[0], origin[0], moments[1], moments[2], kept, eps, momentum, running,
                    mean, invstd, running_mean, running_var,
                )  # fmt: skip

    return compile_sized_program(main, arch, registers)
