"""How one block holds x and the gradient of a group: whole warps of it take each channel, or each warp takes several."""

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

THREADS_OF_SHORT_ROWS: Final = 128
"""Threads of a block that takes several rows."""


class HeldBackwardPlan(NamedTuple):
    """A channel is shared out among `warps_per_channel`, `steps` vectors a lane; or a warp takes `channels_per_warp`."""

    channels: int
    spatial: int
    vector: int
    words: int
    warps_per_channel: int
    channels_per_warp: int

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
        """Warps of a row."""
        return ceil_div(self.channels, self.channels_per_warp) * self.warps_per_channel

    @property
    def slots(self) -> int:
        """Parts of a row that have sums of their own: those of a channel lie side by side."""
        return self.channels * self.warps_per_channel

    @property
    def rows_per_block(self) -> int:
        """Rows of one block."""
        return max(1, THREADS_OF_SHORT_ROWS // (WARP * self.warps))

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return self.rows_per_block * self.warps * WARP

    @property
    def held_registers(self) -> int:
        """Registers with which a thread holds its part of x and the gradient."""
        return 2 * self.words * self.steps * self.channels_per_warp

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that fit an SM; 0 where one does not."""
        by_registers = REGISTERS_PER_SM // ((self.held_registers + WORKING_REGISTERS) * self.threads)
        return min(THREADS_PER_SM // self.threads, by_registers) if self.threads <= MOST_THREADS else 0


def held_backward_plan(channels: int, spatial: int, dtype: torch.dtype) -> HeldBackwardPlan | None:
    """The fewest threads that hold a row with `ENOUGH_HELD` registers each, else the most that can; None where none can."""
    vector = vector_elements(spatial, dtype)
    facts = (channels, spatial, vector, vector_words(vector, dtype))
    if spatial // vector < LEAST_VECTORS:
        return None
    shares = [(1, together) for together in (8, 4, 2) if together <= channels] + [(share, 1) for share in range(1, WARP + 1)]
    plans = [HeldBackwardPlan(*facts, share, together) for share, together in shares]
    fitting = [plan for plan in plans if plan.blocks_per_sm and plan.held_registers <= MOST_HELD]
    enough = [plan for plan in fitting if plan.held_registers <= ENOUGH_HELD]
    return enough[0] if enough else fitting[-1] if fitting else None
