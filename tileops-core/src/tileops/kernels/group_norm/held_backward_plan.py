"""How a block or a cluster holds x and the gradient of a group: whole warps take a channel, or a warp takes several."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from tileops.kernels.row_plan import (
    MOST_THREADS,
    REGISTERS_PER_SM,
    THREADS_PER_SM,
    ceil_div,
    vector_elements,
    vector_words,
)

WARP: Final = 32

LEAST_VECTORS: Final = 16
"""Vectors of a channel that a warp takes, at least: with fewer, most of its lanes have none."""

ENOUGH_HELD: Final = 32
"""Registers of x and gradient that a thread fills at a time: more threads would be for nothing."""

MOST_HELD: Final = 64
"""The same at most, where a block has no more threads to share them."""

WORKING_REGISTERS: Final = 38
"""Registers beside them: addresses, unpacked values, sums."""

MOST_REGISTERS: Final = 248
"""Registers of one thread, on every architecture served, in the eights in which they are given out."""

THREADS_OF_SHORT_ROWS: Final = 128
"""Threads of a block that takes several rows."""


class HeldBackwardPlan(NamedTuple):
    """A channel is shared out among `warps_per_channel`, or a warp takes `channels_per_warp`; of `blocks` blocks a row."""

    channels: int
    spatial: int
    vector: int
    words: int
    warps_per_channel: int
    channels_per_warp: int
    blocks: int

    @property
    def vectors(self) -> int:
        """Vectors of a channel."""
        return self.spatial // self.vector

    @property
    def steps(self) -> int:
        """Vectors of a channel that one lane takes."""
        return ceil_div(self.vectors, WARP * self.warps_per_channel)

    @property
    def warps(self) -> int:
        """Warps of a row in one block."""
        return ceil_div(ceil_div(self.channels, self.channels_per_warp) * self.warps_per_channel, self.blocks)

    @property
    def is_even(self) -> bool:
        """Whether all blocks have as many warps."""
        return self.warps * self.blocks == ceil_div(self.channels, self.channels_per_warp) * self.warps_per_channel

    @property
    def slots(self) -> int:
        """Parts of a row that have sums of their own: those of a channel lie side by side."""
        return self.channels * self.warps_per_channel

    @property
    def rows_per_block(self) -> int:
        """Rows of one block."""
        return max(1, THREADS_OF_SHORT_ROWS // (WARP * self.warps)) if self.blocks == 1 else 1

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return self.rows_per_block * self.warps * WARP

    @property
    def held_registers(self) -> int:
        """Registers with which a thread holds its part of x and the gradient."""
        return 2 * self.words * self.steps * self.channels_per_warp

    @property
    def registers(self) -> int:
        """Registers that a thread may take, by which blocks share an SM as far as held and working ones allow."""
        needed = (self.held_registers + WORKING_REGISTERS) * self.threads
        blocks = max(1, min(THREADS_PER_SM // self.threads, REGISTERS_PER_SM // needed))
        return min(MOST_REGISTERS, REGISTERS_PER_SM // (blocks * self.threads) // 8 * 8)

    @property
    def fits(self) -> bool:
        """Whether a thread has registers for its part, beside those that it works with."""
        needed = self.held_registers + WORKING_REGISTERS
        return self.threads <= MOST_THREADS and needed <= min(MOST_REGISTERS, REGISTERS_PER_SM // self.threads)


def held_backward_plan(channels: int, spatial: int, dtype: torch.dtype, blocks: int = 1) -> HeldBackwardPlan | None:
    """The fewest threads that hold a row with `ENOUGH_HELD` registers each, else the most that can; None where none can.

    The warps of a row are the same in each of the `blocks`.
    """
    vector = vector_elements(spatial, dtype)
    if spatial // vector < LEAST_VECTORS:
        return None
    facts = (channels, spatial, vector, vector_words(vector, dtype))
    shares = [(1, together) for together in (8, 4, 2) if together <= channels]
    shares += [(share, 1) for share in range(1, WARP * blocks + 1)]
    plans = [HeldBackwardPlan(*facts, *share, blocks) for share in shares]
    fitting = [plan for plan in plans if plan.fits and plan.is_even and plan.held_registers <= MOST_HELD]
    enough = [plan for plan in fitting if plan.held_registers <= ENOUGH_HELD]
    return enough[0] if enough else fitting[-1] if fitting else None
