# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""What the column programs share: a tile of whole channels of a matrix, ``run`` neighbouring columns to each.

A block takes a tile: its threads lie ``across`` vectors wide and ``down`` rows high, each with moments of its own for
every lane of its vector. Sums over the tile's rows and over a channel's columns go through shared memory, one warp a
channel.
"""

import tilelang.language as T
import torch

from tileops.kernels.batch_norm.statistics_program import FLOAT32, keep_statistics
from tileops.kernels.compiled_program import macro
from tileops.kernels.shared_program import WARP, from_origin, group_sum, tilelang_dtype

__all__ = [
    "channel_totals",
    "column_origins",
    "lane_statistic",
    "read_rows",
    "read_table",
    "row_square_sums",
    "row_sums",
    "settle_channel",
    "write_rows",
]


@macro
def read_rows(x, held, base, row, rows, column, stride, steps: int, vector: int):
    """Read rows ``row``, ``row + stride``, ... below ``rows`` of a column of vectors into ``held``.

    They are counted from the row ``base`` on: a matrix may have more than 32 bits count, a part has not.
    """
    for step in T.unroll(steps):
        if row + step * stride < rows:
            for lane in T.vectorized(vector):
                held[step, lane] = x[base + row + step * stride, column * vector + lane]


@macro
def write_rows(
    y, held, origin, dtype: torch.dtype, base, row, rows, column, stride, steps: int, vector: int,
    centre, scale, shift,
):  # fmt: skip
    """Write ``(value - centre) * scale + shift``, lane by lane, for the rows that ``read_rows`` read."""
    for step in T.unroll(steps):
        if row + step * stride < rows:
            for lane in T.vectorized(vector):
                value = from_origin(held[step, lane], origin[lane], dtype)
                y[base + row + step * stride, column * vector + lane] = T.cast(
                    (value - centre[lane]) * scale[lane] + shift[lane], tilelang_dtype(dtype)
                )


@macro
def column_origins(origin, x, column, columns: int, run: int, vector: int, dtype: torch.dtype):
    """``origin`` (float32, local, vector) becomes the first value of each lane's channel, in 16 bits 0.

    Values are distances from it; see ``from_origin``. The lanes past the last column take the last channel's.
    """
    for lane in T.unroll(vector):
        origin[lane] = 0.0
        if dtype is torch.float32:
            origin[lane] = x[0, T.min(column * vector + lane, columns - 1) // run * run]


@macro
def lane_statistic(lanes, statistic, column, c: int, run: int, vector: int):
    """``lanes`` (float32, local, vector) becomes the ``statistic`` of each lane's channel in a column of vectors.

    The lanes past the last column take one of the last channels'.
    """
    quad = min(vector, 4)
    own = T.alloc_local((vector,), statistic.dtype)
    if run == 1:
        start = T.min(column, c // vector - 1) * vector
        for at in T.unroll(vector // quad):
            for lane in T.vectorized(quad):
                own[at * quad + lane] = statistic[start + at * quad + lane]
        for lane in T.unroll(vector):
            lanes[lane] = T.cast(own[lane], FLOAT32)
    else:
        for lane in T.unroll(vector):
            lanes[lane] = T.cast(statistic[T.min((column * vector + lane) // run, c - 1)], FLOAT32)


@macro
def row_sums(values, held, origin, dtype: torch.dtype, row, rows, stride, steps: int, vector: int):
    """``values`` (float32, local) becomes each lane's sum of the rows held."""
    for lane in T.unroll(vector):
        values[lane] = 0.0
    for step in T.unroll(steps):
        if row + step * stride < rows:
            for lane in T.unroll(vector):
                values[lane] = values[lane] + from_origin(held[step, lane], origin[lane], dtype)


@macro
def row_square_sums(values, held, origin, dtype: torch.dtype, centre, row, rows, stride, steps: int, vector: int):
    """``values`` (float32, local) becomes each lane's sum of squared deviations from ``centre[lane]``."""
    for lane in T.unroll(vector):
        values[lane] = 0.0
    for step in T.unroll(steps):
        if row + step * stride < rows:
            for lane in T.unroll(vector):
                deviation = from_origin(held[step, lane], origin[lane], dtype) - centre[lane]
                values[lane] = values[lane] + deviation * deviation


@macro
def channel_totals(values, slots, totals, thread, across: int, down, run: int, channels: int, vector: int, warps):
    """``totals`` (float32, shared, channels) becomes the sums of ``values`` over each channel of the tile.

    ``slots`` is shared float32 of at least ``down`` rows of ``channels * run + 1``; the odd length spreads a column
    over the banks. Both may be used again: a barrier lies between any read here and the next call's write.
    """
    total = T.alloc_local((1,), FLOAT32)
    if thread // across < down:
        for lane in T.unroll(vector):
            slots[thread // across, thread % across * vector + lane] = values[lane]
    T.sync_threads()
    for round_ in T.serial(T.ceildiv(channels, warps)):
        channel = round_ * warps + thread // WARP
        total[0] = 0.0
        if channel < channels:
            for i in T.serial(T.ceildiv(down * run, WARP)):
                place = i * WARP + thread % WARP
                if place < down * run:
                    total[0] = total[0] + slots[place // run, channel * run + place % run]
        group_sum(total, 1, WARP)
        if (thread % WARP == 0) and (channel < channels):
            totals[channel] = total[0]
    T.sync_threads()


@macro
def settle_channel(
    table, place, x, channel, moments, affine, kept, writes, run: int, dtype: torch.dtype,
    eps, momentum, running: bool, mean, invstd, running_mean, running_var,
):  # fmt: skip
    """One thread's work for a channel: its ``table`` column (centre, scale, shift), and its results if it ``writes``."""
    origin = T.alloc_local((1,), FLOAT32)
    table[0, place] = moments[1]
    table[1, place] = T.rsqrt(moments[2] / moments[0] + eps) * affine[0]
    table[2, place] = affine[1]
    if writes:
        origin[0] = 0.0
        if dtype is torch.float32:
            origin[0] = x[0, channel * run]
        keep_statistics(
            channel, moments[0], origin[0], moments[1], moments[2], kept, eps, momentum, running,
            mean, invstd, running_mean, running_var,
        )  # fmt: skip


@macro
def read_table(centre, scale, shift, table, thread, across: int, run: int, vector: int):
    """Each lane's (centre, scale, shift) of the tile's ``table``."""
    for lane in T.unroll(vector):
        centre[lane] = table[0, (thread % across * vector + lane) // run]
        scale[lane] = table[1, (thread % across * vector + lane) // run]
        shift[lane] = table[2, (thread % across * vector + lane) // run]
