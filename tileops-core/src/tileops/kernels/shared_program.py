# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""What the TileLang programs of the library share on the device: accesses, deterministic sums, moments.

The macros work on `T.alloc_local` buffers and reduce them in place. Lanes and then warps are combined by
butterfly exchanges, a fixed order without atomics: two runs of a program agree bit for bit, and every thread
that took part ends with the same bits.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.compiled_program import macro
from tileops.kernels.row_plan import RowPlan, vector_elements

__all__ = [
    "WARP",
    "block_merge_moments",
    "block_sum",
    "elements_of_group",
    "elements_of_thread",
    "from_origin",
    "group_merge_moments",
    "group_merge_samples",
    "group_sum",
    "keep_packed",
    "load_columns",
    "load_columns_at",
    "load_row",
    "load_row_at",
    "merge_moments",
    "merge_samples_of_warps",
    "settle",
    "sized_block_sum",
    "store_row",
    "store_row_at",
    "take_origin",
    "tilelang_dtype",
    "vector_elements",
]

WARP = 32


def tilelang_dtype(dtype: torch.dtype) -> str:
    """The TileLang name of a torch dtype: `torch.bfloat16` -> `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


@macro
def group_sum(values, count: int, lanes: int):
    """Sum `values[:count]` (float32, local) over each aligned group of `lanes` (a power of two <= 32).

    Every lane of the warp must take part.
    """
    for hop in _butterfly(lanes):
        for i in T.unroll(count):
            values[i] = values[i] + T.shfl_xor(values[i], hop)


@macro
def block_sum(values, slots, count: int, threads: int):
    """Sum `values[:count]` (float32, local) over a block of `threads` (a power of two >= 32).

    `slots` is shared float32 of shape (threads // 32, count), which no other reduction of the program may
    use: the one barrier here orders its writes before its reads, and nothing orders a later use.
    """
    thread = T.get_thread_binding()
    group_sum(values, count, WARP)
    if threads > WARP:
        if thread % WARP == 0:
            for i in T.unroll(count):
                slots[thread // WARP, i] = values[i]
        T.sync_threads()
        for i in T.unroll(count):
            values[i] = slots[thread % (threads // WARP), i]
        group_sum(values, count, threads // WARP)


@macro
def sized_block_sum(values, slots, count: int, warps):
    """Like `block_sum`, over a block of `(WARP, warps)` threads, `warps` being a run-time number up to 32.

    `slots` has a row for each warp that a block may have.
    """
    lane = T.get_thread_binding(0)
    warp = T.get_thread_binding(1)
    group_sum(values, count, WARP)
    if lane == 0:
        for i in T.unroll(count):
            slots[warp, i] = values[i]
    T.sync_threads()
    for i in T.unroll(count):
        values[i] = 0.0
        if lane < warps:
            values[i] = slots[lane, i]
    group_sum(values, count, WARP)


@macro
def merge_moments(moments, other_count, other_mean, other_m2):
    """Merge another sample's (count, mean, M2) into `moments` (float32, local, 3), after Chan et al.

    M2 is the sum of squared deviations from the sample's own mean. Either sample may be empty (0, 0, 0).
    """
    count = moments[0] + other_count
    delta = other_mean - moments[1]
    share = other_count / T.max(count, 1.0)
    # delta * (...) * delta: an empty sample weighs 0, which must meet delta before its square can overflow.
    moments[2] = moments[2] + other_m2 + delta * (moments[0] * share) * delta
    moments[1] = moments[1] + delta * share
    moments[0] = count


@macro
def group_merge_moments(moments, lanes: int):
    """Merge `moments` (float32, local: count, mean, M2) over each aligned group of `lanes`.

    Every lane of the warp must take part. See `group_merge_samples`.
    """
    counts = T.alloc_local((1,), "float32")
    sums = T.alloc_local((1,), "float32")
    squares = T.alloc_local((1,), "float32")
    counts[0] = moments[0]
    sums[0] = moments[0] * moments[1]
    squares[0] = moments[2]
    group_sum(counts, 1, lanes)
    group_merge_samples(sums, squares, moments[1], moments[0], T.max(counts[0], 1.0), lanes)
    moments[0] = counts[0]
    moments[1] = sums[0] / T.max(counts[0], 1.0)
    moments[2] = squares[0]


@macro
def group_merge_samples(sums, squares, own_mean, own_count, count, lanes: int):
    """Merge the samples of each aligned group of `lanes`, `count` elements together.

    `sums` (float32, local, 1) becomes the sum of all, and `squares` (likewise), which is about the mean of the
    lane's own sample, that about the mean of all: Chan's rule, with nothing to divide on the way. Every lane of the
    warp must take part; a sample may be empty (0, 0, 0).
    """
    group_sum(sums, 1, lanes)
    apart = own_mean - sums[0] * (1.0 / count)
    # An empty sample weighs 0, which must meet the distance before its square can overflow.
    squares[0] = squares[0] + own_count * apart * apart
    group_sum(squares, 1, lanes)


@macro
def block_merge_moments(moments, slots, threads: int):
    """Merge `moments` (float32, local: count, mean, M2) over a block of `threads` (a power of two >= 32).

    `slots` is shared float32 of shape (threads // 32, 3), which no other reduction of the program may use.
    """
    thread = T.get_thread_binding()
    group_merge_moments(moments, WARP)
    if threads > WARP:
        if thread % WARP == 0:
            for i in T.unroll(3):
                slots[thread // WARP, i] = moments[i]
        T.sync_threads()
        for i in T.unroll(3):
            moments[i] = slots[thread % (threads // WARP), i]
        group_merge_moments(moments, threads // WARP)


@macro
def merge_samples_of_warps(sums, squares, slots, plan: RowPlan):
    """Merge what `group_merge_samples` left in each warp of a block that holds one row.

    `slots` is shared float32 of shape (warps, 2), which no other reduction of the program may use.
    """
    thread = T.get_thread_binding()
    warps = plan.lanes // WARP
    if thread % WARP == 0:
        slots[thread // WARP, 0] = sums[0]
        slots[thread // WARP, 1] = squares[0]
    T.sync_threads()
    sums[0] = slots[thread % warps, 0]
    squares[0] = slots[thread % warps, 1]
    count = elements_of_group(plan, thread % warps * WARP)
    mean = sums[0] / T.max(count, 1.0)
    group_merge_samples(sums, squares, mean, count, T.float32(plan.n), warps)


@macro
def load_row(held, x, residual, row, plan: RowPlan, lane):
    """Load `lane`'s part of row `row` of x + residual into `held` (local, plan.elements); see `load_row_at`."""
    for step in plan.steps:
        if plan.holds(step, lane):
            load_row_at(held, step * plan.vector, x, residual, row, plan.column(step, lane), plan.vector)


@macro
def store_row(y, row, held, plan: RowPlan, lane):
    """Store `lane`'s part of row `row` of y, which is `held` (local, plan.elements) in y's dtype."""
    for step in plan.steps:
        if plan.holds(step, lane):
            store_row_at(y, row, plan.column(step, lane), held, step * plan.vector, plan.vector)


@macro
def load_columns(held, weight, plan: RowPlan, lane):
    """Load `lane`'s part of `weight` (plan.n) into `held` (local, plan.elements), in weight's dtype."""
    for step in plan.steps:
        if plan.holds(step, lane):
            load_columns_at(held, step * plan.vector, weight, plan.column(step, lane), plan.vector)


@macro
def keep_packed(held, plan: RowPlan):
    """Keep `held` (local, plan.elements) in its own dtype: what was unpacked before is not kept beside it.

    The compiler would otherwise unpack a 16-bit row once for all passes, which takes two more registers for
    each one that is held, and spill. An empty piece of assembly that may change the registers forbids that.
    """
    if plan.elements_per_word > 1:
        T.warpgroup_fence_operand(held)


@macro
def settle(held, count: int, rows):
    """Wait here for the loads that fill `held[:count]` (local), and leave it as it is; `rows` is a positive number.

    Loads are counted on a few scoreboards, and who first uses a value waits for all that its scoreboard counts.
    Where that use is in a loop which fetches ahead, each turn waits for its own fetch. The zero that is added here is
    one that no compiler knows.
    """
    for i in T.unroll(count):
        held[i] = T.cast(T.cast(held[i], "float32") + T.cast(T.max(-rows, 0), "float32"), held.dtype)


@macro
def load_row_at(held, first, x, residual, row, column, vector: int):
    """Load the vector of row `row` of x + residual at `column` into `held` (local) from `held[first]` on.

    The sum is in float32 and is rounded to their dtype. A residual of None is no addend.
    """
    for j in T.vectorized(vector):
        held[first + j] = x[row, column + j]
    if residual is not None:
        addend = T.alloc_local((vector,), residual.dtype)
        for j in T.vectorized(vector):
            addend[j] = residual[row, column + j]
        for j in T.unroll(vector):
            total = T.cast(held[first + j], "float32") + T.cast(addend[j], "float32")
            held[first + j] = T.cast(total, residual.dtype)


@macro
def store_row_at(y, row, column, held, first, vector: int):
    """Store the vector `held[first:]` (local) in row `row` of y at `column`, in one access."""
    for j in T.vectorized(vector):
        y[row, column + j] = held[first + j]


@macro
def take_origin(origin, x, residual, row, vector: int, dtype: torch.dtype):
    """`origin` (float32, local, 1) becomes the first value of row `row` of x + residual in float32, else 0.

    TileLang fails to lower a scalar load whose index is plainly a multiple of a number that 16 bits would hold as
    negative, such as n = 2**15 or 50001: the load is a vector's, or at an index that is not plainly one.
    """
    first = T.alloc_local((vector,), tilelang_dtype(dtype))
    start = T.alloc_local((1,), "int32")
    origin[0] = 0.0
    if dtype is torch.float32:
        if vector > 1:
            load_row_at(first, 0, x, residual, row, 0, vector)
        else:
            start[0] = 0
            load_row_at(first, 0, x, residual, row, start[0], vector)
        origin[0] = first[0]


@macro
def load_columns_at(held, first, weight, column, vector: int):
    """Load the vector of `weight` (one axis) at `column` into `held` (local) from `held[first]` on."""
    for j in T.vectorized(vector):
        held[first + j] = weight[column + j]


def from_origin(value: Any, origin: Any, dtype: torch.dtype) -> Any:
    """`value` in float32; in float32 input as the distance from `origin`, a value of the same sample.

    The mean of float32 values far from zero is rounded at their magnitude, and all that is centred by it is
    off by as much. Taken from one of themselves, values are near zero, and so is what rounding costs them. In
    16 bits the output is rounded more coarsely than that, and the subtraction is spared.
    """
    value = T.cast(value, "float32")
    return value - origin if dtype is torch.float32 else value


def elements_of_thread(plan: RowPlan, lane: Any) -> Any:
    """How many elements `lane` holds (float32)."""
    if plan.vectors % plan.lanes == 0:
        return T.float32(plan.elements)
    of_last_step = T.if_then_else(plan.holds(plan.steps[-1], lane), plan.vector, 0)
    return T.cast(plan.elements - plan.vector + of_last_step, "float32")


def elements_of_group(plan: RowPlan, lane: Any) -> Any:
    """How many elements the warp of `lane` holds (float32), or the lane group where it is a whole row."""
    if plan.lanes <= WARP:
        return T.float32(plan.n)
    vectors = plan.vectors // plan.lanes * WARP
    beyond = plan.vectors % plan.lanes
    if beyond:
        vectors = vectors + T.max(0, T.min(WARP, beyond - lane // WARP * WARP))
    return T.cast(vectors * plan.vector, "float32")


def _butterfly(lanes: int) -> list[int]:
    """The exchange distances of a butterfly over `lanes`: 8 -> [4, 2, 1]."""
    return [1 << bit for bit in reversed(range(lanes.bit_length() - 1))]
