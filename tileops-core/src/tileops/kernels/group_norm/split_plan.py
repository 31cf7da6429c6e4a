"""How rows are cut for two launches: plain arithmetic that implementations and programs share."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from tileops.kernels.row_plan import ceil_div, power_of_two_from, vector_elements, vector_words

WARP: Final = 32

THREADS: Final = 256

BLOCKS_PER_SM: Final = 4
"""Blocks that share an SM: 1024 threads of 64 registers, with 64 KiB of reads in flight between them."""

IN_FLIGHT: Final = 16
"""Registers that a thread fills before it uses any."""

MOST_UNROLLED: Final = 12
"""Vectors that a thread fills them with, at most: each has addresses and values of an affine tensor beside it."""

WAVES: Final = 2
"""Parts are cut so that the device takes about this many turns at them.

Few, since a part begins with merging all parts of its row; more than one, since the last turn is part empty. Measured on
an H200 in float16, µs of 1 and 2 turns: (1, 512, 256, 256) in 32 groups 66.4, 65.7, its backward 98.1, 93.3;
(4, 64, 1024, 1024) as instances 468, 448, its backward 649, 656.
"""

MOST_CHUNKS: Final = 64
"""Longer parts gain nothing: merging a row's parts is already nothing against reading one."""


MOST_TURNS: Final = 8
"""Turns of a piece: 64 KiB of 16-bit x and gradient for 256 threads, against which its reduction is nothing."""


class SplitPlan(NamedTuple):
    """How the parts of rows of `n` elements are read, in chunks of `unroll` vectors for each of `threads`."""

    n: int
    vector: int
    unroll: int
    threads: int
    blocks_per_sm: int

    @property
    def vectors(self) -> int:
        """Vectors of a row."""
        return self.n // self.vector

    @property
    def chunk_vectors(self) -> int:
        """Vectors of a chunk."""
        return self.threads * self.unroll

    def cut(self, rows: int, sm_count: int) -> Cut:
        """Equal parts for `rows`: about WAVES turns of the device, of one to MOST_CHUNKS chunks."""
        blocks = WAVES * self.blocks_per_sm * sm_count
        chunks = max(1, min(self.vectors * rows // (blocks * self.chunk_vectors), MOST_CHUNKS))
        parts = ceil_div(self.vectors, chunks * self.chunk_vectors)
        part_vectors = ceil_div(self.vectors, parts * self.threads) * self.threads
        return Cut(part_vectors, ceil_div(self.vectors, part_vectors))


class Cut(NamedTuple):
    """A row is cut into `parts` of `part_vectors` each, the last one what is left."""

    part_vectors: int
    parts: int


def split_plan(n: int, dtype: torch.dtype, registers: int = IN_FLIGHT) -> SplitPlan:
    """How rows of `n` elements of `dtype` are read where a thread fills `registers` at a time."""
    vector = vector_elements(n, dtype)
    unroll = min(MOST_UNROLLED, max(1, registers // vector_words(vector, dtype)))
    threads = min(THREADS, max(WARP, power_of_two_from(ceil_div(n // vector, unroll))))
    return SplitPlan(n, vector, unroll, threads, BLOCKS_PER_SM * THREADS // threads)


class PiecePlan(NamedTuple):
    """How sums over the channels of a sample are taken, in pieces of a channel, by `lanes` threads each.

    A lane reads `unroll` vectors at a time, `turns` times. A channel has `pieces`.
    """

    spatial: int
    vector: int
    lanes: int
    unroll: int
    turns: int

    @property
    def vectors(self) -> int:
        """Vectors of a channel."""
        return self.spatial // self.vector

    @property
    def piece_vectors(self) -> int:
        """Vectors of a piece; the last one of a channel is what is left."""
        return self.lanes * self.unroll * self.turns

    @property
    def pieces(self) -> int:
        """Pieces of a channel."""
        return ceil_div(self.vectors, self.piece_vectors)

    @property
    def pieces_per_block(self) -> int:
        """Several where a warp or less takes a piece."""
        return THREADS // self.lanes if self.lanes <= WARP else 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.pieces_per_block

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that share an SM: 1024 threads."""
        return BLOCKS_PER_SM * THREADS // self.threads


def piece_plan(spatial: int, dtype: torch.dtype) -> PiecePlan:
    """As many lanes as read a channel in one turn, up to a block of 256; longer channels take turns, then pieces."""
    vector = vector_elements(spatial, dtype)
    unroll = min(MOST_UNROLLED, max(1, IN_FLIGHT // 2 // vector_words(vector, dtype)))
    vectors = spatial // vector
    lanes = min(THREADS, power_of_two_from(ceil_div(vectors, unroll)))
    return PiecePlan(spatial, vector, lanes, unroll, turns=min(MOST_TURNS, ceil_div(vectors, lanes * unroll)))
