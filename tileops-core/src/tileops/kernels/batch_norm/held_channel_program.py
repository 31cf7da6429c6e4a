# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""One block a channel, the channel in its registers: one read, one write, one launch."""

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
from tileops.kernels.shared_program import WARP, block_sum, compile_program, tilelang_dtype

__all__ = ["held_channel_program"]


def held_channel_program(
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
    steps: int,
    min_blocks: int,
) -> Callable[..., Any]:
    """Compile ``(x, running_mean, running_var, weight, bias, y, mean, invstd)``, x and y as (n, c, spatial).

    Serves every batch size up to ``threads * steps * vector // spatial``.
    """
    element = tilelang_dtype(dtype)
    run_vectors = spatial // vector
    warps = threads // WARP
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
        with T.Kernel(c, threads=threads) as channel:
            T.annotate_min_blocks_per_sm(min_blocks)
            thread = T.get_thread_binding()
            items = n * run_vectors
            held = T.alloc_local((steps, vector), element)
            affine = T.alloc_local((2,), FLOAT32)
            origin = T.alloc_local((1,), FLOAT32)
            sums = T.alloc_local((2,), FLOAT32)
            squares = T.alloc_local((1,), FLOAT32)
            sum_slots = T.alloc_shared((warps, 2), FLOAT32)
            square_slots = T.alloc_shared((warps, 1), FLOAT32)

            hold(x, held, channel, thread, threads, items, steps, run_vectors, vector)
            channel_origin(origin, x, channel, vector, dtype)
            read_affine(affine, channel, weight, bias, weight_dtype is not None, bias_dtype is not None)

            sums[0] = 0.0
            sums[1] = 0.0
            held_sum(sums, held, origin, dtype, thread, threads, items, steps, vector)
            block_sum(sums, sum_slots, 2, threads)
            centre = T.alloc_var(FLOAT32)
            centre = sums[0] / sums[1]
            squares[0] = 0.0
            held_square_sum(squares, held, origin, dtype, centre, thread, threads, items, steps, vector)
            block_sum(squares, square_slots, 1, threads)

            scale = T.alloc_var(FLOAT32)
            scale = T.rsqrt(squares[0] / sums[1] + eps) * affine[0]
            store_held(
                y, held, origin, dtype, channel, centre, scale, affine[1], thread, threads, items,
                steps, run_vectors, vector,
            )  # fmt: skip
            if thread == 0:
                keep_statistics(
                    channel, sums[1], origin[0], centre, squares[0], eps, momentum, running,
                    mean, invstd, running_mean, running_var,
                )  # fmt: skip

    return compile_program(main, arch)
