# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""Group norm's backward for groups of any length: x and the gradient are read twice.

The first program leaves the moments of x, and the sums of grad and grad * x, of each piece of each channel of each
sample. All else follows from those: the second program merges the pieces of a group, writes the gradient of x, and
leaves what each channel of each sample adds to the gradients of weight and bias. Those are added up over the batch,
in a fixed order, by `sums_of_parts`.
"""

from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.batch_norm.statistics_program import add_moments
from tileops.kernels.compiled_program import traced
from tileops.kernels.group_norm.group_row_program import (
    affine_shape,
    affine_type,
    affine_width,
    groups_of,
    load_affine,
    load_chunk,
    take_first,
)
from tileops.kernels.group_norm.split_plan import PiecePlan, SplitPlan
from tileops.kernels.row_backward_sums_program import sums_of_parts
from tileops.kernels.shared_program import (
    WARP,
    block_merge_moments,
    block_sum,
    group_merge_moments,
    group_sum,
    merge_moments,
    store_row_at,
    tilelang_dtype,
)

__all__ = ["SUMS", "group_norm_piece_sums", "group_norm_split_gradients", "sums_over_batch"]

SUMS = 4
"""What the first program leaves of a piece: mean and M2 of x, the sum of grad, the sum of grad * x.

x is counted from the first value of its group, in every dtype; see `take_first`.
"""

DISTANCES = torch.float32
"""As what `add_moments` takes any dtype here: its values are then distances from the origin."""


def group_norm_piece_sums(plan: PiecePlan, channels: int, dtype: torch.dtype) -> Any:
    """The sums of each piece of each channel of each sample, into sums (SUMS, runs, pieces).

    The program takes grad and x as (runs, spatial), a run being one channel of one sample, and sums.
    """
    vector, unroll, lanes, spatial, pieces = plan.vector, plan.unroll, plan.lanes, plan.spatial, plan.pieces
    element = tilelang_dtype(dtype)
    warps = max(1, lanes // WARP)
    runs = T.dynamic("runs")

    @traced(T.macro)
    def add_products(totals, held_grad, held_x, origin, first, end):
        for step in T.unroll(unroll):
            if first + step * lanes < end:
                for j in T.unroll(vector):
                    slope = T.cast(held_grad[step, j], "float32")
                    totals[0] = totals[0] + slope
                    totals[1] = totals[1] + slope * (T.cast(held_x[step, j], "float32") - origin[0])

    @traced(T.prim_func)
    def group_norm_piece_sums(
        grad: T.Tensor((runs, spatial), element),
        x: T.Tensor((runs, spatial), element),
        sums: T.Tensor((SUMS, runs, pieces), "float32"),
    ):
        with T.Kernel(T.ceildiv(runs * pieces, plan.pieces_per_block), threads=plan.threads) as block:
            T.annotate_min_blocks_per_sm(plan.blocks_per_sm)
            held_x = T.alloc_local((unroll, vector), element)
            held_grad = T.alloc_local((unroll, vector), element)
            moments = T.alloc_local((3,), "float32")
            totals = T.alloc_local((2,), "float32")
            origin = T.alloc_local((1,), "float32")
            slots = T.alloc_shared((warps, 3), "float32")
            slots_of_totals = T.alloc_shared((warps, 2), "float32")
            first = T.alloc_var("int32")
            end = T.alloc_var("int32")
            at = T.alloc_local((1,), "int32")
            thread = T.get_thread_binding()
            lane = thread % lanes
            # Lanes past the last piece read it again: the exchanges need every lane.
            at[0] = T.min(block * plan.pieces_per_block + thread // lanes, runs * pieces - 1)
            run = T.truncdiv(at[0], pieces)
            piece = T.truncmod(at[0], pieces)

            first = piece * plan.piece_vectors + lane
            end = T.min((piece + 1) * plan.piece_vectors, plan.vectors)
            take_first(origin, x, T.truncdiv(run, channels) * channels, vector, dtype)
            for i in T.unroll(3):
                moments[i] = 0.0
            for i in T.unroll(2):
                totals[i] = 0.0
            for _ in T.serial(plan.turns):
                load_chunk(x, held_x, run, first, end, lanes, unroll, vector)
                load_chunk(grad, held_grad, run, first, end, lanes, unroll, vector)
                add_moments(moments, held_x, origin, DISTANCES, first, lanes, end, unroll, vector)
                add_products(totals, held_grad, held_x, origin, first, end)
                first = first + lanes * unroll
            if lanes > WARP:
                block_merge_moments(moments, slots, lanes)
                block_sum(totals, slots_of_totals, 2, lanes)
            else:
                group_merge_moments(moments, lanes)
                group_sum(totals, 2, lanes)
            if lane == 0:
                sums[0, run, piece] = moments[1]
                sums[1, run, piece] = moments[2]
                sums[2, run, piece] = totals[0]
                sums[3, run, piece] = totals[1]

    return group_norm_piece_sums


def group_norm_split_gradients(
    plan: SplitPlan,
    pieces_plan: PiecePlan,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    need: tuple[bool, bool, bool],
) -> Any:
    """The gradient of x, and what each channel of each sample adds to those of weight and bias.

    With x̂ = (x - mean) / deviation and g = grad * weight, in float32: grad_x = (g - mean(g) - x̂ * mean(g * x̂)) /
    deviation, and the sums over a channel of grad * x̂ and of grad.

    The program takes grad (rows, n), x (rows, n), weight (all channels) or None, sums (SUMS, rows, pieces of a row),
    grad_x (rows, n) or None, added (sums wanted, rows, channels) or None, then into how many parts of how many
    vectors a row is cut, and eps. A block takes one part; without grad_x one part is a row.
    """
    n, vector, unroll, threads = plan.n, plan.vector, plan.unroll, plan.threads
    spatial, pieces = pieces_plan.spatial, pieces_plan.pieces
    channels = n // spatial
    width = affine_width(vector, spatial)
    of_x, of_weight, of_bias = need
    has_weight = weight_dtype is not None and of_x
    kept = of_weight + of_bias
    element = tilelang_dtype(dtype)
    rows = T.dynamic("rows")
    all_channels = T.dynamic("all_channels") if has_weight else channels

    @traced(T.macro)
    def load(held_x, held_grad, scale, x, grad, weight, row, group, first, end):
        load_chunk(x, held_x, row, first, end, threads, unroll, vector)
        load_chunk(grad, held_grad, row, first, end, threads, unroll, vector)
        for step in T.unroll(unroll):
            if has_weight and (first + step * threads < end):
                column = (first + step * threads) * vector
                load_affine(scale, step * width, weight, group, column, vector, channels, spatial)

    @traced(T.macro)
    def merge_pieces(moments, totals, sums, weight, row, group, thread):
        """`moments` become those of x, `totals` the sums of g and g * x, of what the thread takes of the row."""
        of_channel = T.alloc_local((1,), affine_type(weight_dtype))
        for turn in T.serial(T.ceildiv(channels * pieces, threads)):
            at = turn * threads + thread
            if at < channels * pieces:
                piece = T.truncmod(at, pieces)
                count = T.min(pieces_plan.vectors - piece * pieces_plan.piece_vectors, pieces_plan.piece_vectors)
                merge_moments(
                    moments, T.cast(count * pieces_plan.vector, "float32"), sums[0, row, at], sums[1, row, at]
                )
                scale = T.alloc_var("float32")
                scale = 1.0
                if has_weight:
                    load_affine(of_channel, 0, weight, group, T.truncdiv(at, pieces), 1, channels, 1)
                    scale = T.cast(of_channel[0], "float32")
                totals[0] = totals[0] + scale * sums[2, row, at]
                totals[1] = totals[1] + scale * sums[3, row, at]

    @traced(T.macro)
    def keep_added(added, sums, row, mean, invstd, thread):
        """Write what the channels of the row add to the gradients of weight and bias."""
        total = T.alloc_local((2,), "float32")
        for turn in T.serial(T.ceildiv(channels, threads)):
            channel = turn * threads + thread
            if channel < channels:
                total[0] = 0.0
                total[1] = 0.0
                for piece in T.serial(pieces):
                    total[0] = total[0] + sums[2, row, channel * pieces + piece]
                    total[1] = total[1] + sums[3, row, channel * pieces + piece]
                if of_weight:
                    added[0, row, channel] = (total[1] - mean * total[0]) * invstd
                if of_bias:
                    added[kept - 1, row, channel] = total[0]

    @traced(T.prim_func)
    def group_norm_split_gradients(
        grad: T.Tensor((rows, n), element),
        x: T.Tensor((rows, n), element),
        weight: T.Tensor(affine_shape(weight_dtype if of_x else None, all_channels), affine_type(weight_dtype)),
        sums: T.Tensor((SUMS, rows, channels * pieces), "float32"),
        grad_x: T.Tensor((rows, n), element),
        added: T.Tensor((max(kept, 1), rows, channels), "float32"),
        parts: T.int32,
        part_vectors: T.int32,
        eps: T.float32,
    ):
        with T.Kernel(parts * rows, threads=threads) as block:
            T.annotate_min_blocks_per_sm(plan.blocks_per_sm)
            held_x = T.alloc_local((unroll, vector), element)
            held_grad = T.alloc_local((unroll, vector), element)
            result = T.alloc_local((vector,), element)
            scale = T.alloc_local((unroll * width,), affine_type(weight_dtype))
            moments = T.alloc_local((3,), "float32")
            totals = T.alloc_local((2,), "float32")
            origin = T.alloc_local((1,), "float32")
            slots = T.alloc_shared((threads // WARP, 3), "float32")
            slots_of_totals = T.alloc_shared((threads // WARP, 2), "float32")
            group = T.alloc_var("int32")
            first = T.alloc_var("int32")
            end = T.alloc_var("int32")
            thread = T.get_thread_binding()
            row = rows - 1 - T.truncdiv(block, parts)
            part = parts - 1 - T.truncmod(block, parts)

            chunks = T.ceildiv(part_vectors, plan.chunk_vectors)
            first = part * part_vectors + (chunks - 1) * plan.chunk_vectors + thread
            end = T.min((part + 1) * part_vectors, plan.vectors)
            if has_weight:
                group = T.truncmod(row, groups_of(all_channels, channels))
            # Under way while the pieces are merged.
            if of_x:
                load(held_x, held_grad, scale, x, grad, weight, row, group, first, end)
            take_first(origin, x, row, vector, dtype)
            for i in T.unroll(3):
                moments[i] = 0.0
            for i in T.unroll(2):
                totals[i] = 0.0
            merge_pieces(moments, totals, sums, weight, row, group, thread)
            block_merge_moments(moments, slots, threads)
            block_sum(totals, slots_of_totals, 2, threads)
            mean = moments[1]
            invstd = T.alloc_var("float32")
            invstd = T.rsqrt(moments[2] * (1.0 / n) + eps)
            mean_of_g = T.alloc_var("float32")
            mean_of_g = totals[0] * (1.0 / n)
            along = T.alloc_var("float32")
            along = (totals[1] - mean * totals[0]) * invstd * (1.0 / n)

            if kept and (part == 0):
                keep_added(added, sums, row, mean, invstd, thread)
            if of_x:
                for turn in T.serial(chunks):
                    for step in T.unroll(unroll):
                        if first + step * threads < end:
                            for j in T.unroll(vector):
                                unit = (T.cast(held_x[step, j], "float32") - origin[0] - mean) * invstd
                                slope = T.cast(held_grad[step, j], "float32")
                                if has_weight:
                                    slope = slope * T.cast(scale[step * width + (j if width > 1 else 0)], "float32")
                                result[j] = T.cast((slope - mean_of_g - unit * along) * invstd, element)
                            store_row_at(grad_x, row, (first + step * threads) * vector, result, 0, vector)
                    first = first - plan.chunk_vectors
                    if turn + 1 < chunks:
                        load(held_x, held_grad, scale, x, grad, weight, row, group, first, end)

    return group_norm_split_gradients


def sums_over_batch(weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None, *, launched_early: bool) -> Any:
    """`sums_of_parts` for any number of channels: samples are the parts."""
    all_channels: Any = T.dynamic("all_channels")
    return sums_of_parts(all_channels, weight_dtype, bias_dtype, launched_early=launched_early)
