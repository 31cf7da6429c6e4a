# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""Several blocks a tile of columns in two launches: moments of each part, then every block merges and applies.

A part is `chunks` chunks of ``down * unroll`` rows, the last part what is left; `chunks` is an argument of both
launches. The second one walks backwards: it begins with what the L2 cache got last.
"""

import functools
from collections.abc import Callable
from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.batch_norm.column_program import (
    channel_totals,
    column_origins,
    read_rows,
    read_table,
    row_square_sums,
    row_sums,
    settle_channel,
    write_rows,
)
from tileops.kernels.batch_norm.statistics_program import FLOAT32, affine_dtype, read_affine, read_running
from tileops.kernels.compiled_program import compile_program, traced
from tileops.kernels.shared_program import (
    WARP,
    merge_moments,
    tilelang_dtype,
)

__all__ = ["split_column_apply_program", "split_column_moments_program"]

MOST_READERS = 16
"""Threads that share the parts of a channel; one of them then merges what they have, one after the other."""


@functools.cache
def split_column_moments_program(
    arch: int,
    c: int,
    run: int,
    dtype: torch.dtype,
    *,
    vector: int,
    across: int,
    threads: int,
    unroll: int,
    min_blocks: int,
) -> Callable[..., Any]:
    """Compile ``(x, partials, chunks)``: (mean, M2) of each channel in each part into partials (2, parts, c)."""
    element = tilelang_dtype(dtype)
    vectors = c * run // vector
    channels = across * vector // run
    tiles = -(-vectors // across)
    down = threads // across
    rows = T.dynamic("rows", "int64")
    parts = T.dynamic("parts")

    @traced(T.prim_func)
    def main(x: T.Tensor((rows, c * run), element), partials: T.Tensor((2, parts, c), FLOAT32), chunks: T.int32):
        with T.Kernel(parts * tiles, threads=threads) as block:
            T.annotate_min_blocks_per_sm(min_blocks)
            thread = T.get_thread_binding()
            # Tiles first: blocks that run together read whole rows.
            tile = block % tiles
            part = block // tiles
            column = tile * across + thread % across
            row = T.alloc_var("int32")
            left = T.alloc_var("int32")
            limit = T.alloc_var("int32")
            chunk = T.alloc_local((unroll, vector), element)
            values = T.alloc_local((vector,), FLOAT32)
            origin = T.alloc_local((vector,), FLOAT32)
            centre = T.alloc_local((vector,), FLOAT32)
            means = T.alloc_local((vector,), FLOAT32)
            squares = T.alloc_local((vector,), FLOAT32)
            count = T.alloc_local((2,), FLOAT32)
            share = T.alloc_local((1,), FLOAT32)
            slots = T.alloc_shared((down, channels * run + 1), FLOAT32)
            totals = T.alloc_shared((channels,), FLOAT32)
            part_rows = chunks * (down * unroll)
            base = T.cast(part, "int64") * part_rows

            column_origins(origin, x, column, c * run, run, vector, dtype)
            count[0] = 0.0
            for lane in T.unroll(vector):
                means[lane] = 0.0
                squares[lane] = 0.0
            left = T.cast(T.min(rows - base, T.cast(part_rows, "int64")), "int32")
            limit = T.if_then_else((column < vectors) and (thread // across < down), left, 0)
            row = thread // across
            for _ in T.serial(chunks):
                read_rows(x, chunk, base, row, limit, column, down, unroll, vector)
                count[1] = 0.0
                for step in T.unroll(unroll):
                    if row + step * down < limit:
                        count[1] = count[1] + 1.0
                row_sums(values, chunk, origin, dtype, row, limit, down, unroll, vector)
                for lane in T.unroll(vector):
                    centre[lane] = values[lane] / T.max(count[1], 1.0)
                row_square_sums(values, chunk, origin, dtype, centre, row, limit, down, unroll, vector)
                # Chan's rule, with one division for all lanes.
                share[0] = count[1] / T.max(count[0] + count[1], 1.0)
                for lane in T.unroll(vector):
                    delta = centre[lane] - means[lane]
                    squares[lane] = squares[lane] + values[lane] + delta * (count[0] * share[0]) * delta
                    means[lane] = means[lane] + delta * share[0]
                count[0] = count[0] + count[1]
                row = row + down * unroll

            for lane in T.unroll(vector):
                values[lane] = means[lane] * count[0]
            channel_totals(values, slots, totals, thread, across, down, run, channels, vector, threads // WARP)
            for lane in T.unroll(vector):
                centre[lane] = totals[(thread % across * vector + lane) // run] / (T.cast(left, FLOAT32) * run)
                values[lane] = squares[lane] + (means[lane] - centre[lane]) * count[0] * (means[lane] - centre[lane])
            channel_totals(values, slots, totals, thread, across, down, run, channels, vector, threads // WARP)
            for lane in T.unroll(vector):
                if ((column * vector + lane) % run == 0) and (thread // across == 0) and (column < vectors):
                    channel = (column * vector + lane) // run
                    partials[0, part, channel] = centre[lane]
                    partials[1, part, channel] = totals[(thread % across * vector + lane) // run]

    return compile_program(main, arch)


@functools.cache
def split_column_apply_program(
    arch: int,
    c: int,
    run: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    running: bool,
    *,
    vector: int,
    across: int,
    threads: int,
    unroll: int,
    min_blocks: int,
) -> Callable[..., Any]:
    """Compile ``(x, partials, chunks, running_mean, running_var, weight, bias, y, mean, invstd, eps, momentum)``."""
    element = tilelang_dtype(dtype)
    vectors = c * run // vector
    channels = across * vector // run
    tiles = -(-vectors // across)
    down = threads // across
    readers = min(threads // channels, MOST_READERS)  # threads that share the parts of a channel
    rows = T.dynamic("rows", "int64")
    parts = T.dynamic("parts")

    @traced(T.prim_func)
    def main(
        x: T.Tensor((rows, c * run), element),
        partials: T.Tensor((2, parts, c), FLOAT32),
        chunks: T.int32,
        running_mean: T.Tensor((c,), FLOAT32),
        running_var: T.Tensor((c,), FLOAT32),
        weight: T.Tensor((c,), affine_dtype(weight_dtype)),
        bias: T.Tensor((c,), affine_dtype(bias_dtype)),
        y: T.Tensor((rows, c * run), element),
        mean: T.Tensor((c,), FLOAT32),
        invstd: T.Tensor((c,), FLOAT32),
        eps: T.float32,
        momentum: T.float32,
    ):
        with T.Kernel(parts * tiles, threads=threads) as block:
            T.annotate_min_blocks_per_sm(min_blocks)
            thread = T.get_thread_binding()
            tile = tiles - 1 - block % tiles
            part = parts - 1 - block // tiles
            column = tile * across + thread % across
            row = T.alloc_var("int32")
            limit = T.alloc_var("int32")
            left = T.alloc_var("int64")
            chunk = T.alloc_local((unroll, vector), element)
            origin = T.alloc_local((vector,), FLOAT32)
            centre = T.alloc_local((vector,), FLOAT32)
            scale = T.alloc_local((vector,), FLOAT32)
            shift = T.alloc_local((vector,), FLOAT32)
            affine = T.alloc_local((2,), FLOAT32)
            kept = T.alloc_local((2,), FLOAT32)
            moments = T.alloc_local((3,), FLOAT32)
            slots = T.alloc_shared((readers, channels, 3), FLOAT32)
            table = T.alloc_shared((3, channels), FLOAT32)  # centre, scale, shift
            part_rows = chunks * (down * unroll)
            base = T.cast(part, "int64") * part_rows

            left = T.min(rows - base, T.cast(part_rows, "int64"))
            limit = T.if_then_else((column < vectors) and (thread // across < down), T.cast(left, "int32"), 0)
            row = thread // across + down * unroll * (chunks - 1)
            # Under way while the moments are merged.
            read_rows(x, chunk, base, row, limit, column, down, unroll, vector)

            # Each channel's parts, by `readers` threads in turns, then their results in order.
            place = thread % channels
            reader = thread // channels
            channel = tile * channels + place
            settles = (thread < channels) and (channel < c)
            if settles:
                read_affine(affine, channel, weight, bias, weight_dtype is not None, bias_dtype is not None)
                read_running(kept, channel, running_mean, running_var, running)
            for i in T.unroll(3):
                moments[i] = 0.0
            if (reader < readers) and (channel < c):
                for round_ in T.serial(T.ceildiv(parts - reader, readers)):
                    other = round_ * readers + reader
                    left = T.min(rows - T.cast(other, "int64") * part_rows, T.cast(part_rows, "int64"))
                    merge_moments(
                        moments,
                        T.cast(left, FLOAT32) * run,
                        partials[0, other, channel],
                        partials[1, other, channel],
                    )
            if reader < readers:
                for i in T.unroll(3):
                    slots[reader, place, i] = moments[i]
            T.sync_threads()
            if settles:
                for other in T.unroll(1, readers):
                    merge_moments(moments, slots[other, place, 0], slots[other, place, 1], slots[other, place, 2])
                settle_channel(
                    table, place, x, channel, moments, affine, kept, part == 0, run, dtype,
                    eps, momentum, running, mean, invstd, running_mean, running_var,
                )  # fmt: skip
            T.sync_threads()
            read_table(centre, scale, shift, table, thread, across, run, vector)
            column_origins(origin, x, column, c * run, run, vector, dtype)
            for round_ in T.serial(chunks):
                write_rows(
                    y, chunk, origin, dtype, base, row, limit, column, down, unroll, vector, centre, scale, shift
                )
                row = row - down * unroll
                if round_ + 1 < chunks:
                    read_rows(x, chunk, base, row, limit, column, down, unroll, vector)

    return compile_program(main, arch)
