# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""Batch norm of a matrix whose columns belong to channels: ``run`` neighbouring columns to each.

A block takes a tile of whole channels: its threads lie ``across`` vectors wide and ``down`` rows high, each with
moments of its own for every lane of its vector. Sums over the tile's rows and over a channel's columns go through
shared memory, one warp a channel.
"""

from collections.abc import Callable
from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.batch_norm.statistics_program import FLOAT32, affine_dtype, keep_statistics, read_affine
from tileops.kernels.shared_program import (
    WARP,
    compile_program,
    from_origin,
    group_sum,
    merge_moments,
    tilelang_dtype,
)

__all__ = ["column_apply_program", "column_held_program", "column_moments_program"]

MOST_READERS = 16
"""Threads that share the parts of a channel; one of them then merges what they have, one after the other."""


@T.macro
def read_rows(x, held, row, rows, column, stride: int, steps: int, vector: int):
    """Read rows ``row``, ``row + stride``, ... below ``rows`` of a column of vectors into ``held``."""
    for step in T.unroll(steps):
        if row + step * stride < rows:
            for lane in T.vectorized(vector):
                held[step, lane] = x[row + step * stride, column * vector + lane]


@T.macro
def write_rows(
    y, held, origin, dtype: torch.dtype, row, rows, column, stride: int, steps: int, vector: int,
    centre, scale, shift,
):  # fmt: skip
    """Write ``(value - centre) * scale + shift``, lane by lane, for the rows that ``read_rows`` read."""
    for step in T.unroll(steps):
        if row + step * stride < rows:
            for lane in T.vectorized(vector):
                value = from_origin(held[step, lane], origin[lane], dtype)
                y[row + step * stride, column * vector + lane] = T.cast(
                    (value - centre[lane]) * scale[lane] + shift[lane], tilelang_dtype(dtype)
                )


@T.macro
def column_origins(origin, x, column, columns: int, run: int, vector: int, dtype: torch.dtype):
    """``origin`` (float32, local, vector) becomes the first value of each lane's channel, in 16 bits 0.

    Values are distances from it; see ``from_origin``. The lanes past the last column take the last channel's.
    """
    for lane in T.unroll(vector):
        origin[lane] = 0.0
        if dtype is torch.float32:
            origin[lane] = x[0, T.min(column * vector + lane, columns - 1) // run * run]


@T.macro
def row_sums(values, held, origin, dtype: torch.dtype, row, rows, stride: int, steps: int, vector: int):
    """``values`` (float32, local) becomes each lane's sum of the rows held."""
    for lane in T.unroll(vector):
        values[lane] = 0.0
    for step in T.unroll(steps):
        if row + step * stride < rows:
            for lane in T.unroll(vector):
                values[lane] = values[lane] + from_origin(held[step, lane], origin[lane], dtype)


@T.macro
def row_square_sums(values, held, origin, dtype: torch.dtype, centre, row, rows, stride: int, steps: int, vector: int):
    """``values`` (float32, local) becomes each lane's sum of squared deviations from ``centre[lane]``."""
    for lane in T.unroll(vector):
        values[lane] = 0.0
    for step in T.unroll(steps):
        if row + step * stride < rows:
            for lane in T.unroll(vector):
                deviation = from_origin(held[step, lane], origin[lane], dtype) - centre[lane]
                values[lane] = values[lane] + deviation * deviation


@T.macro
def channel_totals(
    values, slots, totals, thread, x_place, y_place, down: int, run: int, channels: int, vector: int, warps: int
):
    """``totals`` (float32, shared, channels) becomes the sums of ``values`` over each channel of the tile.

    ``slots`` is shared float32 of shape (down, channels * run + 1); the odd row length spreads a column over the
    banks. Both may be used again: a barrier lies between any read here and the next call's write.
    """
    total = T.alloc_local((1,), FLOAT32)
    if y_place < down:
        for lane in T.unroll(vector):
            slots[y_place, x_place * vector + lane] = values[lane]
    T.sync_threads()
    for round_ in T.unroll(-(-channels // warps)):
        channel = round_ * warps + thread // WARP
        total[0] = 0.0
        if channel < channels:
            for i in T.unroll(-(-down * run // WARP)):
                place = i * WARP + thread % WARP
                if place < down * run:
                    total[0] = total[0] + slots[place // run, channel * run + place % run]
        group_sum(total, 1, WARP)
        if (thread % WARP == 0) and (channel < channels):
            totals[channel] = total[0]
    T.sync_threads()


def column_held_program(
    arch: int,
    c: int,
    run: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    running: bool,
    eps: float,
    momentum: float,
    *,
    vector: int,
    across: int,
    down: int,
    threads: int,
    steps: int,
    min_blocks: int,
) -> Callable[..., Any]:
    """Compile ``(x, running_mean, running_var, weight, bias, y, mean, invstd)``, x and y as (rows, c * run).

    Serves up to ``down * steps`` rows: one block holds its whole tile.
    """
    element = tilelang_dtype(dtype)
    vectors = c * run // vector
    channels = across * vector // run
    warps = threads // WARP
    rows = T.dynamic("rows")

    @T.prim_func
    def main(
        x: T.Tensor((rows, c * run), element),
        running_mean: T.Tensor((c,), FLOAT32),
        running_var: T.Tensor((c,), FLOAT32),
        weight: T.Tensor((c,), affine_dtype(weight_dtype)),
        bias: T.Tensor((c,), affine_dtype(bias_dtype)),
        y: T.Tensor((rows, c * run), element),
        mean: T.Tensor((c,), FLOAT32),
        invstd: T.Tensor((c,), FLOAT32),
    ):
        with T.Kernel(-(-vectors // across), threads=threads) as tile:
            T.annotate_min_blocks_per_sm(min_blocks)
            thread = T.get_thread_binding()
            x_place = thread % across
            y_place = thread // across
            column = tile * across + x_place
            limit = T.alloc_var("int32")
            limit = T.if_then_else((column < vectors) and (y_place < down), rows, 0)
            held = T.alloc_local((steps, vector), element)
            values = T.alloc_local((vector,), FLOAT32)
            origin = T.alloc_local((vector,), FLOAT32)
            centre = T.alloc_local((vector,), FLOAT32)
            scale = T.alloc_local((vector,), FLOAT32)
            shift = T.alloc_local((vector,), FLOAT32)
            affine = T.alloc_local((2,), FLOAT32)
            slots = T.alloc_shared((down, channels * run + 1), FLOAT32)
            totals = T.alloc_shared((channels,), FLOAT32)
            count = T.cast(rows, FLOAT32) * run

            read_rows(x, held, y_place, limit, column, down, steps, vector)
            column_origins(origin, x, column, c * run, run, vector, dtype)
            row_sums(values, held, origin, dtype, y_place, limit, down, steps, vector)
            channel_totals(values, slots, totals, thread, x_place, y_place, down, run, channels, vector, warps)
            for lane in T.unroll(vector):
                centre[lane] = totals[(x_place * vector + lane) // run] / count
            row_square_sums(values, held, origin, dtype, centre, y_place, limit, down, steps, vector)
            channel_totals(values, slots, totals, thread, x_place, y_place, down, run, channels, vector, warps)
            for lane in T.unroll(vector):
                scale[lane] = T.rsqrt(totals[(x_place * vector + lane) // run] / count + eps)
                # The lanes past the last column work on the last channel, and write nothing.
                channel = T.min((column * vector + lane) // run, c - 1)
                if ((column * vector + lane) % run == 0) and (y_place == 0) and (column < vectors):
                    keep_statistics(
                        channel, count, origin[lane], centre[lane], totals[(x_place * vector + lane) // run], eps, momentum,
                        running, mean, invstd, running_mean, running_var,
                    )  # fmt: skip
                read_affine(affine, channel, weight, bias, weight_dtype is not None, bias_dtype is not None)
                scale[lane] = scale[lane] * affine[0]
                shift[lane] = affine[1]
            write_rows(y, held, origin, dtype, y_place, limit, column, down, steps, vector, centre, scale, shift)

    return compile_program(main, arch)


def column_moments_program(
    arch: int,
    c: int,
    run: int,
    dtype: torch.dtype,
    *,
    vector: int,
    across: int,
    down: int,
    threads: int,
    unroll: int,
    chunks: int,
    counter: str,
    min_blocks: int,
) -> Callable[..., Any]:
    """Compile ``(x, partials)``: (mean, M2) of each channel in each part of the rows into partials (2, parts, c).

    A part is ``down * unroll * chunks`` rows, the last one what is left.
    """
    element = tilelang_dtype(dtype)
    vectors = c * run // vector
    channels = across * vector // run
    tiles = -(-vectors // across)
    warps = threads // WARP
    part_rows = down * unroll * chunks
    rows = T.dynamic("rows", counter)
    parts = T.dynamic("parts")

    @T.prim_func
    def main(x: T.Tensor((rows, c * run), element), partials: T.Tensor((2, parts, c), FLOAT32)):
        with T.Kernel(parts * tiles, threads=threads) as block:
            T.annotate_min_blocks_per_sm(min_blocks)
            thread = T.get_thread_binding()
            x_place = thread % across
            y_place = thread // across
            # Tiles first: blocks that run together read whole rows.
            tile = block % tiles
            part = block // tiles
            column = tile * across + x_place
            limit = T.alloc_var(counter)
            limit = T.if_then_else((column < vectors) and (y_place < down), rows, T.cast(0, counter))
            row = T.alloc_var(counter)
            row = T.cast(part, counter) * part_rows + y_place
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

            column_origins(origin, x, column, c * run, run, vector, dtype)
            count[0] = 0.0
            for lane in T.unroll(vector):
                means[lane] = 0.0
                squares[lane] = 0.0
            for _ in T.serial(chunks):
                read_rows(x, chunk, row, limit, column, down, unroll, vector)
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
            channel_totals(values, slots, totals, thread, x_place, y_place, down, run, channels, vector, warps)
            row = T.cast(part, counter) * part_rows
            whole = T.cast(T.min(rows - row, T.cast(part_rows, counter)), FLOAT32) * run
            for lane in T.unroll(vector):
                centre[lane] = totals[(x_place * vector + lane) // run] / whole
                values[lane] = squares[lane] + (means[lane] - centre[lane]) * count[0] * (means[lane] - centre[lane])
            channel_totals(values, slots, totals, thread, x_place, y_place, down, run, channels, vector, warps)
            for lane in T.unroll(vector):
                if ((column * vector + lane) % run == 0) and (y_place == 0) and (column < vectors):
                    channel = (column * vector + lane) // run
                    partials[0, part, channel] = centre[lane]
                    partials[1, part, channel] = totals[(x_place * vector + lane) // run]

    return compile_program(main, arch)


def column_apply_program(
    arch: int,
    c: int,
    run: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    running: bool,
    eps: float,
    momentum: float,
    *,
    vector: int,
    across: int,
    down: int,
    threads: int,
    unroll: int,
    chunks: int,
    counter: str,
    min_blocks: int,
) -> Callable[..., Any]:
    """Compile ``(x, partials, running_mean, running_var, weight, bias, y, mean, invstd)``.

    The parts are walked backwards, so that the second read begins with what the L2 cache got last.
    """
    element = tilelang_dtype(dtype)
    vectors = c * run // vector
    channels = across * vector // run
    tiles = -(-vectors // across)
    part_rows = down * unroll * chunks
    readers = min(threads // channels, MOST_READERS)  # threads that share the parts of a channel
    rows = T.dynamic("rows", counter)
    parts = T.dynamic("parts")

    @T.prim_func
    def main(
        x: T.Tensor((rows, c * run), element),
        partials: T.Tensor((2, parts, c), FLOAT32),
        running_mean: T.Tensor((c,), FLOAT32),
        running_var: T.Tensor((c,), FLOAT32),
        weight: T.Tensor((c,), affine_dtype(weight_dtype)),
        bias: T.Tensor((c,), affine_dtype(bias_dtype)),
        y: T.Tensor((rows, c * run), element),
        mean: T.Tensor((c,), FLOAT32),
        invstd: T.Tensor((c,), FLOAT32),
    ):
        with T.Kernel(parts * tiles, threads=threads) as block:
            T.annotate_min_blocks_per_sm(min_blocks)
            thread = T.get_thread_binding()
            x_place = thread % across
            y_place = thread // across
            tile = tiles - 1 - block % tiles
            part = parts - 1 - block // tiles
            column = tile * across + x_place
            limit = T.alloc_var(counter)
            limit = T.if_then_else((column < vectors) and (y_place < down), rows, T.cast(0, counter))
            row = T.alloc_var(counter)
            chunk = T.alloc_local((unroll, vector), element)
            origin = T.alloc_local((vector,), FLOAT32)
            centre = T.alloc_local((vector,), FLOAT32)
            scale = T.alloc_local((vector,), FLOAT32)
            shift = T.alloc_local((vector,), FLOAT32)
            affine = T.alloc_local((2,), FLOAT32)
            moments = T.alloc_local((3,), FLOAT32)
            mine = T.alloc_local((1,), FLOAT32)
            slots = T.alloc_shared((readers, channels, 3), FLOAT32)
            table = T.alloc_shared((3, channels), FLOAT32)  # centre, scale, shift

            # Each channel's parts, by `readers` threads in turns, then their results in order.
            place = thread % channels
            reader = thread // channels
            channel = tile * channels + place
            for i in T.unroll(3):
                moments[i] = 0.0
            if (reader < readers) and (channel < c):
                for round_ in T.serial(T.ceildiv(parts - reader, readers)):
                    other = round_ * readers + reader
                    row = rows - T.cast(other, counter) * part_rows
                    merge_moments(
                        moments,
                        T.cast(T.min(row, T.cast(part_rows, counter)), FLOAT32) * run,
                        partials[0, other, channel],
                        partials[1, other, channel],
                    )
            if reader < readers:
                for i in T.unroll(3):
                    slots[reader, place, i] = moments[i]
            T.sync_threads()
            if (thread < channels) and (channel < c):
                for other in T.unroll(1, readers):
                    merge_moments(moments, slots[other, place, 0], slots[other, place, 1], slots[other, place, 2])
                read_affine(affine, channel, weight, bias, weight_dtype is not None, bias_dtype is not None)
                table[0, place] = moments[1]
                table[1, place] = T.rsqrt(moments[2] / moments[0] + eps) * affine[0]
                table[2, place] = affine[1]
                if part == 0:
                    mine[0] = 0.0
                    if dtype is torch.float32:
                        mine[0] = x[0, channel * run]
                    keep_statistics(
                        channel, moments[0], mine[0], moments[1], moments[2], eps, momentum, running,
                        mean, invstd, running_mean, running_var,
                    )  # fmt: skip
            T.sync_threads()
            for lane in T.unroll(vector):
                centre[lane] = table[0, (x_place * vector + lane) // run]
                scale[lane] = table[1, (x_place * vector + lane) // run]
                shift[lane] = table[2, (x_place * vector + lane) // run]

            column_origins(origin, x, column, c * run, run, vector, dtype)
            row = T.cast(part, counter) * part_rows + y_place + down * unroll * (chunks - 1)
            for _ in T.serial(chunks):
                read_rows(x, chunk, row, limit, column, down, unroll, vector)
                write_rows(y, chunk, origin, dtype, row, limit, column, down, unroll, vector, centre, scale, shift)
                row = row - down * unroll

    return compile_program(main, arch)
