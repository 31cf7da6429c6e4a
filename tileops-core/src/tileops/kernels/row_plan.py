"""How the elements of a row are spread over threads: plain arithmetic that selection and programs share.

A row of `n` elements is read and written in vectors of up to 16 bytes that never cross its end. In step `s`,
the `lanes` threads of a row take the `lanes` next vectors, so a warp always touches one contiguous stretch.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import torch

VECTOR_BYTES: Final = 16  # the widest global access of one thread on every architecture served
REGISTERS_PER_SM: Final = 1 << 16  # 32-bit registers, on every architecture served
WARP: Final = 32
THREADS_PER_SM: Final = 1536  # the least of the architectures served; others run 2048

HeldLimits = tuple[tuple[int, int], ...]
"""Numbers of threads that a block may give one row, fewest first, each with the registers that a thread may hold."""

MOST_HELD: Final = 32
"""Registers with which a thread may hold its part of a row: half of the 64 that each of 1024 can have."""

HELD_BY_WARP: Final = 12
"""Registers with which a thread of a warp, or of a part of one, may hold its part of a row.

Measured on an H200, bfloat16, one warp and two for rows of 1024 elements, as multiples of a copy's time: layer norm
1.06 and 1.04, RMS norm 1.04 and 1.01; one row alone 1.94 and 1.75 µs, 1.77 and 1.61 µs.
"""

HELD_BY_LAYER_NORM: Final[HeldLimits] = ((64, 8), (128, 24), (256, 16), (512, 32))
"""Measured on an H200, bfloat16 with weight and bias, by threads, as multiples of a copy's time:

4096² 128 1.09, 256 1.13; 16384 x 5120 128 1.03, 256 1.06; 8192² 256 1.05, 512 1.11; 2048 x 16384 256 1.25,
512 1.14, 1024 1.74; 1024 x 32768 512 1.30, 1024 1.34. Of 1024 threads none holds its part of a longer row without
spilling it: 512 x 65536 1.85, and streamed 1.38.
"""

HELD_BY_RMS_NORM: Final[HeldLimits] = ((64, 8), (128, 12), (256, 32), (512, 32), (1024, 32))
"""Measured as for layer norm, without bias:

4096² 128 1.06, 256 1.04, 512 1.13; 16384 x 5120 128 1.03, 256 1.02; 8192² 256 1.04, 512 1.05, 1024 1.30; 2048 x
16384 256 1.05, 512 1.08; 1024 x 32768 512 1.12, 1024 1.16; 512 x 65536 1024 1.14, and streamed 1.32.
"""

HELD_BY_FUSED_RMS_NORM: Final = HELD_BY_RMS_NORM[:-1]
"""As many threads as for RMS norm of the sum, whose bits the result has; of 1024, none has registers for both rows.

Fused layer norm is held as layer norm is. Measured on an H200 in bfloat16, RMS and layer norm as multiples of two
copies' time: 4096² 256 0.99, 128 0.99; 16384 x 5120 256 1.01, 128 1.02; 8192² 256 1.03, 256 1.03 (of 512 both would
take 1.01); 2048 x 16384 256 1.02, 512 1.02.
"""

MOST_LOADED_EARLY: Final = 40
"""Registers of row and weight together up to which a thread loads its weight while it sums the row.

A bias comes late: with it, fewer blocks share an SM. Measured on an H200, layer norm in bfloat16, weight and bias
early, the weight alone, and neither, as multiples of a copy's time: 4096² 1.10, 1.09, 1.09; 8192² 1.09, 1.05, 1.05;
one row of 4096 elements 2.02, 2.12, 2.15 µs.
"""

MOST_IN_FLIGHT: Final = 16
"""Registers that a thread fills at a time where it streams: 1024 threads have 64 KiB of loads in flight."""

WORKING_REGISTERS: Final = 32
"""Registers beside the held row: addresses, one vector unpacked to float32, sums (read off compiled code)."""

PASSING_REGISTERS: Final = 16
"""As many more through which weight, bias and unpacked values pass; with fewer the compiler spills the row."""


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """The threads of one row, and what each of them holds.

    Args:
        n: Elements of the row.
        vector: Elements of one access; divides `n`.
        words: 32-bit registers that one vector takes.
        lanes: Threads of one row: a power of two, or whole warps in a backward.
        rows_per_block: Rows of one block.
    """

    n: int
    vector: int
    words: int
    lanes: int
    rows_per_block: int

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return self.lanes * self.rows_per_block

    @property
    def vectors(self) -> int:
        """Vectors of the row."""
        return self.n // self.vector

    @property
    def steps(self) -> tuple[int, ...]:
        """The accesses of one thread. Only the last can go past the end of the row; see `holds`."""
        return tuple(range(ceil_div(self.vectors, self.lanes)))

    @property
    def elements(self) -> int:
        """Elements that one thread holds."""
        return len(self.steps) * self.vector

    @property
    def elements_per_word(self) -> int:
        """Elements that share a register: 2 of a 16-bit row, unless its vectors are lone elements."""
        return self.vector // self.words

    @property
    def held_registers(self) -> int:
        """Registers with which one thread holds its part of the row."""
        return len(self.steps) * self.words

    def column(self, step: int, lane: Any) -> Any:
        """The first element of `lane`'s vector in `step`."""
        return (step * self.lanes + lane) * self.vector

    def holds(self, step: int, lane: Any) -> Any:
        """Whether `lane` has a vector in `step`: plainly true where every lane has one."""
        if (step + 1) * self.lanes <= self.vectors:
            return True
        return step * self.lanes + lane < self.vectors

    @property
    def steps_in_flight(self) -> int:
        """Steps of one tile: those whose loads a thread issues together where it streams its part."""
        return max(1, MOST_IN_FLIGHT // self.words)

    @property
    def tiles(self) -> int:
        """Tiles in which every lane has a vector in every step."""
        return self.vectors // self.lanes // self.steps_in_flight

    @property
    def steps_beyond_tiles(self) -> tuple[int, ...]:
        """The steps that fill no tile."""
        return self.steps[self.tiles * self.steps_in_flight :]

    @property
    def streaming_blocks_per_sm(self) -> int:
        """Blocks that fit an SM where each thread holds one tile at a time."""
        return max(1, REGISTERS_PER_SM // ((MOST_IN_FLIGHT + WORKING_REGISTERS) * self.threads))

    def registers_for(self, *dtypes: torch.dtype | None) -> int:
        """Registers with which one thread holds its part of further rows of `dtypes`; None is absent."""
        words = (vector_words(self.vector, dtype) for dtype in dtypes if dtype is not None)
        return len(self.steps) * sum(words)

    def loads_early(self, weight_registers: int) -> bool:
        """Whether a thread has registers for its part of the weight while it sums the row."""
        return self.held_registers + weight_registers <= MOST_LOADED_EARLY

    def blocks_per_sm(self, loaded_beside: int) -> int:
        """Blocks that fit an SM where each thread holds the row, and `loaded_beside` registers meanwhile."""
        registers = self.held_registers + max(loaded_beside, PASSING_REGISTERS) + WORKING_REGISTERS
        return max(1, min(THREADS_PER_SM // self.threads, REGISTERS_PER_SM // (registers * self.threads)))


def held_row_plan(n: int, dtype: torch.dtype, limits: HeldLimits) -> RowPlan | None:
    """The fewest threads that hold a row in registers, or None where a block of `limits` cannot.

    Rows of up to 1.5 KiB share a warp or take one, which needs no barrier; longer rows take a block.
    """
    vector = vector_elements(n, dtype)
    words = vector_words(vector, dtype)
    vectors = n // vector
    if vectors * words <= WARP * HELD_BY_WARP:
        # Two vectors or more for each lane, so that loads overlap, but 4 lanes side by side: half a line of 128 bytes.
        lanes = min(WARP, max(power_of_two_from(ceil_div(vectors, 2)), min(4, power_of_two_from(vectors))))
        return RowPlan(n, vector, words, lanes, rows_per_block=128 // lanes)
    for lanes, most in limits:
        if ceil_div(vectors, lanes) * words <= most:
            return RowPlan(n, vector, words, lanes, rows_per_block=1)
    return None


def held_row_configurations(n: int, dtype: torch.dtype, limits: HeldLimits) -> list[dict[str, int]]:
    """Plans to try for a row that registers hold, by what varies: that of `held_row_plan` first.

    Others give a row half, twice or four times the threads, or a block half or twice the rows that share or take a
    warp. Each thread of a row has a vector.
    """
    plan = held_row_plan(n, dtype, limits)
    if plan is None:
        return []
    most_threads = limits[-1][0]
    lanes, rows = plan.lanes, plan.rows_per_block
    shapes = [(lanes, rows // 2), (lanes, rows * 2)] if lanes <= 32 else []
    others = [other for other in (lanes // 2, lanes * 2, lanes * 4) if 0 < other <= min(plan.vectors, most_threads)]
    shapes += [(other, 128 // other if other <= 32 else 1) for other in others]
    plans = [plan, *(dataclasses.replace(plan, lanes=lanes, rows_per_block=rows) for lanes, rows in shapes)]
    return [
        {"lanes": one.lanes, "rows_per_block": one.rows_per_block} for one in plans if one.held_registers <= MOST_HELD
    ]


def streamed_row_plan(n: int, dtype: torch.dtype) -> RowPlan:
    """One block of 512 threads for a row of any length: two of them fill an SM's registers and overlap."""
    vector = vector_elements(n, dtype)
    return RowPlan(n, vector, vector_words(vector, dtype), lanes=512, rows_per_block=1)


def longest_held_row(n: int, dtype: torch.dtype, limits: HeldLimits) -> int:
    """The longest row that registers hold, among rows whose vectors are as wide as those of `n`."""
    vector = vector_elements(n, dtype)
    words = vector_words(vector, dtype)
    return max(lanes * (most // words) * vector for lanes, most in limits)


def vector_elements(n: int, dtype: torch.dtype) -> int:
    """The largest power of two of elements that fills at most 16 bytes and divides `n`."""
    width = VECTOR_BYTES // dtype.itemsize
    while n % width:
        width //= 2
    return width


def vector_words(vector: int, dtype: torch.dtype) -> int:
    """32-bit registers that a vector takes: a lone 16-bit element takes a whole one."""
    return ceil_div(vector * dtype.itemsize, 4)


def power_of_two_from(value: int) -> int:
    """The smallest power of two that is at least `value` (which is at least 1)."""
    return 1 << (value - 1).bit_length()


def ceil_div(value: int, divisor: int) -> int:
    """`value / divisor`, rounded up."""
    return -(-value // divisor)
