# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""The backward of batch norm in one launch: one cluster of blocks a channel, whose registers hold x and the gradient.

A cluster may be one block. Of several, every block sums its part and puts the sums into the shared memory of all
blocks of its cluster; each then adds up the same sums in the same order.

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
    gradient_factors,
    gradients_of_x,
    keep_sums,
    put,
    sum_lanes,
)
from tileops.kernels.batch_norm.cluster_program import clusters, tell_cluster
from tileops.kernels.batch_norm.statistics_program import FLOAT32, affine_dtype, block_warps, hold, read_affine
from tileops.kernels.compiled_program import compile_sized_program, traced
from tileops.kernels.shared_program import WARP, sized_block_sum, tilelang_dtype

__all__ = ["held_channel_backward_program"]


@functools.cache
def held_channel_backward_program(
    arch: int,
    c: int,
    spatial: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    need: tuple[bool, bool, bool],
    *,
    vector: int,
    blocks: int,
    most_warps: int,
    fill_warps: int,
    held_steps: int,
    registers: int,
) -> Callable[..., Any]:
    """Compile ``(grad, x, mean, invstd, weight, grad_x, grad_weight, grad_bias)``, x as (n, c, spatial).

    None in place of what is absent or not needed. Serves every batch size up to
    ``blocks * most_warps * WARP * held_steps * vector // spatial``. ``fill_warps`` is as ``block_warps`` takes it, and
    ``registers`` how many a thread may take.
    """
    element = tilelang_dtype(dtype)
    run_vectors = spatial // vector
    n = T.dynamic("n")
    warps = block_warps(T.ceildiv(n * run_vectors, blocks), held_steps, fill_warps, most_warps)

    @traced(T.prim_func)
    def main(
        grad: T.Tensor((n, c, spatial), element),
        x: T.Tensor((n, c, spatial), element),
        mean: T.Tensor((c,), FLOAT32),
        invstd: T.Tensor((c,), FLOAT32),
        weight: T.Tensor((c,), affine_dtype(weight_dtype)),
        grad_x: T.Tensor((n, c, spatial), element),
        grad_weight: T.Tensor((c,), affine_dtype(weight_dtype)),
        grad_bias: T.Tensor((c,), affine_dtype(bias_dtype)),
    ):
        with clusters(c, blocks, warps) as block:
            if blocks > 1:
                T.cluster_arrive_relaxed()
            warp = T.get_thread_binding(1)
            thread = warp * WARP + T.get_thread_binding(0)
            channel = block // blocks
            rank = block % blocks
            items = n * run_vectors
            # The blocks take turns, so that a small batch leaves none of them idle.
            stride = T.alloc_var("int32")
            stride = blocks * (warps * WARP)
            first = T.alloc_var("int32")
            first = rank * (warps * WARP) + thread
            grads = T.alloc_local((held_steps, vector), element)
            values = T.alloc_local((held_steps, vector), element)
            centre = T.alloc_local((vector,), FLOAT32)
            products = T.alloc_local((vector,), FLOAT32)
            plain = T.alloc_local((vector,), FLOAT32)
            scale = T.alloc_local((vector,), FLOAT32)
            slope = T.alloc_local((vector,), FLOAT32)
            shift = T.alloc_local((vector,), FLOAT32)
            affine = T.alloc_local((2,), FLOAT32)
            factors = T.alloc_local((3,), FLOAT32)
            sums = T.alloc_local((2,), FLOAT32)
            deviation = T.alloc_var(FLOAT32)
            slots = T.alloc_shared((most_warps, 2), FLOAT32)
            mine = T.alloc_shared((2,), FLOAT32)
            peers = T.alloc_shared((blocks, 2), FLOAT32)

            clear(grads, held_steps, vector)
            clear(values, held_steps, vector)
            hold(grad, grads, channel, 0, first, stride, items, held_steps, run_vectors, vector)
            hold(x, values, channel, 0, first, stride, items, held_steps, run_vectors, vector)
            read_affine(affine, channel, weight, weight, weight_dtype is not None, False)
            deviation = invstd[channel]
            for lane in T.unroll(vector):
                centre[lane] = mean[channel]
                products[lane] = 0.0
                plain[lane] = 0.0
            add_products(products, plain, grads, values, centre, held_steps, vector)
            sum_lanes(sums, products, plain, vector)
            sized_block_sum(sums, slots, 2, warps)
            if blocks > 1:
                tell_cluster(sums, mine, peers, rank, warp, blocks, 2)
                for i in T.unroll(2):
                    sums[i] = 0.0
                    for other in T.unroll(blocks):
                        sums[i] = sums[i] + peers[other, i]

            sums[0] = sums[0] * deviation
            if need[0]:
                gradient_factors(factors, sums[0], sums[1], T.cast(n, FLOAT32) * spatial, deviation, affine[0])
                for lane in T.unroll(vector):
                    scale[lane] = factors[0]
                    slope[lane] = factors[1]
                    shift[lane] = factors[2]
                gradients_of_x(grads, values, centre, scale, slope, shift, dtype, held_steps, vector)
                put(grad_x, grads, channel, 0, first, stride, items, held_steps, run_vectors, vector)
            if (rank == 0) and (thread == 0):
                keep_sums(sums, channel, grad_weight, grad_bias, need)

    return compile_sized_program(main, arch, registers)
