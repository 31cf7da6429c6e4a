# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""Several blocks a channel in two launches: moments of each part, then every block merges and applies.

A part is `chunks` chunks of ``threads * unroll`` vectors of a channel, the last part what is left; `chunks` is an
argument of both launches. Nothing stays on chip between them but what the L2 cache kept, so the second one walks
backwards: it starts with the parts that were read last.
"""

import functools
from collections.abc import Callable
from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.batch_norm.statistics_program import (
    FLOAT32,
    add_moments,
    affine_dtype,
    channel_origin,
    hold,
    keep_statistics,
    read_affine,
    read_running,
    store_held,
)
from tileops.kernels.compiled_program import compile_program, macro, traced
from tileops.kernels.shared_program import (
    WARP,
    block_merge_moments,
    merge_moments,
    tilelang_dtype,
)

__all__ = ["split_apply_program", "split_moments_program"]


@macro
def clear(moments):
    """The moments of an empty sample."""
    for i in T.unroll(3):
        moments[i] = 0.0


@macro
def find_part(place, n, part, part_items, run_vectors: int):
    """``place`` (int32, local, 3) becomes where a part lies: batch index, first vector and end, counted from there.

    Only here do the vectors of a channel count beyond 32 bits.
    """
    start = T.alloc_var("int64")
    start = T.cast(part, "int64") * part_items
    place[0] = T.cast(start // run_vectors, "int32")
    place[1] = T.cast(start % run_vectors, "int32")
    place[2] = place[1] + T.cast(T.min(T.cast(n, "int64") * run_vectors - start, T.cast(part_items, "int64")), "int32")


@functools.cache
def split_moments_program(
    arch: int,
    c: int,
    spatial: int,
    dtype: torch.dtype,
    *,
    vector: int,
    threads: int,
    unroll: int,
    min_blocks: int,
) -> Callable[..., Any]:
    """Compile ``(x, partials, chunks)``: (mean, M2) of each part of each channel into partials (2, c, parts)."""
    element = tilelang_dtype(dtype)
    run_vectors = spatial // vector
    warps = threads // WARP
    n = T.dynamic("n")
    parts = T.dynamic("parts")

    @traced(T.prim_func)
    def main(x: T.Tensor((n, c, spatial), element), partials: T.Tensor((2, c, parts), FLOAT32), chunks: T.int32):
        with T.Kernel(parts * c, threads=threads) as block:
            T.annotate_min_blocks_per_sm(min_blocks)
            thread = T.get_thread_binding()
            # Channels first: blocks that run together read neighbouring memory.
            channel = block % c
            part = block // c
            place = T.alloc_local((3,), "int32")
            first = T.alloc_var("int32")
            chunk = T.alloc_local((unroll, vector), element)
            moments = T.alloc_local((3,), FLOAT32)
            origin = T.alloc_local((1,), FLOAT32)
            slots = T.alloc_shared((warps, 3), FLOAT32)

            find_part(place, n, part, chunks * (threads * unroll), run_vectors)
            first = place[1] + thread
            channel_origin(origin, x, channel, vector, dtype)
            clear(moments)
            for _ in T.serial(chunks):
                hold(x, chunk, channel, place[0], first, threads, place[2], unroll, run_vectors, vector)
                add_moments(moments, chunk, origin, dtype, first, threads, place[2], unroll, vector)
                first = first + threads * unroll
            block_merge_moments(moments, slots, threads)
            if thread == 0:
                partials[0, channel, part] = moments[1]
                partials[1, channel, part] = moments[2]

    return compile_program(main, arch)


@functools.cache
def split_apply_program(
    arch: int,
    c: int,
    spatial: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    running: bool,
    *,
    vector: int,
    threads: int,
    unroll: int,
    min_blocks: int,
) -> Callable[..., Any]:
    """Compile ``(x, partials, chunks, running_mean, running_var, weight, bias, y, mean, invstd, eps, momentum)``."""
    element = tilelang_dtype(dtype)
    run_vectors = spatial // vector
    warps = threads // WARP
    n = T.dynamic("n")
    parts = T.dynamic("parts")

    @traced(T.prim_func)
    def main(
        x: T.Tensor((n, c, spatial), element),
        partials: T.Tensor((2, c, parts), FLOAT32),
        chunks: T.int32,
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
        with T.Kernel(parts * c, threads=threads) as block:
            T.annotate_min_blocks_per_sm(min_blocks)
            thread = T.get_thread_binding()
            channel = c - 1 - block % c
            part = parts - 1 - block // c
            part_items = chunks * (threads * unroll)
            place = T.alloc_local((3,), "int32")
            first = T.alloc_var("int32")
            left = T.alloc_var("int64")
            chunk = T.alloc_local((unroll, vector), element)
            affine = T.alloc_local((2,), FLOAT32)
            kept = T.alloc_local((2,), FLOAT32)
            moments = T.alloc_local((3,), FLOAT32)
            origin = T.alloc_local((1,), FLOAT32)
            slots = T.alloc_shared((warps, 3), FLOAT32)

            find_part(place, n, part, part_items, run_vectors)
            first = place[1] + thread + threads * unroll * (chunks - 1)
            # Under way while the moments are merged.
            hold(x, chunk, channel, place[0], first, threads, place[2], unroll, run_vectors, vector)
            channel_origin(origin, x, channel, vector, dtype)
            read_affine(affine, channel, weight, bias, weight_dtype is not None, bias_dtype is not None)
            read_running(kept, channel, running_mean, running_var, running)
            clear(moments)
            for round_ in T.serial(T.ceildiv(parts, threads)):
                other = round_ * threads + thread
                if other < parts:
                    left = T.cast(n, "int64") * run_vectors - T.cast(other, "int64") * part_items
                    merge_moments(
                        moments,
                        T.cast(T.min(left, T.cast(part_items, "int64")), FLOAT32) * vector,
                        partials[0, channel, other],
                        partials[1, channel, other],
                    )
            block_merge_moments(moments, slots, threads)

            scale = T.alloc_var(FLOAT32)
            scale = T.rsqrt(moments[2] / moments[0] + eps) * affine[0]
            for round_ in T.serial(chunks):
                store_held(
                    y, chunk, origin, dtype, channel, moments[1], scale, affine[1], place[0], first, threads, place[2],
                    unroll, run_vectors, vector,
                )  # fmt: skip
                first = first - threads * unroll
                if round_ + 1 < chunks:
                    hold(x, chunk, channel, place[0], first, threads, place[2], unroll, run_vectors, vector)
            if (part == 0) and (thread == 0):
                keep_statistics(
                    channel, moments[0], origin[0], moments[1], moments[2], kept, eps, momentum, running,
                    mean, invstd, running_mean, running_var,
                )  # fmt: skip

    return compile_program(main, arch)
