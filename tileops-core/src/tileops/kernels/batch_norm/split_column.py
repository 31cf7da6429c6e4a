"""Batch norm in training where neighbours in memory belong to different channels, and blocks share the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Final, NamedTuple, final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.batch_norm.interface import BatchNormTrain, BatchNormTrainCall
from tileops.kernels.batch_norm.launch import (
    Cut,
    Launch,
    Results,
    TwoLaunches,
    constants_of,
    identity_facts,
    program_facts,
)
from tileops.kernels.batch_norm.regions import (
    COLUMN_THREADS,
    LINE_BYTES,
    SECTOR_PAIR,
    Tile,
    TrainCall,
    refusal_of,
    run_of,
    tile_of,
)
from tileops.kernels.kernel_base import Entry

MIN_BLOCKS: Final = 2
"""Blocks that share an SM."""

CHUNK_BYTES: Final = 64
"""Bytes that a thread reads before it uses any: 64 KiB of reads in flight on an SM."""

CHUNK_ROWS: Final = 16
"""The same for vectors too narrow to fill CHUNK_BYTES: each takes a register, however few bytes it has."""

ONE_WAVE_BYTES: Final = 64 << 20
"""Up to about the L2 cache's size all blocks run at once; beyond, four waves even out the last one."""

PARTIAL_BYTES: Final = 8
"""Bytes of a channel's (mean, M2) in one part."""


class SplitColumns(NamedTuple):
    """How columns are cut, whatever the number of rows: parts of a tile, in chunks of `unroll` rows a thread."""

    tile: Tile
    threads: int
    min_blocks: int
    unroll: int
    sm_count: int
    row_bytes: int
    run_bytes: int

    @property
    def tuning(self) -> dict[str, int]:
        """What programs are compiled for."""
        return {
            "vector": self.tile.vector,
            "across": self.tile.across,
            "threads": self.threads,
            "unroll": self.unroll,
            "min_blocks": self.min_blocks,
        }

    @property
    def chunk(self) -> int:
        """Rows of a chunk."""
        return self.threads // self.tile.across * self.unroll

    def cut(self, rows: int) -> Cut:
        """Parts enough to fill the chip, and few enough that merging a channel's costs less than reading one."""
        waves = 1 if rows * self.row_bytes <= ONE_WAVE_BYTES else 4
        wanted = -(-waves * self.min_blocks * self.sm_count // self.tile.tiles)
        # p parts of rows / p rows: p * PARTIAL_BYTES of partials a channel stay below rows / p * run_bytes of data.
        sensible = max(1, math.isqrt(rows * self.run_bytes // PARTIAL_BYTES))
        chunks = -(-rows // (min(wanted, sensible) * self.chunk))
        return Cut(chunks, -(-rows // (chunks * self.chunk)))


@final
class SplitColumnBatchNorm(BatchNormTrain):
    """Parts of tiles of columns in two launches: `(N, C)`, channels innermost, channels in short runs."""

    supported_archs = at_least(80)

    @classmethod
    def refusal(cls, call: BatchNormTrainCall) -> str | None:
        """None where vectors are laid across channels and a block does not hold its tile."""
        return refusal_of("split_column", call)

    @classmethod
    def entry_for(cls, call: BatchNormTrainCall) -> tuple[Hashable, Callable[[], Entry]]:
        """All batch sizes share the two programs; how long a part is is an argument of their launches."""
        return (*identity_facts(call, run_of(call)), split_columns(call)), lambda: _entry(call)


def _entry(call: BatchNormTrainCall) -> Entry:
    """The two launches as one entry, with the contract of `BatchNormTrain.forward`."""
    from tileops.kernels.batch_norm.split_column_program import (
        split_column_apply_program,
        split_column_moments_program,
    )

    split, c, columns = split_columns(call), call.c, call.c * run_of(call)
    constants = constants_of(call)
    launches = TwoLaunches.built(
        lambda: Launch(call, split_column_moments_program(call.arch, c, run_of(call), call.dtype, **split.tuning)),
        lambda: Launch(call, split_column_apply_program(*program_facts(call, run_of(call)), **split.tuning)),
    )

    def run(
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Results:
        rows = x.numel() // columns
        chunks, parts = split.cut(rows)
        statistics = (running_mean, running_var, weight, bias)
        return launches(x, (rows, columns), c, statistics, constants, chunks, (2, parts, c))

    return Entry(run, kernels=launches)


def split_columns(call: BatchNormTrainCall) -> SplitColumns:
    """How columns are cut for all batch sizes of a call."""
    return columns_cut(call, COLUMN_THREADS, MIN_BLOCKS, CHUNK_BYTES, CHUNK_ROWS)


def columns_cut(call: TrainCall, threads: int, min_blocks: int, chunk_bytes: int, chunk_rows: int) -> SplitColumns:
    """The same for blocks of `threads`, which read at most so many bytes and rows of a tensor before they use any."""
    run_bytes = run_of(call) * call.dtype.itemsize
    row_bytes = call.c * run_bytes
    # Every block of a tile reads the partials of the whole tile: a narrow matrix has few tiles, many parts.
    tile = tile_of(call, LINE_BYTES if row_bytes >= 16 * LINE_BYTES else SECTOR_PAIR)
    unroll = min(chunk_rows, chunk_bytes // (tile.vector * call.dtype.itemsize))
    return SplitColumns(tile, threads, min_blocks, unroll, call.sm_count, row_bytes, run_bytes)
