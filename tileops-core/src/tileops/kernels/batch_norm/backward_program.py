# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""What the programs of batch norm's backward share: two sums over a channel, and the gradient of x from them.

With d = x - mean and x̂ = d * invstd, the sums are those of grad * d and of grad. The mean is given, so they are plain
sums: nothing is squared, and a mean that is large against the deviation costs nothing. Per channel,

    grad_x = grad * scale + d * slope + shift,   scale = invstd * weight,
    slope = -scale * invstd * mean(grad * x̂),    shift = -scale * mean(grad).

What these macros take of a thread are vectors, each lane with numbers of its own: of its channel, where vectors are
laid across channels, and the same ones in every lane where they are laid along one. What was not read is 0, and adds
nothing.
"""

import tilelang.language as T
import torch

from tileops.kernels.batch_norm.statistics_program import FLOAT32, locate, read_affine
from tileops.kernels.compiled_program import macro
from tileops.kernels.shared_program import tilelang_dtype

__all__ = [
    "add_products",
    "clear",
    "gradient_factors",
    "gradients_of_x",
    "keep_part",
    "keep_sums",
    "put",
    "put_rows",
    "scaled_gradients",
    "settle_gradients",
    "sum_lanes",
]


@macro
def clear(held, steps: int, vector: int):
    """``held`` (local, steps by vector) becomes 0."""
    for step in T.unroll(steps):
        for lane in T.vectorized(vector):
            held[step, lane] = T.cast(0, held.dtype)


@macro
def add_products(products, plain, grads, values, mean, steps: int, vector: int):
    """Add to ``products`` and ``plain`` (float32, local, vector) each lane's sums of grad * (x - mean) and of grad."""
    for step in T.unroll(steps):
        for lane in T.unroll(vector):
            grad = T.cast(grads[step, lane], FLOAT32)
            plain[lane] = plain[lane] + grad
            products[lane] = products[lane] + grad * (T.cast(values[step, lane], FLOAT32) - mean[lane])


@macro
def sum_lanes(sums, products, plain, vector: int):
    """``sums`` (float32, local, 2) becomes the sums over the lanes of ``products`` and of ``plain``."""
    sums[0] = 0.0
    sums[1] = 0.0
    for lane in T.unroll(vector):
        sums[0] = sums[0] + products[lane]
        sums[1] = sums[1] + plain[lane]


@macro
def gradient_factors(factors, of_unit, of_grad, count, invstd, weight):
    """``factors`` (float32, local, 3) becomes a channel's scale, slope and shift.

    ``of_unit`` and ``of_grad`` are its sums of grad * x̂ and of grad over its ``count`` values.
    """
    factors[0] = invstd * weight
    factors[1] = -factors[0] * invstd * (of_unit / count)
    factors[2] = -factors[0] * (of_grad / count)


@macro
def keep_sums(sums, channel, grad_weight, grad_bias, need: tuple[bool, bool, bool]):
    """Write a channel's sums of grad * x̂ and of grad, ``sums`` (float32, local, 2), as far as they are needed."""
    if need[1]:
        grad_weight[channel] = T.cast(sums[0], grad_weight.dtype)
    if need[2]:
        grad_bias[channel] = T.cast(sums[1], grad_bias.dtype)


@macro
def keep_partials(sums, channel, part, partials, wanted: tuple[bool, bool]):
    """Write what a part adds to a channel's sums into ``partials`` (sums, parts, c), as far as they are wanted."""
    if wanted[0]:
        partials[0, part, channel] = sums[0]
    if wanted[1]:
        partials[wanted[0] + 0, part, channel] = sums[1]


@macro
def keep_part(sums, channel, part, count, partials, grad_weight, grad_bias, wanted: tuple[bool, bool], closes: bool):
    """The same, where the only part of ``count`` is the whole: then its sums are the results, if it ``closes``."""
    if closes:
        if count == 1:
            keep_sums(sums, channel, grad_weight, grad_bias, (False, *wanted))
        else:
            keep_partials(sums, channel, part, partials, wanted)
    else:
        keep_partials(sums, channel, part, partials, wanted)


@macro
def settle_gradients(table, place, sums, count, channel, invstd, weight, has_weight: bool):
    """One thread's work for a channel: its ``table`` column, which is its scale, slope and shift."""
    affine = T.alloc_local((2,), FLOAT32)
    factors = T.alloc_local((3,), FLOAT32)
    read_affine(affine, channel, weight, weight, has_weight, False)
    gradient_factors(factors, sums[0], sums[1], count, invstd[channel], affine[0])
    for i in T.unroll(3):
        table[i, place] = factors[i]


@macro
def gradients_of_x(grads, values, mean, scale, slope, shift, dtype: torch.dtype, steps: int, vector: int):
    """The gradient of x, in place of the ``grads`` that are held; all others are float32, local, vector."""
    for step in T.unroll(steps):
        for lane in T.unroll(vector):
            deviation = T.cast(values[step, lane], FLOAT32) - mean[lane]
            gradient = T.cast(grads[step, lane], FLOAT32) * scale[lane] + (deviation * slope[lane] + shift[lane])
            grads[step, lane] = T.cast(gradient, tilelang_dtype(dtype))


@macro
def scaled_gradients(grads, scale, dtype: torch.dtype, steps: int, vector: int):
    """The same where the statistics are constants."""
    for step in T.unroll(steps):
        for lane in T.unroll(vector):
            grads[step, lane] = T.cast(T.cast(grads[step, lane], FLOAT32) * scale[lane], tilelang_dtype(dtype))


@macro
def put(y, held, channel, batch, first, stride, items, steps: int, run_vectors: int, vector: int):
    """Write ``held`` where ``hold`` reads."""
    at = T.alloc_local((2,), "int32")
    for step in T.unroll(steps):
        if first + step * stride < items:
            locate(at, first + step * stride, run_vectors)
            for lane in T.vectorized(vector):
                y[batch + at[0], channel, at[1] * vector + lane] = held[step, lane]


@macro
def put_rows(y, held, base, row, rows, column, stride, steps: int, vector: int):
    """Write ``held`` where ``read_rows`` reads."""
    for step in T.unroll(steps):
        if row + step * stride < rows:
            for lane in T.vectorized(vector):
                y[base + row + step * stride, column * vector + lane] = held[step, lane]
