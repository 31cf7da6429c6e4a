# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""Several blocks a channel: the sums of each part, then every block adds them up and writes the gradient of x.

Parts are as in the forward; see ``split_channel_program``. Where the gradient of x needs no sums, as in inference,
the first launch writes it, and the second only adds up.
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
    keep_part,
    keep_sums,
    put,
    scaled_gradients,
    sum_lanes,
)
from tileops.kernels.batch_norm.split_channel_program import find_part
from tileops.kernels.batch_norm.statistics_program import FLOAT32, affine_dtype, hold, read_affine
from tileops.kernels.compiled_program import compile_program, traced
from tileops.kernels.shared_program import WARP, block_sum, tilelang_dtype

__all__ = ["split_channel_gradient_program", "split_channel_sums_program"]


@functools.cache
def split_channel_sums_program(
    arch: int,
    c: int,
    spatial: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    *,
    wanted: tuple[bool, bool],
    closes: bool,
    writes: bool,
    vector: int,
    threads: int,
    unroll: int,
    min_blocks: int,
) -> Callable[..., Any]:
    """Compile ``(grad, x, mean, invstd, weight, grad_x, partials, chunks, count, grad_weight, grad_bias)``.

    x is (n, c, spatial). The sums of grad * x̂ and of grad in each of ``count`` parts of each channel, as far as they are
    ``wanted``, go into partials (sums, count, c). If the program ``closes``, those of the only part go into the last
    two. If it ``writes``, grad_x becomes grad * invstd * weight. None in place of what is neither read nor written.
    """
    element = tilelang_dtype(dtype)
    run_vectors = spatial // vector
    n = T.dynamic("n")
    of_unit, _ = wanted
    sums_wanted = sum(wanted)
    parts = T.dynamic("parts") if sums_wanted else 1

    @traced(T.prim_func)
    def main(
        grad: T.Tensor((n, c, spatial), element),
        x: T.Tensor((n, c, spatial), element),
        mean: T.Tensor((c,), FLOAT32),
        invstd: T.Tensor((c,), FLOAT32),
        weight: T.Tensor((c,), affine_dtype(weight_dtype)),
        grad_x: T.Tensor((n, c, spatial), element),
        partials: T.Tensor((max(sums_wanted, 1), parts, c), FLOAT32),
        chunks: T.int32,
        count: T.int32,
        grad_weight: T.Tensor((c,), affine_dtype(weight_dtype)),
        grad_bias: T.Tensor((c,), affine_dtype(bias_dtype)),
    ):
        with T.Kernel(count * c, threads=threads) as block:
            T.annotate_min_blocks_per_sm(min_blocks)
            thread = T.get_thread_binding()
            # Channels first: blocks that run together read neighbouring memory.
            channel = block % c
            part = block // c
            place = T.alloc_local((3,), "int32")
            first = T.alloc_var("int32")
            deviation = T.alloc_var(FLOAT32)
            grads = T.alloc_local((unroll, vector), element)
            values = T.alloc_local((unroll, vector), element)
            centre = T.alloc_local((vector,), FLOAT32)
            scale = T.alloc_local((vector,), FLOAT32)
            products = T.alloc_local((vector,), FLOAT32)
            plain = T.alloc_local((vector,), FLOAT32)
            affine = T.alloc_local((2,), FLOAT32)
            sums = T.alloc_local((2,), FLOAT32)
            slots = T.alloc_shared((threads // WARP, 2), FLOAT32)

            find_part(place, n, part, chunks * (threads * unroll), run_vectors)
            first = place[1] + thread
            deviation = invstd[channel]
            read_affine(affine, channel, weight, weight, weight_dtype is not None, False)
            for lane in T.unroll(vector):
                centre[lane] = mean[channel]
                scale[lane] = deviation * affine[0]
                products[lane] = 0.0
                plain[lane] = 0.0
            clear(values, unroll, vector)
            for _ in T.serial(chunks):
                clear(grads, unroll, vector)
                hold(grad, grads, channel, place[0], first, threads, place[2], unroll, run_vectors, vector)
                if of_unit:
                    hold(x, values, channel, place[0], first, threads, place[2], unroll, run_vectors, vector)
                add_products(products, plain, grads, values, centre, unroll, vector)
                if writes:
                    scaled_gradients(grads, scale, dtype, unroll, vector)
                    put(grad_x, grads, channel, place[0], first, threads, place[2], unroll, run_vectors, vector)
                first = first + threads * unroll
            if sums_wanted:
                sum_lanes(sums, products, plain, vector)
                block_sum(sums, slots, 2, threads)
                sums[0] = sums[0] * deviation
                if thread == 0:
                    keep_part(sums, channel, part, count, partials, grad_weight, grad_bias, wanted, closes)

    return compile_program(main, arch)


@functools.cache
def split_channel_gradient_program(
    arch: int,
    c: int,
    spatial: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    need: tuple[bool, bool, bool],
    *,
    vector: int,
    threads: int,
    unroll: int,
    min_blocks: int,
) -> Callable[..., Any]:
    """Compile ``(grad, x, mean, invstd, weight, partials, chunks, grad_x, grad_weight, grad_bias)``.

    Partials (2, parts, c) are what the sums program left. None in place of what is absent or not needed.
    """
    element = tilelang_dtype(dtype)
    run_vectors = spatial // vector
    n = T.dynamic("n")
    parts = T.dynamic("parts")

    @traced(T.prim_func)
    def main(
        grad: T.Tensor((n, c, spatial), element),
        x: T.Tensor((n, c, spatial), element),
        mean: T.Tensor((c,), FLOAT32),
        invstd: T.Tensor((c,), FLOAT32),
        weight: T.Tensor((c,), affine_dtype(weight_dtype)),
        partials: T.Tensor((2, parts, c), FLOAT32),
        chunks: T.int32,
        grad_x: T.Tensor((n, c, spatial), element),
        grad_weight: T.Tensor((c,), affine_dtype(weight_dtype)),
        grad_bias: T.Tensor((c,), affine_dtype(bias_dtype)),
    ):
        with T.Kernel(parts * c, threads=threads) as block:
            T.annotate_min_blocks_per_sm(min_blocks)
            thread = T.get_thread_binding()
            channel = c - 1 - block % c
            part = parts - 1 - block // c
            place = T.alloc_local((3,), "int32")
            first = T.alloc_var("int32")
            deviation = T.alloc_var(FLOAT32)
            grads = T.alloc_local((unroll, vector), element)
            values = T.alloc_local((unroll, vector), element)
            centre = T.alloc_local((vector,), FLOAT32)
            scale = T.alloc_local((vector,), FLOAT32)
            slope = T.alloc_local((vector,), FLOAT32)
            shift = T.alloc_local((vector,), FLOAT32)
            affine = T.alloc_local((2,), FLOAT32)
            factors = T.alloc_local((3,), FLOAT32)
            sums = T.alloc_local((2,), FLOAT32)
            slots = T.alloc_shared((threads // WARP, 2), FLOAT32)

            find_part(place, n, part, chunks * (threads * unroll), run_vectors)
            first = place[1] + thread + threads * unroll * (chunks - 1)
            # Under way while the sums are added up.
            hold(grad, grads, channel, place[0], first, threads, place[2], unroll, run_vectors, vector)
            hold(x, values, channel, place[0], first, threads, place[2], unroll, run_vectors, vector)
            deviation = invstd[channel]
            read_affine(affine, channel, weight, weight, weight_dtype is not None, False)
            for i in T.unroll(2):
                sums[i] = 0.0
            for turn in T.serial(T.ceildiv(parts, threads)):
                if turn * threads + thread < parts:
                    for i in T.unroll(2):
                        sums[i] = sums[i] + partials[i, turn * threads + thread, channel]
            block_sum(sums, slots, 2, threads)
            gradient_factors(factors, sums[0], sums[1], T.cast(n, FLOAT32) * spatial, deviation, affine[0])
            for lane in T.unroll(vector):
                centre[lane] = mean[channel]
                scale[lane] = factors[0]
                slope[lane] = factors[1]
                shift[lane] = factors[2]
            for turn in T.serial(chunks):
                gradients_of_x(grads, values, centre, scale, slope, shift, dtype, unroll, vector)
                put(grad_x, grads, channel, place[0], first, threads, place[2], unroll, run_vectors, vector)
                first = first - threads * unroll
                if turn + 1 < chunks:
                    hold(grad, grads, channel, place[0], first, threads, place[2], unroll, run_vectors, vector)
                    hold(x, values, channel, place[0], first, threads, place[2], unroll, run_vectors, vector)
            if (part == 0) and (thread == 0):
                keep_sums(sums, channel, grad_weight, grad_bias, need)

    return compile_program(main, arch)
