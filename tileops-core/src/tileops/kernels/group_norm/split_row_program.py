# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""Group norm of rows of any length in two launches: moments of each part, then every block merges and applies.

A part is `part_vectors` vectors of a row, the last one what is left, read in chunks; it is an argument of both launches. Nothing stays on chip between them but what the L2 cache kept, so the second one walks
backwards: it starts with the parts that were read last.
"""

from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.batch_norm.statistics_program import add_moments
from tileops.kernels.compiled_program import macro, traced
from tileops.kernels.group_norm.group_row_program import (
    affine_shape,
    affine_type,
    affine_width,
    groups_of,
    load_affine,
    load_chunk,
    write_normalised,
)
from tileops.kernels.group_norm.split_plan import SplitPlan
from tileops.kernels.shared_program import WARP, block_merge_moments, merge_moments, take_origin, tilelang_dtype

__all__ = ["group_norm_split_apply", "group_norm_split_moments"]


@macro
def merge_parts(moments, partials, row, parts, part_vectors, slots, plan: SplitPlan):
    """`moments` (float32, local: count, mean, M2) become those of the whole row, in every thread of the block.

    `partials[0:2, row, part]` are mean and M2 of each part.
    """
    thread = T.get_thread_binding()
    for i in T.unroll(3):
        moments[i] = 0.0
    for turn in T.serial(T.ceildiv(parts, plan.threads)):
        part = turn * plan.threads + thread
        if part < parts:
            count = T.min(plan.vectors - part * part_vectors, part_vectors) * plan.vector
            merge_moments(moments, T.cast(count, "float32"), partials[0, row, part], partials[1, row, part])
    block_merge_moments(moments, slots, plan.threads)


def group_norm_split_moments(plan: SplitPlan, dtype: torch.dtype) -> Any:
    """(mean, M2) of each part of each row of x (rows, n) into partials (2, rows, parts).

    The program takes x, partials and part_vectors. A mean is the distance from the row's origin; see `take_origin`.
    """
    vector, unroll, threads = plan.vector, plan.unroll, plan.threads
    rows, parts = T.dynamic("rows"), T.dynamic("parts")
    element = tilelang_dtype(dtype)

    @traced(T.prim_func)
    def group_norm_split_moments(
        x: T.Tensor((rows, plan.n), element), partials: T.Tensor((2, rows, parts), "float32"), part_vectors: T.int32
    ):
        with T.Kernel(parts * rows, threads=threads) as block:
            T.annotate_min_blocks_per_sm(plan.blocks_per_sm)
            held = T.alloc_local((unroll, vector), element)
            coming = T.alloc_local((unroll, vector), element)
            moments = T.alloc_local((3,), "float32")
            origin = T.alloc_local((1,), "float32")
            slots = T.alloc_shared((threads // WARP, 3), "float32")
            first = T.alloc_var("int32")
            end = T.alloc_var("int32")
            thread = T.get_thread_binding()
            row = T.truncdiv(block, parts)
            part = T.truncmod(block, parts)

            first = part * part_vectors + thread
            end = T.min((part + 1) * part_vectors, plan.vectors)
            take_origin(origin, x, None, row, vector, dtype)
            for i in T.unroll(3):
                moments[i] = 0.0
            load_chunk(x, coming, row, first, end, threads, unroll, vector)
            for _ in T.serial(T.ceildiv(part_vectors, plan.chunk_vectors)):
                for step in T.unroll(unroll):
                    for j in T.vectorized(vector):
                        held[step, j] = coming[step, j]
                # The next chunk is under way while this one is summed.
                load_chunk(x, coming, row, first + plan.chunk_vectors, end, threads, unroll, vector)
                add_moments(moments, held, origin, dtype, first, threads, end, unroll, vector)
                first = first + plan.chunk_vectors
            block_merge_moments(moments, slots, threads)
            if thread == 0:
                partials[0, row, part] = moments[1]
                partials[1, row, part] = moments[2]

    return group_norm_split_moments


def group_norm_split_apply(
    plan: SplitPlan,
    channels: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    *,
    keeps_statistics: bool,
) -> Any:
    """What `group_norm_held_row` computes, from the moments of the parts.

    The program takes x, partials, part_vectors, weight, bias, y, statistics and eps.
    """
    n, vector, unroll, threads = plan.n, plan.vector, plan.unroll, plan.threads
    spatial = n // channels
    width = affine_width(vector, spatial)
    element = tilelang_dtype(dtype)
    has_weight, has_bias = weight_dtype is not None, bias_dtype is not None
    rows, parts = T.dynamic("rows"), T.dynamic("parts")
    all_channels = T.dynamic("all_channels") if has_weight or has_bias else channels

    @traced(T.macro)
    def load(held, scale, shift, x, weight, bias, row, group, first, end):
        load_chunk(x, held, row, first, end, threads, unroll, vector)
        for step in T.unroll(unroll):
            if first + step * threads < end:
                column = (first + step * threads) * vector
                if has_weight:
                    load_affine(scale, step * width, weight, group, column, vector, channels, spatial)
                if has_bias:
                    load_affine(shift, step * width, bias, group, column, vector, channels, spatial)

    @traced(T.prim_func)
    def group_norm_split_apply(
        x: T.Tensor((rows, n), element),
        partials: T.Tensor((2, rows, parts), "float32"),
        part_vectors: T.int32,
        weight: T.Tensor(affine_shape(weight_dtype, all_channels), affine_type(weight_dtype)),
        bias: T.Tensor(affine_shape(bias_dtype, all_channels), affine_type(bias_dtype)),
        y: T.Tensor((rows, n), element),
        statistics: T.Tensor((2, rows), "float32"),
        eps: T.float32,
    ):
        with T.Kernel(parts * rows, threads=threads) as block:
            T.annotate_min_blocks_per_sm(plan.blocks_per_sm)
            held = T.alloc_local((unroll, vector), element)
            passing = T.alloc_local((vector,), element)
            scale = T.alloc_local((unroll * width,), affine_type(weight_dtype))
            shift = T.alloc_local((unroll * width,), affine_type(bias_dtype))
            moments = T.alloc_local((3,), "float32")
            origin = T.alloc_local((1,), "float32")
            slots = T.alloc_shared((threads // WARP, 3), "float32")
            group = T.alloc_var("int32")
            first = T.alloc_var("int32")
            end = T.alloc_var("int32")
            thread = T.get_thread_binding()
            row = rows - 1 - T.truncdiv(block, parts)
            part = parts - 1 - T.truncmod(block, parts)

            chunks = T.ceildiv(part_vectors, plan.chunk_vectors)
            first = part * part_vectors + (chunks - 1) * plan.chunk_vectors + thread
            end = T.min((part + 1) * part_vectors, plan.vectors)
            if has_weight or has_bias:
                group = T.truncmod(row, groups_of(all_channels, channels))
            # Under way while the moments are merged.
            load(held, scale, shift, x, weight, bias, row, group, first, end)
            take_origin(origin, x, None, row, vector, dtype)
            merge_parts(moments, partials, row, parts, part_vectors, slots, plan)
            mean = moments[1]
            inverse_deviation = T.rsqrt(moments[2] * (1.0 / n) + eps)

            for turn in T.serial(chunks):
                for step in T.unroll(unroll):
                    if first + step * threads < end:
                        for j in T.unroll(vector):
                            passing[j] = held[step, j]
                        write_normalised(
                            y, row, (first + step * threads) * vector, passing, 0, origin, mean, inverse_deviation,
                            scale, shift, step * width, vector, spatial, dtype, has_weight, has_bias,
                        )  # fmt: skip
                first = first - plan.chunk_vectors
                if turn + 1 < chunks:
                    load(held, scale, shift, x, weight, bias, row, group, first, end)
            if keeps_statistics and (part == 0) and (thread == 0):
                statistics[0, row] = origin[0] + mean
                statistics[1, row] = moments[2] * (1.0 / max(n - 1, 1))

    return group_norm_split_apply
