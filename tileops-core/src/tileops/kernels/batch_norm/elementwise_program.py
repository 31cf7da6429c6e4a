# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""Batch norm by the running statistics: a map whose scale and shift depend on the channel alone.

Scale and shift are worked out where they are used, from four numbers a channel that stay in the caches: a table
of them would cost a launch, or a barrier before the first output.
"""

import functools
from collections.abc import Callable
from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.batch_norm.column_program import lane_statistic
from tileops.kernels.batch_norm.statistics_program import FLOAT32, affine_dtype, read_affine
from tileops.kernels.compiled_program import compile_program, traced
from tileops.kernels.shared_program import (
    tilelang_dtype,
)

__all__ = ["column_map_program", "run_map_program"]


@functools.cache
def run_map_program(
    arch: int,
    c: int,
    spatial: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    *,
    vector: int,
    threads: int,
    unroll: int,
    min_blocks: int,
) -> Callable[..., Any]:
    """Compile ``(x, taken, running_mean, running_var, weight, bias, y, eps)``, x and y as (n * c, spatial).

    ``vector`` divides ``spatial``. A thread takes ``taken`` vectors, at most ``unroll``.
    """
    element = tilelang_dtype(dtype)
    run_vectors = spatial // vector
    runs = T.dynamic("runs", "int64")

    @traced(T.prim_func)
    def main(
        x: T.Tensor((runs, spatial), element),
        taken: T.int32,
        running_mean: T.Tensor((c,), FLOAT32),
        running_var: T.Tensor((c,), FLOAT32),
        weight: T.Tensor((c,), affine_dtype(weight_dtype)),
        bias: T.Tensor((c,), affine_dtype(bias_dtype)),
        y: T.Tensor((runs, spatial), element),
        eps: T.float32,
    ):
        with T.Kernel(T.cast(T.ceildiv(runs * run_vectors, taken * threads), "int32"), threads=threads) as block:
            T.annotate_min_blocks_per_sm(min_blocks)
            thread = T.get_thread_binding()
            # One wide division a block; each thread goes on from there in 32 bits.
            base = T.alloc_local((1,), "int64")
            base[0] = T.truncdiv(T.cast(block, "int64") * (taken * threads), T.int64(run_vectors))
            start = T.alloc_local((2,), "int32")
            start[0] = T.cast(T.cast(block, "int64") * (taken * threads) - base[0] * run_vectors, "int32")
            start[1] = T.cast(T.truncmod(base[0], T.int64(c)), "int32")
            at = T.alloc_local((unroll, 3), "int32")  # run from `base`, vector in the run, channel
            held = T.alloc_local((unroll, vector), element)
            affine = T.alloc_local((2,), FLOAT32)

            for step in T.unroll(unroll):
                at[step, 0] = T.truncdiv(start[0] + step * threads + thread, run_vectors)
                at[step, 1] = (start[0] + step * threads + thread) - at[step, 0] * run_vectors
                at[step, 2] = T.truncmod(start[1] + at[step, 0], c)
                if (step < taken) and (base[0] + at[step, 0] < runs):
                    for lane in T.vectorized(vector):
                        held[step, lane] = x[base[0] + at[step, 0], at[step, 1] * vector + lane]
            for step in T.unroll(unroll):
                if (step < taken) and (base[0] + at[step, 0] < runs):
                    channel = at[step, 2]
                    read_affine(affine, channel, weight, bias, weight_dtype is not None, bias_dtype is not None)
                    centre = running_mean[channel]
                    scale = T.rsqrt(running_var[channel] + eps) * affine[0]
                    for lane in T.vectorized(vector):
                        value = T.cast(held[step, lane], FLOAT32)
                        y[base[0] + at[step, 0], at[step, 1] * vector + lane] = T.cast(
                            (value - centre) * scale + affine[1], element
                        )

    return compile_program(main, arch)


@functools.cache
def column_map_program(
    arch: int,
    c: int,
    run: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    *,
    vector: int,
    across: int,
    down: int,
    threads: int,
    unroll: int,
    min_blocks: int,
) -> Callable[..., Any]:
    """Compile ``(x, taken, running_mean, running_var, weight, bias, y, eps)``, x and y as (rows, c * run).

    ``run`` neighbouring columns belong to a channel. A thread keeps to one vector of columns, whose scales and
    shifts it works out once for ``taken`` rows, at most ``unroll``.
    """
    element = tilelang_dtype(dtype)
    vectors = c * run // vector
    tiles = -(-vectors // across)
    rows = T.dynamic("rows", "int64")

    @traced(T.prim_func)
    def main(
        x: T.Tensor((rows, c * run), element),
        taken: T.int32,
        running_mean: T.Tensor((c,), FLOAT32),
        running_var: T.Tensor((c,), FLOAT32),
        weight: T.Tensor((c,), affine_dtype(weight_dtype)),
        bias: T.Tensor((c,), affine_dtype(bias_dtype)),
        y: T.Tensor((rows, c * run), element),
        eps: T.float32,
    ):
        with T.Kernel(T.cast(T.ceildiv(rows, taken * down) * tiles, "int32"), threads=threads) as block:
            T.annotate_min_blocks_per_sm(min_blocks)
            thread = T.get_thread_binding()
            column = block % tiles * across + thread % across
            first = T.alloc_var("int64")
            first = T.cast(block // tiles, "int64") * (taken * down) + thread // across
            limit = T.alloc_var("int64")
            limit = T.if_then_else((column < vectors) and (thread // across < down), rows, T.cast(0, "int64"))
            held = T.alloc_local((unroll, vector), element)
            centre = T.alloc_local((vector,), FLOAT32)
            scale = T.alloc_local((vector,), FLOAT32)
            shift = T.alloc_local((vector,), FLOAT32)
            factor = T.alloc_local((vector,), FLOAT32)

            for step in T.unroll(unroll):
                if (step < taken) and (first + step * down < limit):
                    for lane in T.vectorized(vector):
                        held[step, lane] = x[first + step * down, column * vector + lane]
            lane_statistic(centre, running_mean, column, c, run, vector)
            lane_statistic(scale, running_var, column, c, run, vector)
            for lane in T.unroll(vector):
                factor[lane] = 1.0
                shift[lane] = 0.0
            if weight_dtype is not None:
                lane_statistic(factor, weight, column, c, run, vector)
            if bias_dtype is not None:
                lane_statistic(shift, bias, column, c, run, vector)
            for lane in T.unroll(vector):
                scale[lane] = T.rsqrt(scale[lane] + eps) * factor[lane]
            for step in T.unroll(unroll):
                if (step < taken) and (first + step * down < limit):
                    for lane in T.vectorized(vector):
                        value = T.cast(held[step, lane], FLOAT32)
                        y[first + step * down, column * vector + lane] = T.cast(
                            (value - centre[lane]) * scale[lane] + shift[lane], element
                        )

    return compile_program(main, arch)
