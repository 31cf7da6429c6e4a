# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""One block a tile of columns, which its registers hold: one read, one write, one launch.

A block is as large as its launch asks for: (WARP, warps) threads. TileLang places no barriers in such a program;
all that it needs are written here.
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
from tileops.kernels.batch_norm.statistics_program import (
    FLOAT32,
    affine_dtype,
    block_warps,
    read_affine,
    read_running,
)
from tileops.kernels.compiled_program import compile_sized_program, traced
from tileops.kernels.shared_program import (
    WARP,
    tilelang_dtype,
)

__all__ = ["held_column_program"]


@functools.cache
def held_column_program(
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
    most_warps: int,
    fill_warps: int,
    steps: int,
    registers: int,
) -> Callable[..., Any]:
    """Compile ``(x, running_mean, running_var, weight, bias, y, mean, invstd, eps, momentum)``.

    x and y are (rows, c * run).

    Serves up to ``most_warps * WARP // across * steps`` rows. ``fill_warps`` is as ``block_warps`` takes it, and
    ``registers`` how many a thread may take.
    """
    element = tilelang_dtype(dtype)
    vectors = c * run // vector
    channels = across * vector // run
    rows = T.dynamic("rows")
    warps = block_warps(T.ceildiv(rows, steps) * across * steps, steps, fill_warps, most_warps)

    @traced(T.prim_func)
    def main(
        x: T.Tensor((rows, c * run), element),
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
        with T.Kernel(-(-vectors // across), threads=[WARP, warps]) as tile:
            thread = T.get_thread_binding(1) * WARP + T.get_thread_binding(0)
            row = thread // across
            column = tile * across + thread % across
            down = T.alloc_var("int32")
            down = warps * WARP // across
            limit = T.alloc_var("int32")
            limit = T.if_then_else((column < vectors) and (row < down), rows, 0)
            # The first threads have a channel each to settle.
            channel = tile * channels + thread
            settles = (thread < channels) and (channel < c)
            held = T.alloc_local((steps, vector), element)
            values = T.alloc_local((vector,), FLOAT32)
            origin = T.alloc_local((vector,), FLOAT32)
            centre = T.alloc_local((vector,), FLOAT32)
            scale = T.alloc_local((vector,), FLOAT32)
            shift = T.alloc_local((vector,), FLOAT32)
            affine = T.alloc_local((2,), FLOAT32)
            kept = T.alloc_local((2,), FLOAT32)
            moments = T.alloc_local((3,), FLOAT32)
            slots = T.alloc_shared((most_warps * WARP // across, channels * run + 1), FLOAT32)
            totals = T.alloc_shared((channels,), FLOAT32)
            table = T.alloc_shared((3, channels), FLOAT32)  # centre, scale, shift

            read_rows(x, held, 0, row, limit, column, down, steps, vector)
            if settles:
                read_affine(affine, channel, weight, bias, weight_dtype is not None, bias_dtype is not None)
                read_running(kept, channel, running_mean, running_var, running)
            column_origins(origin, x, column, c * run, run, vector, dtype)
            row_sums(values, held, origin, dtype, row, limit, down, steps, vector)
            channel_totals(values, slots, totals, thread, across, down, run, channels, vector, warps)
            moments[0] = T.cast(rows, FLOAT32) * run
            for lane in T.unroll(vector):
                centre[lane] = totals[(thread % across * vector + lane) // run] / moments[0]
            if settles:
                moments[1] = totals[thread] / moments[0]
            row_square_sums(values, held, origin, dtype, centre, row, limit, down, steps, vector)
            channel_totals(values, slots, totals, thread, across, down, run, channels, vector, warps)
            if settles:
                moments[2] = totals[thread]
                settle_channel(
                    table, thread, x, channel, moments, affine, kept, True, run, dtype,
                    eps, momentum, running, mean, invstd, running_mean, running_var,
                )  # fmt: skip
            T.sync_threads()
            read_table(centre, scale, shift, table, thread, across, run, vector)
            write_rows(y, held, origin, dtype, 0, row, limit, column, down, steps, vector, centre, scale, shift)

    return compile_sized_program(main, arch, registers)
