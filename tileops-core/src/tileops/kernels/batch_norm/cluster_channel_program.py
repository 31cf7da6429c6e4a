# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""One cluster of blocks a channel, each holding a part of it: one read, one write, one launch.

Every block takes the moments of its part and puts them into the shared memory of all blocks of its cluster; each
then merges the same moments in the same order. What registers do not hold is parked in shared memory, each
thread's values in a place of its own, so that no barrier is needed for them.
"""

from collections.abc import Callable
from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.batch_norm.regions import PARKING_GROUP
from tileops.kernels.batch_norm.statistics_program import (
    FLOAT32,
    affine_dtype,
    channel_origin,
    held_square_sum,
    held_sum,
    hold,
    keep_statistics,
    read_affine,
    store_held,
)
from tileops.kernels.shared_program import WARP, block_sum, compile_program, merge_moments, tilelang_dtype

__all__ = ["cluster_channel_program"]


@T.macro
def park(x, parked, channel, thread, first, stride, items, groups, run_vectors: int, vector: int, element):
    """Copy further vectors of the channel into shared memory, by way of registers, a group at a time."""
    passing = T.alloc_local((PARKING_GROUP, vector), element)
    for group in T.serial(groups):
        hold(
            x, passing, channel, first + group * (PARKING_GROUP * stride), stride, items,
            PARKING_GROUP, run_vectors, vector,
        )  # fmt: skip
        for step in T.unroll(PARKING_GROUP):
            for lane in T.vectorized(vector):
                parked[group * PARKING_GROUP + step, thread, lane] = passing[step, lane]


@T.macro
def fetch(passing, parked, thread, group, vector: int):
    """Read back a group of the thread's own vectors."""
    for step in T.unroll(PARKING_GROUP):
        for lane in T.vectorized(vector):
            passing[step, lane] = parked[group * PARKING_GROUP + step, thread, lane]


@T.macro
def parked_sum(sums, parked, origin, dtype: torch.dtype, thread, first, stride, items, groups, vector: int):
    """``held_sum`` of the values parked."""
    passing = T.alloc_local((PARKING_GROUP, vector), tilelang_dtype(dtype))
    for group in T.serial(groups):
        fetch(passing, parked, thread, group, vector)
        held_sum(
            sums, passing, origin, dtype, first + group * (PARKING_GROUP * stride), stride, items, PARKING_GROUP, vector
        )


@T.macro
def parked_square_sum(
    squares, parked, origin, dtype: torch.dtype, centre, thread, first, stride, items, groups, vector: int
):
    """``held_square_sum`` of the values parked."""
    passing = T.alloc_local((PARKING_GROUP, vector), tilelang_dtype(dtype))
    for group in T.serial(groups):
        fetch(passing, parked, thread, group, vector)
        held_square_sum(
            squares, passing, origin, dtype, centre, first + group * (PARKING_GROUP * stride), stride, items,
            PARKING_GROUP, vector,
        )  # fmt: skip


@T.macro
def store_parked(
    y, parked, origin, dtype: torch.dtype, channel, thread, centre, scale, shift, first, stride, items,
    groups, run_vectors: int, vector: int,
):  # fmt: skip
    """``store_held`` of the values parked."""
    passing = T.alloc_local((PARKING_GROUP, vector), tilelang_dtype(dtype))
    for group in T.serial(groups):
        fetch(passing, parked, thread, group, vector)
        store_held(
            y, passing, origin, dtype, channel, centre, scale, shift,
            first + group * (PARKING_GROUP * stride), stride, items, PARKING_GROUP, run_vectors, vector,
        )  # fmt: skip


@T.macro
def merge_cluster(moments, mine, peers, rank, thread, blocks: int):
    """Merge the ``moments`` (float32, local, 3) of a cluster's blocks, in the order of their ranks.

    The caller has announced itself to the cluster: no block may write into one that has not started.
    """
    if thread == 0:
        for i in T.unroll(3):
            mine[i] = moments[i]
    T.sync_threads()
    T.cluster_wait()
    # A list is written out as statements of their own: copies that share a branch are taken for a race.
    for block in list(range(blocks)):
        T.copy_cluster(mine, peers[rank, :], dst_block=block)
    T.cluster_sync()
    for i in T.unroll(3):
        moments[i] = 0.0
    for block in T.unroll(blocks):
        merge_moments(moments, peers[block, 0], peers[block, 1], peers[block, 2])


def cluster_channel_program(
    arch: int,
    c: int,
    spatial: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    running: bool,
    eps: float,
    momentum: float,
    *,
    vector: int,
    blocks: int,
    threads: int,
    held_steps: int,
    parked_steps: int,
    min_blocks: int,
) -> Callable[..., Any]:
    """Compile ``(x, running_mean, running_var, weight, bias, y, mean, invstd)``, x and y as (n, c, spatial).

    Serves every batch size up to ``blocks * threads * (held_steps + parked_steps) * vector // spatial``;
    ``parked_steps`` is a multiple of PARKING_GROUP.
    """
    element = tilelang_dtype(dtype)
    run_vectors = spatial // vector
    warps = threads // WARP
    stride = blocks * threads
    n = T.dynamic("n")

    @T.prim_func
    def main(
        x: T.Tensor((n, c, spatial), element),
        running_mean: T.Tensor((c,), FLOAT32),
        running_var: T.Tensor((c,), FLOAT32),
        weight: T.Tensor((c,), affine_dtype(weight_dtype)),
        bias: T.Tensor((c,), affine_dtype(bias_dtype)),
        y: T.Tensor((n, c, spatial), element),
        mean: T.Tensor((c,), FLOAT32),
        invstd: T.Tensor((c,), FLOAT32),
    ):
        with T.ClusterKernel(c * blocks, threads=threads, cluster_dims=(blocks, 1, 1)) as block:
            T.annotate_min_blocks_per_sm(min_blocks)
            T.cluster_arrive_relaxed()
            thread = T.get_thread_binding()
            channel = block // blocks
            rank = block % blocks
            items = n * run_vectors
            # The blocks take turns, so that a batch size below the class's leaves none of them idle.
            first = rank * threads + thread
            first_parked = first + held_steps * stride
            # The groups that the batch fills. Counted at run time also so that the compiler leaves the loops be:
            # unrolled, they would want more registers than there are.
            groups = T.alloc_var("int32")
            groups = (T.max(items - held_steps * stride, 0) + PARKING_GROUP * stride - 1) // (PARKING_GROUP * stride)
            held = T.alloc_local((held_steps, vector), element)
            affine = T.alloc_local((2,), FLOAT32)
            origin = T.alloc_local((1,), FLOAT32)
            sums = T.alloc_local((2,), FLOAT32)
            squares = T.alloc_local((1,), FLOAT32)
            moments = T.alloc_local((3,), FLOAT32)
            sum_slots = T.alloc_shared((warps, 2), FLOAT32)
            square_slots = T.alloc_shared((warps, 1), FLOAT32)
            mine = T.alloc_shared((3,), FLOAT32)
            peers = T.alloc_shared((blocks, 3), FLOAT32)
            parked = T.alloc_shared((max(1, parked_steps), threads, vector), element)

            hold(x, held, channel, first, stride, items, held_steps, run_vectors, vector)
            channel_origin(origin, x, channel, vector, dtype)
            read_affine(affine, channel, weight, bias, weight_dtype is not None, bias_dtype is not None)
            if parked_steps:
                park(x, parked, channel, thread, first_parked, stride, items, groups, run_vectors, vector, element)

            sums[0] = 0.0
            sums[1] = 0.0
            held_sum(sums, held, origin, dtype, first, stride, items, held_steps, vector)
            if parked_steps:
                parked_sum(sums, parked, origin, dtype, thread, first_parked, stride, items, groups, vector)
            block_sum(sums, sum_slots, 2, threads)
            # A block without a part (a small batch in a wide cluster) counts nothing and centres on 0.
            centre = T.alloc_var(FLOAT32)
            centre = sums[0] / T.max(sums[1], 1.0)
            squares[0] = 0.0
            held_square_sum(squares, held, origin, dtype, centre, first, stride, items, held_steps, vector)
            if parked_steps:
                parked_square_sum(
                    squares, parked, origin, dtype, centre, thread, first_parked, stride, items, groups, vector
                )
            block_sum(squares, square_slots, 1, threads)
            moments[0] = sums[1]
            moments[1] = centre
            moments[2] = squares[0]
            merge_cluster(moments, mine, peers, rank, thread, blocks)

            scale = T.alloc_var(FLOAT32)
            scale = T.rsqrt(moments[2] / moments[0] + eps) * affine[0]
            store_held(
                y, held, origin, dtype, channel, moments[1], scale, affine[1], first, stride, items,
                held_steps, run_vectors, vector,
            )  # fmt: skip
            if parked_steps:
                store_parked(
                    y, parked, origin, dtype, channel, thread, moments[1], scale, affine[1], first_parked, stride,
                    items, groups, run_vectors, vector,
                )  # fmt: skip
            if (rank == 0) and (thread == 0):
                keep_statistics(
                    channel, moments[0], origin[0], moments[1], moments[2], eps, momentum, running,
                    mean, invstd, running_mean, running_var,
                )  # fmt: skip

    return compile_program(main, arch)
