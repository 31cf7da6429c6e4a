# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""Several blocks a channel in two launches: moments of each part, then every block merges and applies.

Nothing stays on chip between the launches but what the L2 cache kept, so the second one walks backwards: it
starts with the parts that were read last.
"""

from collections.abc import Callable
from typing import Any

import tilelang.language as T
import torch

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
from tileops.kernels.shared_program import WARP, block_merge_moments, compile_program, merge_moments, tilelang_dtype

__all__ = ["split_apply_program", "split_moments_program"]


@T.macro
def clear(moments):
    """The moments of an empty sample."""
    for i in T.unroll(3):
        moments[i] = 0.0


def split_moments_program(
    arch: int,
    c: int,
    spatial: int,
    dtype: torch.dtype,
    *,
    vector: int,
    threads: int,
    unroll: int,
    chunks: int,
    counter: str,
    min_blocks: int,
) -> Callable[..., Any]:
    """Compile ``(x, partials)``: (mean, M2) of each part of each channel into partials (2, c, parts).

    A part is ``threads * unroll * chunks`` vectors of a channel, the last one what is left.
    """
    element = tilelang_dtype(dtype)
    run_vectors = spatial // vector
    warps = threads // WARP
    n = T.dynamic("n")
    parts = T.dynamic("parts")

    @T.prim_func
    def main(x: T.Tensor((n, c, spatial), element), partials: T.Tensor((2, c, parts), FLOAT32)):
        with T.Kernel(parts * c, threads=threads) as block:
            T.annotate_min_blocks_per_sm(min_blocks)
            thread = T.get_thread_binding()
            # Channels first: blocks that run together read neighbouring memory.
            channel = block % c
            part = block // c
            items = T.alloc_var(counter)
            items = T.cast(n, counter) * run_vectors
            first = T.alloc_var(counter)
            first = T.cast(part, counter) * (threads * unroll * chunks) + thread
            chunk = T.alloc_local((unroll, vector), element)
            sums = T.alloc_local((2,), FLOAT32)
            squares = T.alloc_local((1,), FLOAT32)
            moments = T.alloc_local((3,), FLOAT32)
            origin = T.alloc_local((1,), FLOAT32)
            slots = T.alloc_shared((warps, 3), FLOAT32)

            channel_origin(origin, x, channel, vector, dtype)
            clear(moments)
            for _ in T.serial(chunks):
                hold(x, chunk, channel, first, threads, items, unroll, run_vectors, vector, counter)
                sums[0] = 0.0
                sums[1] = 0.0
                held_sum(sums, chunk, origin, dtype, first, threads, items, unroll, vector)
                sums[0] = sums[0] / T.max(sums[1], 1.0)
                squares[0] = 0.0
                held_square_sum(squares, chunk, origin, dtype, sums[0], first, threads, items, unroll, vector)
                merge_moments(moments, sums[1], sums[0], squares[0])
                first = first + threads * unroll
            block_merge_moments(moments, slots, threads)
            if thread == 0:
                partials[0, channel, part] = moments[1]
                partials[1, channel, part] = moments[2]

    return compile_program(main, arch)


def split_apply_program(
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
    threads: int,
    unroll: int,
    chunks: int,
    counter: str,
    min_blocks: int,
) -> Callable[..., Any]:
    """Compile ``(x, partials, running_mean, running_var, weight, bias, y, mean, invstd)``."""
    element = tilelang_dtype(dtype)
    run_vectors = spatial // vector
    part_items = threads * unroll * chunks
    warps = threads // WARP
    n = T.dynamic("n")
    parts = T.dynamic("parts")

    @T.prim_func
    def main(
        x: T.Tensor((n, c, spatial), element),
        partials: T.Tensor((2, c, parts), FLOAT32),
        running_mean: T.Tensor((c,), FLOAT32),
        running_var: T.Tensor((c,), FLOAT32),
        weight: T.Tensor((c,), affine_dtype(weight_dtype)),
        bias: T.Tensor((c,), affine_dtype(bias_dtype)),
        y: T.Tensor((n, c, spatial), element),
        mean: T.Tensor((c,), FLOAT32),
        invstd: T.Tensor((c,), FLOAT32),
    ):
        with T.Kernel(parts * c, threads=threads) as block:
            T.annotate_min_blocks_per_sm(min_blocks)
            thread = T.get_thread_binding()
            channel = c - 1 - block % c
            part = parts - 1 - block // c
            items = T.alloc_var(counter)
            items = T.cast(n, counter) * run_vectors
            first = T.alloc_var(counter)
            first = T.cast(part, counter) * part_items + thread + threads * unroll * (chunks - 1)
            left = T.alloc_var(counter)
            chunk = T.alloc_local((unroll, vector), element)
            affine = T.alloc_local((2,), FLOAT32)
            moments = T.alloc_local((3,), FLOAT32)
            origin = T.alloc_local((1,), FLOAT32)
            slots = T.alloc_shared((warps, 3), FLOAT32)

            channel_origin(origin, x, channel, vector, dtype)
            read_affine(affine, channel, weight, bias, weight_dtype is not None, bias_dtype is not None)
            clear(moments)
            for round_ in T.serial(T.ceildiv(parts, threads)):
                other = round_ * threads + thread
                if other < parts:
                    left = items - T.cast(other, counter) * part_items
                    merge_moments(
                        moments,
                        T.cast(T.min(left, part_items), FLOAT32) * vector,
                        partials[0, channel, other],
                        partials[1, channel, other],
                    )
            block_merge_moments(moments, slots, threads)

            scale = T.alloc_var(FLOAT32)
            scale = T.rsqrt(moments[2] / moments[0] + eps) * affine[0]
            for _ in T.serial(chunks):
                hold(x, chunk, channel, first, threads, items, unroll, run_vectors, vector, counter)
                store_held(
                    y, chunk, origin, dtype, channel, moments[1], scale, affine[1], first, threads, items,
                    unroll, run_vectors, vector, counter,
                )  # fmt: skip
                first = first - threads * unroll
            if (part == 0) and (thread == 0):
                keep_statistics(
                    channel, moments[0], origin[0], moments[1], moments[2], eps, momentum, running,
                    mean, invstd, running_mean, running_var,
                )  # fmt: skip

    return compile_program(main, arch)
