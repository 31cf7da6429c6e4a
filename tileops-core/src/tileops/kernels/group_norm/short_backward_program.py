# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""Group norm's backward for short groups of short channels: a block walks over the samples of one group.

A part of a warp takes a row. The sums over the batch stay with the threads that own the columns, so a block writes
those of its samples once; where one block takes all samples of its group, that is the result.
"""

from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.compiled_program import traced
from tileops.kernels.group_norm.group_row_program import affine_type, affine_width, load_affine, take_first
from tileops.kernels.row_plan import RowPlan
from tileops.kernels.shared_program import WARP, group_sum, load_row, store_row_at, tilelang_dtype

__all__ = ["group_norm_short_backward"]


def group_norm_short_backward(
    plan: RowPlan,
    channels: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    need: tuple[bool, bool, bool],
) -> Any:
    """The gradients of x, weight and bias; with x̂ and g as in `group_norm_split_gradients`.

    The program takes grad (rows, n), x (rows, n), weight (all channels) or None, grad_x (rows, n) or None, grad_weight
    (all channels) or None, grad_bias likewise, partials (sums wanted, parts, all channels) or None, the number of groups,
    the number of parts into which the samples are cut, and eps. Of one part the sums are the gradients; of several
    they are left in partials.
    """
    n, vector, lanes = plan.n, plan.vector, plan.lanes
    spatial, warps, teams = n // channels, plan.threads // WARP, plan.rows_per_block
    width = affine_width(vector, spatial)
    of_x, of_weight, of_bias = need
    kept = of_weight + of_bias
    has_weight = weight_dtype is not None
    element = tilelang_dtype(dtype)
    weight_type, bias_type = affine_type(weight_dtype), affine_type(bias_dtype)
    hops = tuple(hop for hop in (16, 8, 4, 2, 1) if hop >= lanes)
    rows, all_channels = T.dynamic("rows"), T.dynamic("all_channels") if has_weight or kept else 1
    parts_kept = T.dynamic("parts_kept") if kept else 1

    def shape(wanted):
        return (all_channels if wanted else 1,)

    @traced(T.macro)
    def sum_row(totals, held_x, held_grad, scale, origin, lane):
        """`totals` (float32, local, 4) become the row's sums of values, squares about the mean, g and g * value."""
        squares = T.alloc_local((1,), "float32")
        for i in T.unroll(4):
            totals[i] = 0.0
        for step in plan.steps:
            if plan.holds(step, lane):
                for j in T.unroll(vector):
                    value = T.cast(held_x[step * vector + j], "float32") - origin[0]
                    slope = T.cast(held_grad[step * vector + j], "float32")
                    if has_weight:
                        slope = slope * T.cast(scale[step * width + (j if width > 1 else 0)], "float32")
                    totals[0] = totals[0] + value
                    totals[2] = totals[2] + slope
                    totals[3] = totals[3] + slope * value
        group_sum(totals, 4, lanes)
        squares[0] = 0.0
        for step in plan.steps:
            if plan.holds(step, lane):
                for j in T.unroll(vector):
                    deviation = T.cast(held_x[step * vector + j], "float32") - origin[0] - totals[0] * (1.0 / n)
                    squares[0] = squares[0] + deviation * deviation
        group_sum(squares, 1, lanes)
        totals[1] = squares[0]

    @traced(T.macro)
    def write_sum(grad_weight, grad_bias, partials, which, part, parts, channel, total):
        if parts > 1:
            partials[which, part, channel] = total
        else:
            if of_weight and of_bias:
                if which == 0:
                    grad_weight[channel] = T.cast(total, weight_type)
                else:
                    grad_bias[channel] = T.cast(total, bias_type)
            elif of_weight:
                grad_weight[channel] = T.cast(total, weight_type)
            else:
                grad_bias[channel] = T.cast(total, bias_type)

    @traced(T.prim_func)
    def group_norm_short_backward(
        grad: T.Tensor((rows, n), element),
        x: T.Tensor((rows, n), element),
        weight: T.Tensor(shape(has_weight), weight_type),
        grad_x: T.Tensor((rows, n), element),
        grad_weight: T.Tensor(shape(of_weight), weight_type),
        grad_bias: T.Tensor(shape(of_bias), bias_type),
        partials: T.Tensor((max(kept, 1), parts_kept, all_channels if kept else 1), "float32"),
        groups: T.int32,
        parts: T.int32,
        eps: T.float32,
    ):
        with T.Kernel(groups * parts, threads=plan.threads) as block:
            held_x = T.alloc_local((plan.elements,), element)
            held_grad = T.alloc_local((plan.elements,), element)
            result = T.alloc_local((vector,), element)
            scale = T.alloc_local((len(plan.steps) * width,), weight_type)
            totals = T.alloc_local((4,), "float32")
            origin = T.alloc_local((1,), "float32")
            sums = T.alloc_local((2, plan.elements), "float32")
            total = T.alloc_local((1,), "float32")
            slots = T.alloc_shared((2, warps, n) if kept else (1, 1, 1), "float32")
            group = T.alloc_var("int32")
            sample = T.alloc_var("int32")
            thread = T.get_thread_binding()
            lane = thread % lanes
            part = T.truncdiv(block, groups)
            samples = T.truncdiv(rows, groups)

            group = T.truncmod(block, groups)
            sample = part * teams + thread // lanes
            for step in plan.steps:
                if has_weight and plan.holds(step, lane):
                    load_affine(scale, step * width, weight, group, plan.column(step, lane), vector, channels, spatial)
            for which in T.unroll(2):
                for i in T.unroll(plan.elements):
                    sums[which, i] = 0.0
            for _ in T.serial(T.ceildiv(samples - part * teams, parts * teams)):
                # Lanes past the last sample read it again: the exchanges need every lane.
                row = T.min(sample, samples - 1) * groups + group
                load_row(held_x, x, None, row, plan, lane)
                load_row(held_grad, grad, None, row, plan, lane)
                take_first(origin, x, row, vector, dtype)
                sum_row(totals, held_x, held_grad, scale, origin, lane)
                mean = totals[0] * (1.0 / n)
                invstd = T.alloc_var("float32")
                invstd = T.rsqrt(totals[1] * (1.0 / n) + eps)
                along = T.alloc_var("float32")
                along = (totals[3] - mean * totals[2]) * invstd * (1.0 / n)
                if sample < samples:
                    for step in plan.steps:
                        if plan.holds(step, lane):
                            for j in T.unroll(vector):
                                i = step * vector + j
                                unit = (T.cast(held_x[i], "float32") - origin[0] - mean) * invstd
                                slope = T.cast(held_grad[i], "float32")
                                sums[0, i] = sums[0, i] + slope * unit
                                sums[1, i] = sums[1, i] + slope
                                if has_weight:
                                    slope = slope * T.cast(scale[step * width + (j if width > 1 else 0)], "float32")
                                result[j] = T.cast((slope - totals[2] * (1.0 / n) - unit * along) * invstd, element)
                            if of_x:
                                store_row_at(grad_x, row, plan.column(step, lane), result, 0, vector)
                sample = sample + parts * teams

            if kept:
                # Over the rows of a warp, then over warps and the elements of each channel.
                for which in T.unroll(2):
                    for i in T.unroll(plan.elements):
                        for hop in hops:
                            sums[which, i] = sums[which, i] + T.shfl_xor(sums[which, i], hop)
                if thread % WARP < lanes:
                    for step in plan.steps:
                        if plan.holds(step, lane):
                            for which in T.unroll(2):
                                for j in T.unroll(vector):
                                    column = plan.column(step, lane) + j
                                    slots[which, thread // WARP, column] = sums[which, step * vector + j]
                T.sync_threads()
                for turn in T.serial(T.ceildiv(kept * channels, plan.threads)):
                    at = turn * plan.threads + thread
                    if at < kept * channels:
                        which = T.truncdiv(at, channels)
                        channel = T.truncmod(at, channels)
                        total[0] = 0.0
                        for warp in T.serial(warps):
                            for i in T.serial(spatial):
                                from_sum = which if of_weight else 1
                                total[0] = total[0] + slots[from_sum, warp, channel * spatial + i]
                        write_sum(
                            grad_weight, grad_bias, partials, which, part, parts, group * channels + channel, total[0]
                        )

    return group_norm_short_backward
