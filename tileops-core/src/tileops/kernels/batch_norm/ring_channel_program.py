# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""A cluster of blocks for one channel after the other, which shared memory holds: one read, one write, one launch.

Each thread has places of its own in shared memory, as many vectors as it takes of a channel, for as many channels as
there is room for. While it writes the output of one channel, it already fills the places that become free with its
part of a later one: memory is read and written all the time. Nobody else touches a thread's places, so that no
barrier is needed for them.

TileLang places no barriers in such a program; all that it needs are written here.
"""

from collections.abc import Callable
from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.batch_norm.cluster_program import ring_clusters, tell_peers
from tileops.kernels.batch_norm.statistics_program import (
    FLOAT32,
    affine_dtype,
    channel_origin,
    keep_statistics,
    locate,
    merge_block,
    read_affine,
    read_running,
)
from tileops.kernels.compiled_program import compile_sized_program, traced
from tileops.kernels.shared_program import WARP, from_origin, merge_moments, tilelang_dtype

__all__ = ["ring_channel_program"]


@T.macro
def fetch(parked, place, thread, x, channel, item, items, run_vectors: int, vector: int):
    """Begin to copy a channel's vector ``item`` into a place of the thread."""
    at = T.alloc_local((2,), "int32")
    if item < items:
        locate(at, item, run_vectors)
        T.ptx_cp_async(
            T.access_ptr(parked[place, thread, 0], "w", vector),
            T.access_ptr(x[at[0], channel, at[1] * vector], "r", vector),
            vector,
        )


@T.macro
def await_channel(ahead, most: int):
    """Wait until all but the last ``ahead`` channels that were fetched are there; ``ahead`` is below ``most``."""
    for count in list(range(most)):
        if ahead == count:
            T.ptx_wait_group(count)
    T.sync_warp()  # holds the compiler back too: what it reads next it may not read earlier


def ring_channel_program(
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
    warps: int,
    places: int,
    most_ahead: int,
    registers: int,
) -> Callable[..., Any]:
    """Compile ``(x, groups, running_mean, running_var, weight, bias, y, mean, invstd)``, x and y as (n, c, spatial).

    ``groups`` clusters share the channels. Serves batches of which each thread has at most ``places`` vectors.
    """
    element = tilelang_dtype(dtype)
    run_vectors = spatial // vector
    n = T.dynamic("n")
    threads = warps * WARP
    stride = blocks * threads

    @traced(T.prim_func)
    def main(
        x: T.Tensor((n, c, spatial), element),
        groups: T.int32,
        running_mean: T.Tensor((c,), FLOAT32),
        running_var: T.Tensor((c,), FLOAT32),
        weight: T.Tensor((c,), affine_dtype(weight_dtype)),
        bias: T.Tensor((c,), affine_dtype(bias_dtype)),
        y: T.Tensor((n, c, spatial), element),
        mean: T.Tensor((c,), FLOAT32),
        invstd: T.Tensor((c,), FLOAT32),
    ):
        with ring_clusters(groups, blocks, warps) as block:
            if blocks > 1:
                T.cluster_arrive_relaxed()
            warp = T.get_thread_binding(1)
            thread = warp * WARP + T.get_thread_binding(0)
            group = block // blocks
            rank = block % blocks
            items = n * run_vectors
            first = rank * threads + thread  # the blocks take turns
            steps = T.alloc_var("int32")
            steps = T.truncdiv(items + stride - 1, stride)
            channels = T.alloc_var("int32")  # that the places hold
            channels = T.min(T.truncdiv(T.int32(places), steps), most_ahead)
            slot = T.alloc_var("int32")
            channel = T.alloc_var("int32")
            later = T.alloc_var("int32")
            count = T.alloc_var(FLOAT32)
            passing = T.alloc_local((vector,), element)
            chains = T.alloc_local((vector,), FLOAT32)
            affine = T.alloc_local((2,), FLOAT32)
            kept = T.alloc_local((2,), FLOAT32)
            origin = T.alloc_local((1,), FLOAT32)
            moments = T.alloc_local((3,), FLOAT32)
            scale = T.alloc_var(FLOAT32)
            sum_slots = T.alloc_shared((warps, 2), FLOAT32)
            square_slots = T.alloc_shared((warps, 1), FLOAT32)
            mine = T.alloc_shared((3,), FLOAT32)
            peers = T.alloc_shared((2, blocks, 3), FLOAT32)
            parked = T.alloc_shared((places, threads, vector), element)

            for ahead in T.serial(channels):
                if group + ahead * groups < c:
                    for step in T.serial(steps):
                        fetch(
                            parked, ahead * steps + step, thread, x, group + ahead * groups, first + step * stride,
                            items, run_vectors, vector,
                        )  # fmt: skip
                T.ptx_commit_group()
            if blocks > 1:
                T.cluster_wait()

            slot = 0
            count = 0.0
            for step in T.serial(steps):
                if first + step * stride < items:
                    count = count + vector
            for turn in T.serial(T.truncdiv(c - group + groups - 1, groups)):
                channel = group + turn * groups
                later = channel + channels * groups
                channel_origin(origin, x, channel, vector, dtype)
                read_affine(affine, channel, weight, bias, weight_dtype is not None, bias_dtype is not None)
                read_running(kept, channel, running_mean, running_var, running)
                await_channel(channels - 1, most_ahead)

                for lane in T.unroll(vector):
                    chains[lane] = 0.0
                for step in T.serial(steps):
                    if first + step * stride < items:
                        for lane in T.vectorized(vector):
                            passing[lane] = parked[slot + step, thread, lane]
                        for lane in T.unroll(vector):
                            chains[lane] = chains[lane] + from_origin(passing[lane], origin[0], dtype)
                moments[0] = count
                moments[1] = 0.0
                for lane in T.unroll(vector):
                    moments[1] = moments[1] + chains[lane]
                    chains[lane] = 0.0
                moments[1] = moments[1] / T.max(count, 1.0)
                for step in T.serial(steps):
                    if first + step * stride < items:
                        for lane in T.vectorized(vector):
                            passing[lane] = parked[slot + step, thread, lane]
                        for lane in T.unroll(vector):
                            deviation = from_origin(passing[lane], origin[0], dtype) - moments[1]
                            chains[lane] = chains[lane] + deviation * deviation
                moments[2] = 0.0
                for lane in T.unroll(vector):
                    moments[2] = moments[2] + chains[lane]
                merge_block(moments, sum_slots, square_slots, warps)
                if blocks > 1:
                    tell_peers(moments, mine, peers, turn % 2, rank, warp, blocks, 3)
                    for i in T.unroll(3):
                        moments[i] = 0.0
                    for peer in T.unroll(blocks):
                        merge_moments(
                            moments, peers[turn % 2, peer, 0], peers[turn % 2, peer, 1], peers[turn % 2, peer, 2]
                        )

                scale = T.rsqrt(moments[2] / moments[0] + eps) * affine[0]
                for step in T.serial(steps):
                    if first + step * stride < items:
                        for lane in T.vectorized(vector):
                            passing[lane] = parked[slot + step, thread, lane]
                        at = T.alloc_local((2,), "int32")
                        locate(at, first + step * stride, run_vectors)
                        for lane in T.vectorized(vector):
                            value = from_origin(passing[lane], origin[0], dtype)
                            y[at[0], channel, at[1] * vector + lane] = T.cast(
                                (value - moments[1]) * scale + affine[1], element
                            )
                        if later < c:
                            fetch(
                                parked, slot + step, thread, x, later, first + step * stride, items,
                                run_vectors, vector,
                            )  # fmt: skip
                T.ptx_commit_group()
                slot = T.if_then_else(slot + 2 * steps > channels * steps, 0, slot + steps)
                if (rank == 0) and (thread == 0):
                    keep_statistics(
                        channel, moments[0], origin[0], moments[1], moments[2], kept, eps, momentum, running,
                        mean, invstd, running_mean, running_var,
                    )  # fmt: skip

    return compile_sized_program(main, arch, registers)
