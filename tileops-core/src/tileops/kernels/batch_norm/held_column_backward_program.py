# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""The backward of batch norm in one launch: one block a tile of columns, whose registers hold x and the gradient.

A block is as large as its launch asks for: (WARP, warps) threads. TileLang places no barriers in such a program;
all that it needs are written here.
"""

import functools
from collections.abc import Callable
from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.batch_norm.backward_program import (
    add_products,
    clear,
    gradients_of_x,
    keep_sums,
    put_rows,
    settle_gradients,
)
from tileops.kernels.batch_norm.column_program import channel_totals, lane_statistic, read_rows, read_table
from tileops.kernels.batch_norm.statistics_program import FLOAT32, affine_dtype, block_warps
from tileops.kernels.compiled_program import compile_sized_program, traced
from tileops.kernels.shared_program import WARP, tilelang_dtype

__all__ = ["held_column_backward_program"]


@functools.cache
def held_column_backward_program(
    arch: int,
    c: int,
    run: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    need: tuple[bool, bool, bool],
    *,
    vector: int,
    across: int,
    most_warps: int,
    fill_warps: int,
    steps: int,
    registers: int,
) -> Callable[..., Any]:
    """Compile ``(grad, x, mean, invstd, weight, grad_x, grad_weight, grad_bias)``, x as (rows, c * run).

    None in place of what is absent or not needed. Serves up to ``most_warps * WARP // across * steps`` rows.
    ``fill_warps`` is as ``block_warps`` takes it, and ``registers`` how many a thread may take.
    """
    element = tilelang_dtype(dtype)
    vectors = c * run // vector
    channels = across * vector // run
    rows = T.dynamic("rows")
    warps = block_warps(T.ceildiv(rows, steps) * across * steps, steps, fill_warps, most_warps)

    @traced(T.prim_func)
    def main(
        grad: T.Tensor((rows, c * run), element),
        x: T.Tensor((rows, c * run), element),
        mean: T.Tensor((c,), FLOAT32),
        invstd: T.Tensor((c,), FLOAT32),
        weight: T.Tensor((c,), affine_dtype(weight_dtype)),
        grad_x: T.Tensor((rows, c * run), element),
        grad_weight: T.Tensor((c,), affine_dtype(weight_dtype)),
        grad_bias: T.Tensor((c,), affine_dtype(bias_dtype)),
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
            grads = T.alloc_local((steps, vector), element)
            values = T.alloc_local((steps, vector), element)
            centre = T.alloc_local((vector,), FLOAT32)
            products = T.alloc_local((vector,), FLOAT32)
            plain = T.alloc_local((vector,), FLOAT32)
            scale = T.alloc_local((vector,), FLOAT32)
            slope = T.alloc_local((vector,), FLOAT32)
            shift = T.alloc_local((vector,), FLOAT32)
            sums = T.alloc_local((2,), FLOAT32)
            slots = T.alloc_shared((most_warps * WARP // across, channels * run + 1), FLOAT32)
            totals = T.alloc_shared((channels,), FLOAT32)
            table = T.alloc_shared((3, channels), FLOAT32)  # scale, slope, shift

            clear(grads, steps, vector)
            clear(values, steps, vector)
            read_rows(grad, grads, 0, row, limit, column, down, steps, vector)
            read_rows(x, values, 0, row, limit, column, down, steps, vector)
            lane_statistic(centre, mean, column, c, run, vector)
            for lane in T.unroll(vector):
                products[lane] = 0.0
                plain[lane] = 0.0
            add_products(products, plain, grads, values, centre, steps, vector)
            channel_totals(products, slots, totals, thread, across, down, run, channels, vector, warps)
            if settles:
                sums[0] = totals[thread] * invstd[channel]
            channel_totals(plain, slots, totals, thread, across, down, run, channels, vector, warps)
            if settles:
                sums[1] = totals[thread]
                settle_gradients(
                    table, thread, sums, T.cast(rows, FLOAT32) * run, channel, invstd, weight, weight_dtype is not None
                )
                keep_sums(sums, channel, grad_weight, grad_bias, need)
            if need[0]:
                T.sync_threads()
                read_table(scale, slope, shift, table, thread, across, run, vector)
                gradients_of_x(grads, values, centre, scale, slope, shift, dtype, steps, vector)
                put_rows(grad_x, grads, 0, row, limit, column, down, steps, vector)

    return compile_sized_program(main, arch, registers)
