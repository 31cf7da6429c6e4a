# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""What the programs of group norm share: the row of a group, and the channels along it.

A row is one group of one sample, `channels * spatial` elements that lie together; element i belongs to channel
`group * channels + i // spatial`. The number of groups is a run-time number, so it is in no program.
"""

from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.compiled_program import macro
from tileops.kernels.shared_program import (
    from_origin,
    load_columns_at,
    load_row_at,
    store_row_at,
    tilelang_dtype,
)

__all__ = [
    "affine_shape",
    "affine_type",
    "affine_width",
    "groups_of",
    "load_affine",
    "load_chunk",
    "take_first",
    "write_normalised",
]


def affine_type(dtype: torch.dtype | None) -> str:
    """The parameter type of an affine tensor; that of an absent one is read by nobody."""
    return tilelang_dtype(dtype or torch.float32)


def affine_shape(dtype: torch.dtype | None, all_channels: Any) -> tuple[Any]:
    """Its shape. No run-time size may be known from an absent tensor alone."""
    return (1 if dtype is None else all_channels,)


def groups_of(all_channels: Any, channels: int) -> Any:
    """How many groups share out `all_channels`."""
    return T.truncdiv(all_channels, channels)


def affine_width(vector: int, spatial: int) -> int:
    """How many values of an affine tensor a vector of a row meets: one where it stays in its channel."""
    return 1 if spatial % vector == 0 else vector


@macro
def load_chunk(x, held, row, first, end, stride, unroll: int, vector: int):
    """Load the vectors `first`, `first + stride`, ... below `end` of row `row` into `held` (local: unroll, vector)."""
    for step in T.unroll(unroll):
        if first + step * stride < end:
            for j in T.vectorized(vector):
                held[step, j] = x[row, (first + step * stride) * vector + j]


@macro
def load_affine(held, first, weight, group, column, vector: int, channels: int, spatial: int):
    """Load what a vector of the row of `group` at `column` meets of `weight`, into `held` (local) from `first` on.

    They are `affine_width` values, in weight's dtype.
    """
    if spatial == 1:
        load_columns_at(held, first, weight, group * channels + column, vector)
    else:
        for j in T.unroll(affine_width(vector, spatial)):
            held[first + j] = weight[group * channels + T.truncdiv(column + j, spatial)]


@macro
def write_normalised(
    y, row, column, held, first, origin, mean, inverse_deviation, scale, shift, first_affine,
    vector: int, spatial: int, dtype: torch.dtype, has_weight: bool, has_bias: bool,
):  # fmt: skip
    """Write a vector of row `row` of y: `held[first:]` (local), normalised, scaled and shifted.

    `scale` and `shift` are as `load_affine` loaded them, from `first_affine` on; `origin` and `mean` are a value of
    the row and the mean as a distance from it, see `from_origin`.
    """
    element = tilelang_dtype(dtype)
    result = T.alloc_local((vector,), element)
    wide = affine_width(vector, spatial) > 1
    for j in T.unroll(vector):
        value = (from_origin(held[first + j], origin[0], dtype) - mean) * inverse_deviation
        if has_weight:
            value = value * T.cast(scale[first_affine + (j if wide else 0)], "float32")
        if has_bias:
            value = value + T.cast(shift[first_affine + (j if wide else 0)], "float32")
        result[j] = T.cast(value, element)
    store_row_at(y, row, column, result, 0, vector)


@macro
def take_first(origin, x, row, vector: int, dtype: torch.dtype):
    """`origin` (float32, local, 1) becomes the first value of row `row` of x, in every dtype; see `take_origin`.

    A backward sums products with x over whole channels, exact enough in float32 only where x is near zero.
    """
    first = T.alloc_local((vector,), tilelang_dtype(dtype))
    start = T.alloc_local((1,), "int32")
    start[0] = 0
    if vector > 1:
        load_row_at(first, 0, x, None, row, 0, vector)
    else:
        load_row_at(first, 0, x, None, row, start[0], vector)
    origin[0] = T.cast(first[0], "float32")
