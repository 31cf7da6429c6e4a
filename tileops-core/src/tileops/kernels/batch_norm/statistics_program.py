# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""What the batch norm programs share: the statistics that leave a program, and a channel held on chip.

A sample's moments are (count, mean, M2) in float32, M2 being the sum of squared deviations from the sample's own
mean. They are taken in two passes over values that are on chip: no square of a raw value is ever formed, so a
mean that is large against the deviation costs nothing.
"""

from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.compiled_program import macro
from tileops.kernels.shared_program import WARP, from_origin, merge_moments, tilelang_dtype

__all__ = [
    "add_moments",
    "affine_dtype",
    "block_warps",
    "channel_origin",
    "hold",
    "keep_statistics",
    "locate",
    "read_affine",
    "read_running",
    "store_held",
]

FLOAT32 = "float32"


def affine_dtype(dtype: torch.dtype | None) -> str:
    """The parameter type of an affine tensor. In an absent one's place comes a float32 tensor nobody reads."""
    return FLOAT32 if dtype is None else tilelang_dtype(dtype)


def block_warps(vectors: Any, steps: int, fill: int, most: int) -> Any:
    """Warps of a block that takes `vectors`, a run-time number: the size of a block is an argument of its launch.

    As many as hold `steps` vectors a thread, but at least `fill`, as far as there are vectors for them: with so
    many, all blocks together fill the chip once. From 2 to `most`: below two warps a block is mostly latency.
    """
    return T.min(most, T.max(2, T.max(T.ceildiv(vectors, WARP * steps), T.min(fill, T.ceildiv(vectors, WARP)))))


@macro
def read_affine(affine, channel, weight, bias, has_weight: bool, has_bias: bool):
    """``affine`` (float32, local, 2) becomes the channel's (weight, bias)."""
    affine[0] = 1.0
    affine[1] = 0.0
    if has_weight:
        affine[0] = T.cast(weight[channel], FLOAT32)
    if has_bias:
        affine[1] = T.cast(bias[channel], FLOAT32)


@macro
def read_running(kept, channel, running_mean, running_var, running: bool):
    """``kept`` (float32, local, 2) becomes the channel's running (mean, variance).

    Read early: a thread that reads them where it updates them waits for memory once more.
    """
    if running:
        kept[0] = running_mean[channel]
        kept[1] = running_var[channel]


@macro
def keep_statistics(
    channel, count, origin, centre, m2, kept, eps, momentum, running: bool,
    mean, invstd, running_mean, running_var,
):  # fmt: skip
    """Write the channel's results: mean, 1 / std, and the running statistics with the unbiased variance.

    ``centre`` is the mean as a distance from ``origin``, ``kept`` what ``read_running`` read.
    """
    mean[channel] = origin + centre
    invstd[channel] = T.rsqrt(m2 / count + eps)
    if running:
        running_mean[channel] = kept[0] * (1.0 - momentum) + (origin + centre) * momentum
        running_var[channel] = kept[1] * (1.0 - momentum) + m2 / (count - 1.0) * momentum


@macro
def channel_origin(origin, x, channel, vector: int, dtype: torch.dtype):
    """``origin`` (float32, local, 1) becomes the channel's first value in float32 input, else 0."""
    start = T.alloc_local((vector,), tilelang_dtype(dtype))
    origin[0] = 0.0
    if dtype is torch.float32:
        for lane in T.vectorized(vector):
            start[lane] = x[0, channel, lane]
        origin[0] = start[0]


@macro
def locate(at, item, run_vectors: int):
    """``at`` (local, 2) becomes the (batch index, vector in the run) of a channel's vector ``item``.

    In variables of its own, so that no other index arithmetic is folded into the division; truncated, since `item`
    is not negative, which TileLang cannot know.
    """
    at[0] = T.truncdiv(item, run_vectors)
    at[1] = T.truncmod(item, run_vectors)


@macro
def hold(x, held, channel, batch, first, stride, items, steps: int, run_vectors: int, vector: int):
    """Read the vectors ``first``, ``first + stride``, ... below ``items`` of a channel into ``held``.

    They are counted from the batch index ``batch`` on: a channel may have more than 32 bits count, a part has not.
    """
    at = T.alloc_local((2,), "int32")
    for step in T.unroll(steps):
        if first + step * stride < items:
            locate(at, first + step * stride, run_vectors)
            for lane in T.vectorized(vector):
                held[step, lane] = x[batch + at[0], channel, at[1] * vector + lane]


@macro
def held_sum(sums, held, origin, dtype: torch.dtype, first, stride, items, steps: int, vector: int):
    """Add to ``sums`` (float32, local, 2) the sum and the number of the values held: a chain for each lane.

    Here and below, values are distances from ``origin`` (float32, local, 1); see ``from_origin``.
    """
    chains = T.alloc_local((vector,), FLOAT32)
    for lane in T.unroll(vector):
        chains[lane] = 0.0
    for step in T.unroll(steps):
        if first + step * stride < items:
            sums[1] = sums[1] + vector
            for lane in T.unroll(vector):
                chains[lane] = chains[lane] + from_origin(held[step, lane], origin[0], dtype)
    for lane in T.unroll(vector):
        sums[0] = sums[0] + chains[lane]


@macro
def held_square_sum(squares, held, origin, dtype: torch.dtype, centre, first, stride, items, steps: int, vector: int):
    """Add to ``squares`` (float32, local, 1) the squared deviations of the values held from ``centre``."""
    chains = T.alloc_local((vector,), FLOAT32)
    for lane in T.unroll(vector):
        chains[lane] = 0.0
    for step in T.unroll(steps):
        if first + step * stride < items:
            for lane in T.unroll(vector):
                deviation = from_origin(held[step, lane], origin[0], dtype) - centre
                chains[lane] = chains[lane] + deviation * deviation
    for lane in T.unroll(vector):
        squares[0] = squares[0] + chains[lane]


@macro
def add_moments(moments, held, origin, dtype: torch.dtype, first, stride, items, steps: int, vector: int):
    """Merge the values held into ``moments`` (float32, local, 3), which are the thread's own.

    They are passed over twice, for their mean and for their squared deviations from it.
    """
    sums = T.alloc_local((2,), FLOAT32)
    squares = T.alloc_local((1,), FLOAT32)
    sums[0] = 0.0
    sums[1] = 0.0
    held_sum(sums, held, origin, dtype, first, stride, items, steps, vector)
    sums[0] = sums[0] / T.max(sums[1], 1.0)
    squares[0] = 0.0
    held_square_sum(squares, held, origin, dtype, sums[0], first, stride, items, steps, vector)
    merge_moments(moments, sums[1], sums[0], squares[0])


@macro
def store_held(
    y, held, origin, dtype: torch.dtype, channel, centre, scale, shift, batch, first, stride, items,
    steps: int, run_vectors: int, vector: int,
):  # fmt: skip
    """Write ``(value - centre) * scale + shift`` for the values held, where ``hold`` read them."""
    at = T.alloc_local((2,), "int32")
    for step in T.unroll(steps):
        if first + step * stride < items:
            locate(at, first + step * stride, run_vectors)
            for lane in T.vectorized(vector):
                value = from_origin(held[step, lane], origin[0], dtype)
                y[batch + at[0], channel, at[1] * vector + lane] = T.cast(
                    (value - centre) * scale + shift, tilelang_dtype(dtype)
                )
