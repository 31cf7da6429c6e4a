# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""What the batch norm programs share: the statistics that leave a program, and a channel held on chip.

A sample's moments are (count, mean, M2) in float32, M2 being the sum of squared deviations from the sample's own
mean. They are taken in two passes over values that are on chip: no square of a raw value is ever formed, so a
mean that is large against the deviation costs nothing.
"""

import tilelang.language as T
import torch

from tileops.kernels.shared_program import from_origin, tilelang_dtype

__all__ = [
    "affine_dtype",
    "channel_origin",
    "held_square_sum",
    "held_sum",
    "hold",
    "keep_statistics",
    "read_affine",
    "store_held",
]

FLOAT32 = "float32"


def affine_dtype(dtype: torch.dtype | None) -> str:
    """The parameter type of an affine tensor. In an absent one's place comes a float32 tensor nobody reads."""
    return FLOAT32 if dtype is None else tilelang_dtype(dtype)


@T.macro
def read_affine(affine, channel, weight, bias, has_weight: bool, has_bias: bool):
    """``affine`` (float32, local, 2) becomes the channel's (weight, bias)."""
    affine[0] = 1.0
    affine[1] = 0.0
    if has_weight:
        affine[0] = T.cast(weight[channel], FLOAT32)
    if has_bias:
        affine[1] = T.cast(bias[channel], FLOAT32)


@T.macro
def keep_statistics(
    channel, count, origin, centre, m2, eps: float, momentum: float, running: bool,
    mean, invstd, running_mean, running_var,
):  # fmt: skip
    """Write the channel's results: mean, 1 / std, and the running statistics with the unbiased variance.

    ``centre`` is the mean as a distance from ``origin``.
    """
    mean[channel] = origin + centre
    invstd[channel] = T.rsqrt(m2 / count + eps)
    if running:
        running_mean[channel] = running_mean[channel] * (1.0 - momentum) + (origin + centre) * momentum
        running_var[channel] = running_var[channel] * (1.0 - momentum) + m2 / (count - 1.0) * momentum


@T.macro
def channel_origin(origin, x, channel, vector: int, dtype: torch.dtype):
    """``origin`` (float32, local, 1) becomes the channel's first value in float32 input, else 0."""
    start = T.alloc_local((vector,), tilelang_dtype(dtype))
    origin[0] = 0.0
    if dtype is torch.float32:
        for lane in T.vectorized(vector):
            start[lane] = x[0, channel, lane]
        origin[0] = start[0]


@T.macro
def locate(at, item, run_vectors: int):
    """``at`` (local, 2) becomes the (batch index, vector in the run) of a channel's vector ``item``.

    In variables of its own, so that no other index arithmetic is folded into the division.
    """
    at[0] = item // run_vectors
    at[1] = item % run_vectors


@T.macro
def hold(x, held, channel, first, stride, items, steps: int, run_vectors: int, vector: int, counter="int32"):
    """Read the vectors ``first``, ``first + stride``, ... below ``items`` of a channel into ``held``.

    ``counter`` is the type that counts them.
    """
    at = T.alloc_local((2,), counter)
    for step in T.unroll(steps):
        if first + step * stride < items:
            locate(at, first + step * stride, run_vectors)
            for lane in T.vectorized(vector):
                held[step, lane] = x[at[0], channel, at[1] * vector + lane]


@T.macro
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


@T.macro
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


@T.macro
def store_held(
    y, held, origin, dtype: torch.dtype, channel, centre, scale, shift, first, stride, items,
    steps: int, run_vectors: int, vector: int, counter="int32",
):  # fmt: skip
    """Write ``(value - centre) * scale + shift`` for the values held, where ``hold`` read them."""
    at = T.alloc_local((2,), counter)
    for step in T.unroll(steps):
        if first + step * stride < items:
            locate(at, first + step * stride, run_vectors)
            for lane in T.vectorized(vector):
                value = from_origin(held[step, lane], origin[0], dtype)
                y[at[0], channel, at[1] * vector + lane] = T.cast(
                    (value - centre) * scale + shift, tilelang_dtype(dtype)
                )
