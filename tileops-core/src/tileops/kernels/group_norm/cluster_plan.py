"""Which rows a cluster of blocks takes, and how the blocks share them out."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from tileops.kernels.row_plan import MOST_HELD, ceil_div, power_of_two_from, vector_elements, vector_words

CLUSTER_ARCH: Final = 90
"""The first architecture with clusters."""

WARP: Final = 32

MOST_WARPS: Final = 16
"""Warps of a block, at most: two such blocks share an SM, so that one reads while the other writes."""

SHARERS: Final = 2
"""Blocks that share an SM, where each has the most warps."""

MOST_BLOCKS: Final = 8
"""The largest cluster that every board with clusters runs."""

LONE_BYTES: Final = 40 * 1024
"""Bytes of a row up to which one block is at least as fast as a cluster.

Measured on an H200 in float16, µs of one block and clusters of 2, 4 and 8: 20 KB a row (2, 1280, 16, 16) 2.8, 3.4, 3.5;
40 KB (2, 640, 32, 32) 3.7, 4.0, 4.1; 50 KB (32, 256, 56, 56) 37.9, 33.5, 33.9; 80 KB (2, 320, 64, 64) 6.0, 5.9, 6.1, 6.2;
128 KB (16, 128, 128, 128) 64.2, 53.1, 47.0, 45.3, each in 32 groups.
"""

BLOCK_BYTES: Final = 25 * 1024
"""Bytes of a row that a block takes where a wider cluster can be had: small blocks overlap better; see above."""

PARKING_REGISTERS: Final = 16
"""Registers by way of which a thread parks data in shared memory, and that hold data where it does."""

SHARED_RESERVE: Final = 2 * 1024
"""Shared memory of a block that holds no data: the reductions' slots, and the KiB that the system takes."""

REGISTERS: Final = 64
"""Registers of a thread: 1024 threads share an SM's 65536."""


class ClusterPlan(NamedTuple):
    """How `blocks` share out a row: a thread has `held_steps` vectors in registers, `parked_steps` in shared memory.

    It parks them `parking_group` at a time.
    """

    n: int
    vector: int
    blocks: int
    warps: int
    held_steps: int
    parked_steps: int
    parking_group: int
    registers: int = REGISTERS

    @property
    def vectors(self) -> int:
        """Vectors of a row."""
        return self.n // self.vector

    @property
    def block_vectors(self) -> int:
        """Vectors of a block; the last one takes what is left."""
        return ceil_div(self.vectors, self.blocks)


def cluster_plan(n: int, dtype: torch.dtype, arch: int, smem_budget: int) -> ClusterPlan | None:
    """How a cluster holds a row of `n` that is longer than one block should take; None where none does."""
    row_bytes = n * dtype.itemsize
    if arch < CLUSTER_ARCH or row_bytes <= LONE_BYTES:
        return None
    blocks = next((blocks for blocks in (2, 4) if row_bytes <= blocks * BLOCK_BYTES), MOST_BLOCKS)
    return plan_of_blocks(n, dtype, smem_budget, blocks)


def plan_of_blocks(n: int, dtype: torch.dtype, smem_budget: int, blocks: int) -> ClusterPlan | None:
    """How `blocks` hold a row of `n`; None where they cannot."""
    vector = vector_elements(n, dtype)
    words = vector_words(vector, dtype)
    block_vectors = ceil_div(n // vector, blocks)
    warps = min(MOST_WARPS, max(2, power_of_two_from(ceil_div(block_vectors, WARP * (MOST_HELD // words)))))
    steps = ceil_div(block_vectors, warps * WARP)
    if steps * words <= MOST_HELD:
        return ClusterPlan(n, vector, blocks, warps, steps, 0, 1)
    group = PARKING_REGISTERS // words
    parked = ceil_div(steps - group, group) * group
    if parked * warps * WARP * vector * dtype.itemsize > smem_budget // SHARERS - SHARED_RESERVE:
        return None
    return ClusterPlan(n, vector, blocks, warps, group, parked, group)
