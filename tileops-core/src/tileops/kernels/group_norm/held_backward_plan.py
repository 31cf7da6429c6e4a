"""How a block or a cluster holds x and the gradient of a group: whole warps take a channel, or a warp takes several."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch

from tileops.kernels.group_norm.cluster_plan import CLUSTER_ARCH
from tileops.kernels.row_plan import (
    REGISTERS_PER_SM,
    THREADS_PER_SM,
    ceil_div,
    vector_elements,
    vector_words,
)

WARP: Final = 32

MOST_THREADS: Final = 1024
"""Threads of one block, on every architecture served."""

LEAST_VECTORS: Final = 16
"""Vectors of a channel that a warp takes, at least: with fewer, most of its lanes have none."""

EASILY_HELD: Final = 40
"""Registers of x and gradient that a thread holds without spilling, whatever share of an SM it has."""

MOST_HELD: Final = 64
"""The same at most, where nothing less holds a row."""

SPARE: Final = ((32, 32), (40, 38), (64, 40))
"""Up to how many such registers, how many more a thread works with: addresses, unpacked values, sums."""

MANY_ROWS: Final = 4
"""Rows for each SM from which blocks share one; of fewer, each has an SM to itself."""

LEAST_CLUSTER_BYTES: Final = 48 * 1024
"""Bytes of x in a row from which a cluster of blocks may take it.

Measured on an H200 in float16, µs of one block and clusters of 2 and 4, with the launch of the sums over the batch:
20 KB a row (2, 1280, 16, 16) 6.2, 6.7, 6.9; 40 KB (2, 640, 32, 32) 7.2, 7.7, 7.8; 80 KB (2, 320, 64, 64) 11.8, 10.1, 11.2.
"""

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
        """Registers that a thread may take, such that `blocks_per_sm` share an SM."""
        return min(MOST_REGISTERS, REGISTERS_PER_SM // (max(1, self.blocks_per_sm) * self.threads) // 8 * 8)

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that share an SM; 0 where a thread has no registers for its part."""
        spare = next((spare for held, spare in SPARE if self.held_registers <= held), MOST_REGISTERS)
        needed = self.held_registers + spare
        if self.threads > MOST_THREADS or needed > MOST_REGISTERS:
            return 0
        return min(THREADS_PER_SM // self.threads, REGISTERS_PER_SM // (needed * self.threads))

    def on_chip(self, blocks_per_sm: int) -> int:
        """Registers of an SM that hold rows and their gradient: the more, the more reads are in flight."""
        return (
            blocks_per_sm * self.rows_per_block * ceil_div(2 * self.words * self.channels * self.vectors, self.blocks)
        )


def held_backward_plan(
    channels: int, spatial: int, dtype: torch.dtype, rows: int, arch: int, sm_count: int
) -> HeldBackwardPlan | None:
    """What keeps most on chip of many rows, or of one block's; None where a warp has too little, or nothing holds a row.

    Measured on an H200 in float16, µs by KiB that an SM holds: (16, 128, 128, 128) in 32 groups 67.9 of 130, 75.0 of 96,
    78.4 of 64; (32, 256, 56, 56) 51.4 of 120, 56.4 of 96, 69.1 of 64.
    """
    vector = vector_elements(spatial, dtype)
    if spatial // vector < LEAST_VECTORS:
        return None
    clusters = (2, 4, 8) if arch >= CLUSTER_ARCH and channels * spatial * dtype.itemsize > LEAST_CLUSTER_BYTES else ()
    facts = (channels, spatial, vector, vector_words(vector, dtype))
    plans = [HeldBackwardPlan(*facts, *share, blocks) for blocks in (1, *clusters) for share in _shares(*facts, blocks)]
    fitting = [plan for plan in plans if plan.blocks_per_sm and plan.is_even]
    easy = [plan for plan in fitting if plan.held_registers <= EASILY_HELD]
    many = rows >= MANY_ROWS * sm_count

    def worth(plan: HeldBackwardPlan) -> tuple[int, int, int]:
        # Of equals, the fewest blocks and threads.
        return plan.on_chip(plan.blocks_per_sm if many else 1), -plan.blocks, -plan.threads

    return max(easy or fitting, key=worth, default=None)


def _shares(channels: int, spatial: int, vector: int, words: int, blocks: int) -> list[tuple[int, int]]:
    """Warps of a channel, the fewest for each number of steps that leave no block short; and channels of a warp."""
    together = [(1, count) for count in (8, 4, 2) if count <= channels]
    unit = blocks // math.gcd(channels, blocks)
    steps = range(1, MOST_HELD // (2 * words) + 1)
    return together + [(ceil_div(ceil_div(spatial // vector, WARP * step), unit) * unit, 1) for step in steps]
