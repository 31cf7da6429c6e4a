# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""Several blocks a tile of columns: the sums of each part, then every block adds them up and writes the gradient of x.

Parts are as in the forward; see ``split_column_program``. Where the gradient of x needs no sums, as in inference,
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
    gradients_of_x,
    keep_part,
    keep_sums,
    put_rows,
    scaled_gradients,
    settle_gradients,
)
from tileops.kernels.batch_norm.column_program import channel_totals, lane_statistic, read_rows, read_table
from tileops.kernels.batch_norm.split_column_program import MOST_READERS
from tileops.kernels.batch_norm.statistics_program import FLOAT32, affine_dtype
from tileops.kernels.compiled_program import compile_program, traced
from tileops.kernels.shared_program import WARP, tilelang_dtype

__all__ = ["split_column_gradient_program", "split_column_sums_program"]


@functools.cache
def split_column_sums_program(
    arch: int,
    c: int,
    run: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    *,
    wanted: tuple[bool, bool],
    closes: bool,
    writes: bool,
    vector: int,
    across: int,
    threads: int,
    unroll: int,
    min_blocks: int,
) -> Callable[..., Any]:
    """Compile ``(grad, x, mean, invstd, weight, grad_x, partials, chunks, count, grad_weight, grad_bias)``.

    x is (rows, c * run). The sums of grad * x̂ and of grad in each of ``count`` parts of each channel, as far as they are
    ``wanted``, go into partials (sums, count, c). If the program ``closes``, those of the only part go into the last
    two. If it ``writes``, grad_x becomes grad * invstd * weight. None in place of what is neither read nor written.
    """
    element = tilelang_dtype(dtype)
    vectors = c * run // vector
    channels = across * vector // run
    tiles = -(-vectors // across)
    down = threads // across
    rows = T.dynamic("rows", "int64")
    of_unit, _ = wanted
    sums_wanted = sum(wanted)
    parts = T.dynamic("parts") if sums_wanted else 1

    @traced(T.prim_func)
    def main(
        grad: T.Tensor((rows, c * run), element),
        x: T.Tensor((rows, c * run), element),
        mean: T.Tensor((c,), FLOAT32),
        invstd: T.Tensor((c,), FLOAT32),
        weight: T.Tensor((c,), affine_dtype(weight_dtype)),
        grad_x: T.Tensor((rows, c * run), element),
        partials: T.Tensor((max(sums_wanted, 1), parts, c), FLOAT32),
        chunks: T.int32,
        count: T.int32,
        grad_weight: T.Tensor((c,), affine_dtype(weight_dtype)),
        grad_bias: T.Tensor((c,), affine_dtype(bias_dtype)),
    ):
        with T.Kernel(count * tiles, threads=threads) as block:
            T.annotate_min_blocks_per_sm(min_blocks)
            thread = T.get_thread_binding()
            # Tiles first: blocks that run together read whole rows.
            tile = block % tiles
            part = block // tiles
            column = tile * across + thread % across
            row = T.alloc_var("int32")
            limit = T.alloc_var("int32")
            grads = T.alloc_local((unroll, vector), element)
            values = T.alloc_local((unroll, vector), element)
            centre = T.alloc_local((vector,), FLOAT32)
            scale = T.alloc_local((vector,), FLOAT32)
            factor = T.alloc_local((vector,), FLOAT32)
            products = T.alloc_local((vector,), FLOAT32)
            plain = T.alloc_local((vector,), FLOAT32)
            sums = T.alloc_local((2,), FLOAT32)
            slots = T.alloc_shared((down, channels * run + 1), FLOAT32)
            totals = T.alloc_shared((channels,), FLOAT32)
            part_rows = chunks * (down * unroll)
            base = T.cast(part, "int64") * part_rows

            limit = T.cast(T.min(rows - base, T.cast(part_rows, "int64")), "int32")
            limit = T.if_then_else((column < vectors) and (thread // across < down), limit, 0)
            row = thread // across
            for lane in T.unroll(vector):
                products[lane] = 0.0
                plain[lane] = 0.0
                factor[lane] = 1.0
                centre[lane] = 0.0
            if of_unit:
                lane_statistic(centre, mean, column, c, run, vector)
            if writes:
                if weight_dtype is not None:
                    lane_statistic(factor, weight, column, c, run, vector)
                lane_statistic(scale, invstd, column, c, run, vector)
                for lane in T.unroll(vector):
                    scale[lane] = scale[lane] * factor[lane]
            clear(values, unroll, vector)
            for _ in T.serial(chunks):
                clear(grads, unroll, vector)
                read_rows(grad, grads, base, row, limit, column, down, unroll, vector)
                if of_unit:
                    read_rows(x, values, base, row, limit, column, down, unroll, vector)
                add_products(products, plain, grads, values, centre, unroll, vector)
                if writes:
                    scaled_gradients(grads, scale, dtype, unroll, vector)
                    put_rows(grad_x, grads, base, row, limit, column, down, unroll, vector)
                row = row + down * unroll
            # The first threads have a channel each to settle.
            channel = tile * channels + thread
            settles = (thread < channels) and (channel < c)
            if of_unit:
                channel_totals(products, slots, totals, thread, across, down, run, channels, vector, threads // WARP)
                if settles:
                    sums[0] = totals[thread] * invstd[channel]
            if wanted[1]:
                channel_totals(plain, slots, totals, thread, across, down, run, channels, vector, threads // WARP)
                if settles:
                    sums[1] = totals[thread]
            if settles:
                keep_part(sums, channel, part, count, partials, grad_weight, grad_bias, wanted, closes)

    return compile_program(main, arch)


@functools.cache
def split_column_gradient_program(
    arch: int,
    c: int,
    run: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    need: tuple[bool, bool, bool],
    *,
    vector: int,
    across: int,
    threads: int,
    unroll: int,
    min_blocks: int,
) -> Callable[..., Any]:
    """Compile ``(grad, x, mean, invstd, weight, partials, chunks, grad_x, grad_weight, grad_bias)``.

    Partials (2, parts, c) are what the sums program left. None in place of what is absent or not needed.
    """
    element = tilelang_dtype(dtype)
    vectors = c * run // vector
    channels = across * vector // run
    tiles = -(-vectors // across)
    down = threads // across
    readers = min(threads // channels, MOST_READERS)  # threads that share the parts of a channel
    rows = T.dynamic("rows", "int64")
    parts = T.dynamic("parts")

    @traced(T.prim_func)
    def main(
        grad: T.Tensor((rows, c * run), element),
        x: T.Tensor((rows, c * run), element),
        mean: T.Tensor((c,), FLOAT32),
        invstd: T.Tensor((c,), FLOAT32),
        weight: T.Tensor((c,), affine_dtype(weight_dtype)),
        partials: T.Tensor((2, parts, c), FLOAT32),
        chunks: T.int32,
        grad_x: T.Tensor((rows, c * run), element),
        grad_weight: T.Tensor((c,), affine_dtype(weight_dtype)),
        grad_bias: T.Tensor((c,), affine_dtype(bias_dtype)),
    ):
        with T.Kernel(parts * tiles, threads=threads) as block:
            T.annotate_min_blocks_per_sm(min_blocks)
            thread = T.get_thread_binding()
            tile = tiles - 1 - block % tiles
            part = parts - 1 - block // tiles
            column = tile * across + thread % across
            row = T.alloc_var("int32")
            limit = T.alloc_var("int32")
            grads = T.alloc_local((unroll, vector), element)
            values = T.alloc_local((unroll, vector), element)
            centre = T.alloc_local((vector,), FLOAT32)
            scale = T.alloc_local((vector,), FLOAT32)
            slope = T.alloc_local((vector,), FLOAT32)
            shift = T.alloc_local((vector,), FLOAT32)
            sums = T.alloc_local((2,), FLOAT32)
            slots = T.alloc_shared((readers, channels, 2), FLOAT32)
            table = T.alloc_shared((3, channels), FLOAT32)  # scale, slope, shift
            part_rows = chunks * (down * unroll)
            base = T.cast(part, "int64") * part_rows

            limit = T.cast(T.min(rows - base, T.cast(part_rows, "int64")), "int32")
            limit = T.if_then_else((column < vectors) and (thread // across < down), limit, 0)
            row = thread // across + down * unroll * (chunks - 1)
            # Under way while the sums are added up.
            read_rows(grad, grads, base, row, limit, column, down, unroll, vector)
            read_rows(x, values, base, row, limit, column, down, unroll, vector)
            lane_statistic(centre, mean, column, c, run, vector)

            # Each channel's parts, by `readers` threads in turns, then their results in order.
            place = thread % channels
            reader = thread // channels
            channel = tile * channels + place
            for i in T.unroll(2):
                sums[i] = 0.0
            if (reader < readers) and (channel < c):
                for turn in T.serial(T.ceildiv(parts - reader, readers)):
                    for i in T.unroll(2):
                        sums[i] = sums[i] + partials[i, turn * readers + reader, channel]
            if reader < readers:
                for i in T.unroll(2):
                    slots[reader, place, i] = sums[i]
            T.sync_threads()
            if (thread < channels) and (channel < c):
                for other in T.unroll(1, readers):
                    for i in T.unroll(2):
                        sums[i] = sums[i] + slots[other, place, i]
                settle_gradients(
                    table, place, sums, T.cast(rows, FLOAT32) * run, channel, invstd, weight, weight_dtype is not None
                )
                if part == 0:
                    keep_sums(sums, channel, grad_weight, grad_bias, need)
            T.sync_threads()
            read_table(scale, slope, shift, table, thread, across, run, vector)
            for turn in T.serial(chunks):
                gradients_of_x(grads, values, centre, scale, slope, shift, dtype, unroll, vector)
                put_rows(grad_x, grads, base, row, limit, column, down, unroll, vector)
                row = row - down * unroll
                if turn + 1 < chunks:
                    read_rows(grad, grads, base, row, limit, column, down, unroll, vector)
                    read_rows(x, values, base, row, limit, column, down, unroll, vector)

    return compile_program(main, arch)
