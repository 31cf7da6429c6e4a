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

WORKING_REGISTERS: Final = 32
"""Registers beside rows, weight and sums: addresses, unpacked values, statistics."""

REGISTERS_OF_A_SUM: Final = 8
"""As many more for each sum over rows: addresses, and the values that are added."""

LEAST_THREADS_PER_SM: Final = 512
"""Threads of an SM below which sums in registers cost more than they save, where they fit shared memory.

Measured on an H200, layer norm in bfloat16 with weight and bias, sums in registers and in shared memory, µs: 4096²
35 and 39, 8192² 112 and 115, with 512 threads in registers; 16384 x 5120 with 320 of them 194 and 134.
"""

EXCHANGE_BYTES: Final = 1024
"""Shared memory through which the warps of a block exchange their moments, at most."""


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """How one block works.

    Args:
        row: The threads of one row, and what each holds of it.
        sums: How many sums over rows are kept.
        sums_in_shared: Whether they lie in shared memory.
        keeps_weight: Whether a thread holds its part of the weight all the time, or reads it again for every row.
        blocks_per_sm: Blocks that run on an SM together.
    """

    row: RowPlan
    sums: int
    sums_in_shared: bool
    keeps_weight: bool
    blocks_per_sm: int

    @property
    def quad(self) -> int:
        """Sums of a thread that lie side by side in shared memory, 16 bytes, beside those of the next thread."""
        return min(self.row.vector, 4)

    @property
    def quads_of_vector(self) -> tuple[int, ...]:
        """What a vector has of them."""
        return tuple(range(self.row.vector // self.quad))

    @property
    def threads_per_sm(self) -> int:
        """Threads that run on an SM together."""
        return self.row.threads * self.blocks_per_sm


def held_backward_plan(
    n: int, dtype: torch.dtype, weight_dtype: torch.dtype | None, sums: int, smem_budget: int
) -> BackwardPlan | None:
    """Sums in registers where threads then fill an SM, else in shared memory; None where a block can keep them in neither.

    Args:
        n: Elements of a row.
        dtype: Of x and the gradient.
        weight_dtype: Of the weight; None where there is none.
        sums: How many sums over rows are wanted.
        smem_budget: Bytes of shared memory that a block may have.
    """
    in_registers = _plan_in_registers(n, dtype, weight_dtype, sums)
    if in_registers is not None and in_registers.threads_per_sm >= LEAST_THREADS_PER_SM:
        return in_registers
    return _plan_in_shared(n, dtype, weight_dtype, sums, smem_budget) or in_registers


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


def _plan_in_registers(n: int, dtype: torch.dtype, weight_dtype: torch.dtype | None, sums: int) -> BackwardPlan | None:
    row = _row_plan(n, dtype, HELD_BESIDE_SUMS)
    if row is None:
        return None
    registers = _registers(row, weight_dtype, sums) + sums * row.elements
    return BackwardPlan(
        row, sums, sums_in_shared=False, keeps_weight=True, blocks_per_sm=_blocks_per_sm(row, registers)
    )


def _plan_in_shared(
    n: int, dtype: torch.dtype, weight_dtype: torch.dtype | None, sums: int, smem_budget: int
) -> BackwardPlan | None:
    row = _row_plan(n, dtype, HELD_ALONE)
    if row is None or row.rows_per_block > 1:
        return None
    blocks = smem_budget // (sums * row.elements * row.threads * 4 + EXCHANGE_BYTES)
    if not blocks:
        return None
    registers = _registers(row, weight_dtype, sums)
    keeps_weight = registers * row.threads <= REGISTERS_PER_SM
    blocks = min(blocks, _blocks_per_sm(row, registers if keeps_weight else _registers(row, None, sums)))
    return BackwardPlan(row, sums, sums_in_shared=True, keeps_weight=keeps_weight, blocks_per_sm=blocks)


def _registers(row: RowPlan, weight_dtype: torch.dtype | None, sums: int) -> int:
    """Registers of a thread for x, the gradient, both of the next row, the weight, and its work."""
    return 4 * row.held_registers + row.registers_for(weight_dtype) + WORKING_REGISTERS + sums * REGISTERS_OF_A_SUM


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
