# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""Group norm's backward for groups that fit in the registers of a block or of a cluster: x and gradient are read once.

A warp keeps to one channel at a time, so the sums over a channel, which the gradients of weight and bias want, are
sums over its lanes. Every warp puts its sums into the shared memory of all blocks that share the row; behind a single
barrier all else follows from them.

TileLang places no barriers in such a program; the one that it needs is written here.
"""

import functools
from collections.abc import Callable
from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.batch_norm.cluster_program import clusters
from tileops.kernels.compiled_program import compile_sized_program, traced
from tileops.kernels.group_norm.group_row_program import affine_shape, affine_type, groups_of, load_affine, take_first
from tileops.kernels.group_norm.held_backward_plan import HeldBackwardPlan
from tileops.kernels.row_plan import ceil_div
from tileops.kernels.shared_program import WARP, group_sum, load_row_at, store_row_at, tilelang_dtype

__all__ = ["group_norm_held_backward"]

SUMS = 4
"""Of each part: values and squared deviations from their mean, grad, grad * x. x is counted as `take_first` says."""


@functools.cache  # as `compiled_once`
def group_norm_held_backward(
    plan: HeldBackwardPlan,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    need: tuple[bool, bool, bool],
    arch: int,
) -> Callable[..., Any]:
    """Compile what `group_norm_split_gradients` computes, in one launch.

    It takes grad (rows, n), x (rows, n), weight (all channels) or None, grad_x (rows, n) or None, added
    (sums wanted, rows, channels) or None, and eps.
    """
    channels, spatial, vector, share = plan.channels, plan.spatial, plan.vector, plan.warps_per_channel
    n, elements = channels * spatial, plan.steps * vector
    of_x, of_weight, of_bias = need
    has_weight = weight_dtype is not None and of_x
    kept = of_weight + of_bias
    element = tilelang_dtype(dtype)
    packed = dtype.itemsize < 4 and vector > 1
    steps, together = tuple(range(plan.steps)), tuple(range(plan.channels_per_warp))
    turns = tuple(range(ceil_div(plan.slots, WARP)))
    mine_shape = (plan.warps, len(together), SUMS) if plan.blocks > 1 else (1, 1, 1)
    rows: Any = T.dynamic("rows")
    all_channels = T.dynamic("all_channels") if has_weight else channels

    def place(step, part, lane):
        """The vector of a channel that `lane` of the channel's warp `part` takes in `step`."""
        return (step * share + part) * WARP + lane

    def holds(step, part, lane):
        return True if (step + 1) * share * WARP <= plan.vectors else place(step, part, lane) < plan.vectors

    def elements_of_part(part):
        """Elements of a channel that its warp `part` holds (float32)."""
        vectors = 0
        for step in steps:
            vectors = vectors + T.max(0, T.min(WARP, plan.vectors - (step * share + part) * WARP))
        return T.cast(vectors * vector, "float32")

    @traced(T.macro)
    def sum_part(totals, held_x, held_grad, origin, at, part, lane):
        """`totals` (float32, local, SUMS) become the sums of a warp's part of a channel, held from `at` on."""
        squares = T.alloc_local((1,), "float32")
        for i in T.unroll(SUMS):
            totals[i] = 0.0
        for step in steps:
            if holds(step, part, lane):
                for j in T.unroll(vector):
                    value = T.cast(held_x[at + step * vector + j], "float32") - origin[0]
                    slope = T.cast(held_grad[at + step * vector + j], "float32")
                    totals[0] = totals[0] + value
                    totals[2] = totals[2] + slope
                    totals[3] = totals[3] + slope * value
        if packed:
            T.warpgroup_fence_operand(held_x)
            T.warpgroup_fence_operand(held_grad)
        group_sum(totals, SUMS, WARP)
        mean = totals[0] / T.max(elements_of_part(part), 1.0)
        squares[0] = 0.0
        for step in steps:
            if holds(step, part, lane):
                for j in T.unroll(vector):
                    deviation = T.cast(held_x[at + step * vector + j], "float32") - origin[0] - mean
                    squares[0] = squares[0] + deviation * deviation
        if packed:
            T.warpgroup_fence_operand(held_x)
        group_sum(squares, 1, WARP)
        totals[1] = squares[0]

    @traced(T.macro)
    def merge_parts(totals, slots, first_slot, scale_of_slot, lane):
        """`totals` become those of the row: values, squares about its mean, g and g * x."""
        mine = T.alloc_local((len(turns), 2), "float32")
        squares = T.alloc_local((1,), "float32")
        for i in T.unroll(SUMS):
            totals[i] = 0.0
        for turn in turns:
            mine[turn, 0] = 0.0
            mine[turn, 1] = 0.0
            if turn * WARP + lane < plan.slots:
                slot = first_slot + turn * WARP + lane
                mine[turn, 0] = slots[slot, 0]
                mine[turn, 1] = slots[slot, 1]
                totals[0] = totals[0] + slots[slot, 0]
                totals[2] = totals[2] + slots[slot, 2] * scale_of_slot[turn]
                totals[3] = totals[3] + slots[slot, 3] * scale_of_slot[turn]
        group_sum(totals, SUMS, WARP)
        squares[0] = 0.0
        for turn in turns:
            if turn * WARP + lane < plan.slots:
                count = elements_of_part(T.truncmod(turn * WARP + lane, share))
                deviation = mine[turn, 0] / T.max(count, 1.0) - totals[0] * (1.0 / n)
                squares[0] = squares[0] + mine[turn, 1] + count * deviation * deviation
        group_sum(squares, 1, WARP)
        totals[1] = squares[0]

    @traced(T.prim_func)
    def main(
        grad: T.Tensor((rows, n), element),
        x: T.Tensor((rows, n), element),
        weight: T.Tensor(affine_shape(weight_dtype if of_x else None, all_channels), affine_type(weight_dtype)),
        grad_x: T.Tensor((rows, n), element),
        added: T.Tensor((max(kept, 1), rows, channels), "float32"),
        eps: T.float32,
    ):
        with clusters(T.ceildiv(rows, plan.rows_per_block), plan.blocks, plan.rows_per_block * plan.warps) as block:
            if plan.blocks > 1:
                T.cluster_arrive_relaxed()
            held_x = T.alloc_local((len(together) * elements,), element)
            held_grad = T.alloc_local((len(together) * elements,), element)
            result = T.alloc_local((vector,), element)
            totals = T.alloc_local((SUMS,), "float32")
            origin = T.alloc_local((1,), "float32")
            scale = T.alloc_local((len(together),), "float32")
            scale_of_slot = T.alloc_local((len(turns),), "float32")
            of_channel = T.alloc_local((1,), affine_type(weight_dtype))
            slots = T.alloc_shared((plan.rows_per_block * plan.slots, SUMS), "float32")
            mine = T.alloc_shared(mine_shape, "float32")
            group = T.alloc_var("int32")
            lane = T.get_thread_binding(0)
            row_of_block = T.truncdiv(T.get_thread_binding(1), plan.warps)
            # Among the warps of the row.
            warp = T.truncmod(T.get_thread_binding(1), plan.warps) + T.truncmod(block, plan.blocks) * plan.warps
            part = T.truncmod(warp, share)
            first_channel = T.truncdiv(warp, share) * len(together)
            # A warp past the last row reads it again: it meets the others at the barrier.
            place_of_row = T.truncdiv(block, plan.blocks) * plan.rows_per_block + row_of_block
            row = T.min(place_of_row, rows - 1)

            for k in together:
                if first_channel + k < channels:
                    for step in steps:
                        if holds(step, part, lane):
                            column = (first_channel + k) * spatial + place(step, part, lane) * vector
                            load_row_at(held_x, k * elements + step * vector, x, None, row, column, vector)
                            load_row_at(held_grad, k * elements + step * vector, grad, None, row, column, vector)
            take_first(origin, x, row, vector, dtype)
            if has_weight:
                group = T.truncmod(row, groups_of(all_channels, channels))
            for k in together:
                scale[k] = 1.0
                if has_weight and (first_channel + k < channels):
                    load_affine(of_channel, 0, weight, group, first_channel + k, 1, channels, 1)
                    scale[k] = T.cast(of_channel[0], "float32")
            for turn in turns:
                scale_of_slot[turn] = 1.0
                if has_weight and (turn * WARP + lane < plan.slots):
                    load_affine(of_channel, 0, weight, group, T.truncdiv(turn * WARP + lane, share), 1, channels, 1)
                    scale_of_slot[turn] = T.cast(of_channel[0], "float32")

            if plan.blocks > 1:
                T.cluster_wait()  # no block may write into one that has not started
            for k in together:
                if first_channel + k < channels:
                    sum_part(totals, held_x, held_grad, origin, k * elements, part, lane)
                    slot = row_of_block * plan.slots + (first_channel + k) * share + part
                    if plan.blocks > 1:
                        # Every lane writes the same, and reads back what it wrote itself.
                        for i in T.unroll(SUMS):
                            mine[T.get_thread_binding(1), k, i] = totals[i]
                        for other in list(range(plan.blocks)):
                            T.copy_cluster(mine[T.get_thread_binding(1), k, :], slots[slot, :], dst_block=other)
                    else:
                        if lane == 0:
                            for i in T.unroll(SUMS):
                                slots[slot, i] = totals[i]
            if plan.blocks > 1:
                T.cluster_sync()
            else:
                T.sync_threads()
            merge_parts(totals, slots, row_of_block * plan.slots, scale_of_slot, lane)
            mean = T.alloc_var("float32")
            mean = totals[0] * (1.0 / n)
            invstd = T.alloc_var("float32")
            invstd = T.rsqrt(totals[1] * (1.0 / n) + eps)
            mean_of_g = T.alloc_var("float32")
            mean_of_g = totals[2] * (1.0 / n)
            along = T.alloc_var("float32")
            along = (totals[3] - mean * totals[2]) * invstd * (1.0 / n)

            if place_of_row < rows:
                if of_x:
                    for k in together:
                        if first_channel + k < channels:
                            for step in steps:
                                if holds(step, part, lane):
                                    for j in T.unroll(vector):
                                        i = k * elements + step * vector + j
                                        unit = (T.cast(held_x[i], "float32") - origin[0] - mean) * invstd
                                        slope = T.cast(held_grad[i], "float32") * scale[k]
                                        result[j] = T.cast((slope - mean_of_g - unit * along) * invstd, element)
                                    column = (first_channel + k) * spatial + place(step, part, lane) * vector
                                    store_row_at(grad_x, row, column, result, 0, vector)
                if kept:
                    for turn in T.serial(ceil_div(channels, plan.blocks * plan.warps * WARP)):
                        channel = (turn * (plan.blocks * plan.warps) + warp) * WARP + lane
                        if channel < channels:
                            for i in T.unroll(2):
                                totals[2 + i] = 0.0
                            for other in T.serial(share):
                                for i in T.unroll(2):
                                    slot = row_of_block * plan.slots + channel * share + other
                                    totals[2 + i] = totals[2 + i] + slots[slot, 2 + i]
                            if of_weight:
                                added[0, row, channel] = (totals[3] - mean * totals[2]) * invstd
                            if of_bias:
                                added[kept - 1, row, channel] = totals[2]

    return compile_sized_program(main, arch, plan.registers)
