"""How the backward of row norms spreads a row, and what it adds up over rows, over the threads of a block.

A block takes one row after the other. Its threads hold a row's part of x and of the gradient, and the part of the
next row that is under way; each adds what its columns give to the sums over rows that it keeps until the end.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from tileops.kernels.row_plan import (
    REGISTERS_PER_SM,
    THREADS_PER_SM,
    RowPlan,
    ceil_div,
    power_of_two_from,
    vector_elements,
    vector_words,
)

WARP: Final = 32

HELD_BESIDE_SUMS: Final = 8
"""Registers with which a thread may hold its part of x where it keeps its sums in registers too."""

HELD_ALONE: Final = 16
"""The same where the sums lie in shared memory: 512 threads then fill the registers of an SM."""

MOST_LANES: Final = 512
"""Threads of a row: each of more could not hold twice its part of two rows."""

THREADS_OF_SHORT_ROWS: Final = 256
"""Threads of a block that takes several rows at a time."""

WORKING_REGISTERS: Final = 40
"""Registers beside rows, weight and sums: addresses, unpacked values, statistics."""

EXCHANGE_BYTES: Final = 1024
"""Shared memory through which the warps of a block exchange their moments, at most."""


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """How one block works.

    Args:
        row: The threads of one row, and what each holds of it.
        sums: How many sums over rows are kept.
        sums_in_shared: Whether they lie in shared memory, and the weight is read again for every row.
        blocks_per_sm: Blocks that run on an SM together.
    """

    row: RowPlan
    sums: int
    sums_in_shared: bool
    blocks_per_sm: int


def held_backward_plan(
    n: int, dtype: torch.dtype, weight_dtype: torch.dtype | None, sums: int, smem_budget: int
) -> BackwardPlan | None:
    """Sums in registers, else in shared memory; None where a block can keep them in neither.

    Args:
        n: Elements of a row.
        dtype: Of x and the gradient.
        weight_dtype: Of the weight; None where there is none.
        sums: How many sums over rows are wanted.
        smem_budget: Bytes of shared memory that a block may have.
    """
    row = _row_plan(n, dtype, HELD_BESIDE_SUMS)
    if row is not None:
        registers = 4 * row.held_registers + row.registers_for(weight_dtype) + sums * row.elements + WORKING_REGISTERS
        return BackwardPlan(row, sums, sums_in_shared=False, blocks_per_sm=_blocks_per_sm(row, registers))
    row = _row_plan(n, dtype, HELD_ALONE)
    if row is None or sums * row.elements * row.threads * 4 + EXCHANGE_BYTES > smem_budget:
        return None
    return BackwardPlan(row, sums, sums_in_shared=True, blocks_per_sm=1)


def longest_held_backward_row(n: int, dtype: torch.dtype, sums: int, smem_budget: int) -> int:
    """The longest row that `held_backward_plan` serves, among rows whose vectors are as wide as those of `n`."""
    vector = vector_elements(n, dtype)
    words = vector_words(vector, dtype)
    beside_sums, alone = (MOST_LANES * (held // words) * vector for held in (HELD_BESIDE_SUMS, HELD_ALONE))
    if sums:
        step = WARP * (HELD_ALONE // words) * vector
        alone = min(alone, (smem_budget - EXCHANGE_BYTES) // (4 * sums) // step * step)
    return max(beside_sums, alone)


def streamed_backward_plan(n: int, dtype: torch.dtype) -> RowPlan:
    """One vector of a row for each of 256 threads: a stripe of columns, which a block takes down the rows."""
    vector = vector_elements(n, dtype)
    return RowPlan(n, vector, vector_words(vector, dtype), lanes=256, rows_per_block=1)


def _row_plan(n: int, dtype: torch.dtype, held: int) -> RowPlan | None:
    """The fewest threads that hold a row with `held` registers each: a part of a warp, or whole warps."""
    vector = vector_elements(n, dtype)
    words = vector_words(vector, dtype)
    vectors = n // vector
    lanes = ceil_div(vectors, held // words)
    if lanes <= WARP:
        lanes = max(power_of_two_from(lanes), min(8, power_of_two_from(vectors)))  # 8 lanes read a line of 128 bytes
        return RowPlan(n, vector, words, lanes, rows_per_block=THREADS_OF_SHORT_ROWS // lanes)
    lanes = ceil_div(lanes, WARP) * WARP
    return RowPlan(n, vector, words, lanes, rows_per_block=1) if lanes <= MOST_LANES else None


def _blocks_per_sm(row: RowPlan, registers: int) -> int:
    return max(1, min(THREADS_PER_SM // row.threads, REGISTERS_PER_SM // (registers * row.threads)))
