"""Batch norm in training where neighbours in memory belong to different channels."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, Final, NamedTuple, final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.batch_norm.interface import BATCH_CAP, BatchNormTrain, BatchNormTrainCall
from tileops.kernels.batch_norm.launch import (
    Launch,
    identity_facts,
    launch_training,
    program_facts,
    two_launches,
)
from tileops.kernels.batch_norm.regions import LINE_BYTES, columns_of, refusal_of, vector_width
from tileops.kernels.kernel_base import Entry

THREADS: Final = 512
"""Threads of a block: alone on an SM they have 128 registers each, in pairs of blocks 64."""

SECTOR_PAIR: Final = 64
"""The least bytes of a row that a block takes: what DRAM fetches at once."""

LONE_REGISTERS: Final = 64
"""Registers of data of a thread where tiles keep every SM busy: half of the 128."""

FEW_REGISTERS: Final = 32
"""The same where they do not, 64 KiB a block: what one SM reads and writes in the time of a second launch."""

OTHER_REGISTERS: Final = 40
"""Registers beside the data and three values a lane; read off the compiler's report."""

STREAM_BLOCKS: Final = 2
"""Blocks of the two-launch programs that share an SM."""

STREAM_BYTES: Final = 64
"""Bytes that a thread reads before it uses any: 64 KiB of reads in flight on an SM."""

STREAM_ROWS: Final = 16
"""The same for vectors too narrow to fill STREAM_BYTES: each takes a register, however few bytes it has."""

ONE_WAVE_BYTES: Final = 64 << 20
"""Up to about the L2 cache's size all blocks run at once; beyond, four waves even out the last one."""

PARTIAL_BYTES: Final = 8
"""Bytes of a channel's (mean, M2) in one part."""


class Tile(NamedTuple):
    """What a block takes: `across` vectors of a row by `down` rows at a time, `steps` times."""

    vector: int
    across: int
    down: int
    threads: int
    steps: int


class Stream(NamedTuple):
    """A tile of the two-launch programs: a part is `down * unroll * chunks` rows."""

    vector: int
    across: int
    down: int
    threads: int
    unroll: int
    chunks: int
    counter: str


@final
class ColumnBatchNorm(BatchNormTrain):
    """Columns of a matrix: `(N, C)`, channels innermost, and channels in runs below a cache line."""

    supported_archs = at_least(80)

    @classmethod
    def refusal(cls, call: BatchNormTrainCall) -> str | None:
        """None where vectors are laid across channels."""
        return refusal_of("column", call)

    @classmethod
    def entry_for(cls, call: BatchNormTrainCall) -> tuple[Hashable, Callable[[], ColumnBatchNorm | Entry]]:
        """One launch where a block holds its tile, else two; batch sizes share what they can."""
        facts = identity_facts(call, _run(call))
        tile = _held_tile(call)
        if tile is not None:
            return (*facts, tile), lambda: cls(call)
        return (*facts, _stream(call)), lambda: _entry(call)

    def __init__(self, call: BatchNormTrainCall | None = None) -> None:
        super().__init__(call)
        assert call is not None
        from tileops.kernels.batch_norm.column_program import column_held_program

        tile = _held_tile(call)
        assert tile is not None, "two launches"
        registers = tile.steps * _registers(tile.vector, call) + 3 * tile.vector + OTHER_REGISTERS
        self._columns = call.c * _run(call)
        self._c = call.c
        self._launch: Callable[..., Any] = column_held_program(
            *program_facts(call, _run(call)),
            min_blocks=max(1, min(65536 // (tile.threads * registers), 1536 // tile.threads)),
            **tile._asdict(),
        )

    def forward(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One launch."""
        shape = (x.numel() // self._columns, self._columns)
        return launch_training(self._launch, x, shape, self._c, (running_mean, running_var, weight, bias))


def _entry(call: BatchNormTrainCall) -> Entry:
    """The two launches as one entry, with the contract of `BatchNormTrain.forward`."""
    from tileops.kernels.batch_norm.column_program import column_apply_program, column_moments_program

    stream, run = _stream(call), _run(call)
    tuning: dict[str, Any] = {"min_blocks": STREAM_BLOCKS, **stream._asdict()}
    c, columns, part_rows = call.c, call.c * run, stream.down * stream.unroll * stream.chunks
    return two_launches(
        Launch(call, column_moments_program(call.arch, c, run, call.dtype, **tuning)),
        Launch(call, column_apply_program(*program_facts(call, run), **tuning)),
        channels=c,
        shape_of=lambda x: (x.numel() // columns, columns),
        partials_of=lambda shape: (2, -(-shape[0] // part_rows), c),
    )


def _run(call: BatchNormTrainCall) -> int:
    return columns_of(call.spatial, call.channels_last)


def _registers(vector: int, call: BatchNormTrainCall) -> int:
    """Registers of one vector."""
    return max(1, vector * call.dtype.itemsize // 4)


def _rows(call: BatchNormTrainCall) -> int:
    return call.n * call.spatial // _run(call)


def _across(call: BatchNormTrainCall, least_bytes: int) -> tuple[int, int, int]:
    """(vector, vectors of a tile's row, tiles): whole channels that fill at least `least_bytes`, or the matrix."""
    run, columns = _run(call), call.c * _run(call)
    vector = vector_width(columns, call.dtype)
    unit = run // math.gcd(run, vector)
    vectors = columns // vector
    across = min(unit * -(-least_bytes // (unit * vector * call.dtype.itemsize)), vectors)
    return vector, across, -(-vectors // across)


def _held_tile(call: BatchNormTrainCall) -> Tile | None:
    """The tile where one block holds all of its rows, or None. Wide tiles only where there are enough of them."""
    for least_bytes, least_tiles, registers in (
        (LINE_BYTES, 2 * call.sm_count, FEW_REGISTERS),
        (SECTOR_PAIR, call.sm_count, LONE_REGISTERS),
        (SECTOR_PAIR, 1, FEW_REGISTERS),
    ):
        vector, across, tiles = _across(call, least_bytes)
        down = min(_rows(call), THREADS // across)
        steps = -(-_rows(call) // down)
        if tiles >= least_tiles and steps * _registers(vector, call) <= registers:
            return Tile(vector, across, down, -(-across * down // 32) * 32, steps)
    return None


def _stream(call: BatchNormTrainCall) -> Stream:
    """Parts enough to fill the chip, and few enough that merging a channel's parts costs less than reading one."""
    row_bytes = call.c * _run(call) * call.dtype.itemsize
    # Every block of a tile reads the partials of the whole tile: a narrow matrix has few tiles, many parts.
    vector, across, tiles = _across(call, LINE_BYTES if row_bytes >= 16 * LINE_BYTES else SECTOR_PAIR)
    down = THREADS // across
    unroll = min(STREAM_ROWS, STREAM_BYTES // (vector * call.dtype.itemsize))
    rows = _rows(call)
    waves = 1 if rows * row_bytes <= ONE_WAVE_BYTES else 4
    wanted = -(-waves * STREAM_BLOCKS * call.sm_count // tiles)
    # p parts of rows / p rows: p * PARTIAL_BYTES of partials a channel stay below rows / p * itemsize of data.
    sensible = max(1, math.isqrt(rows * _run(call) * call.dtype.itemsize // PARTIAL_BYTES))
    chunks = -(-rows // (min(wanted, sensible) * down * unroll))
    # A batch size of the last class is open-ended, and its rows may be more than 32 bits count.
    wide = call.n >= BATCH_CAP or rows >= 1 << 30
    return Stream(vector, across, down, THREADS, unroll, chunks, "int64" if wide else "int32")
