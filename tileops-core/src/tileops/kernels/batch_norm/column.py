"""Batch norm in training where neighbours in memory belong to different channels."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from tileops.device import at_least
from tileops.kernels.batch_norm.interface import BATCH_CAP, BatchNormTrain, BatchNormTrainCall
from tileops.kernels.batch_norm.regions import LINE_BYTES, columns_of, refusal_of, vector_width
from tileops.kernels.kernel_base import Entry, Kernel

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
        facts = (call.device, call.c, _run(call), call.dtype, call.weight_dtype, call.bias_dtype, call.running)
        tile = _held_tile(call)
        if tile is not None:
            return (*facts, call.eps, call.momentum, tile), lambda: cls(call)
        return (*facts, call.eps, call.momentum, _stream(call)), lambda: _entry(call)

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
            *_program_facts(call),
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
        """One launch. `mean` stands in for every tensor that is absent: the program does not read those."""
        shape, strides = (x.numel() // self._columns, self._columns), (self._columns, 1)
        y = torch.empty_like(x)
        mean = x.new_empty(self._c, dtype=torch.float32)
        invstd = torch.empty_like(mean)
        self._launch(
            x.as_strided(shape, strides),
            mean if running_mean is None else running_mean,
            mean if running_var is None else running_var,
            mean if weight is None else weight,
            mean if bias is None else bias,
            y.as_strided(shape, strides),
            mean,
            invstd,
        )
        return y, mean, invstd


class ColumnMoments(Kernel[BatchNormTrainCall]):
    """The first launch: (mean, M2) of each channel in each part of the rows."""

    supported_archs = ColumnBatchNorm.supported_archs

    def __init__(self, call: BatchNormTrainCall | None = None) -> None:
        super().__init__(call)
        assert call is not None
        from tileops.kernels.batch_norm.column_program import column_moments_program

        self._launch: Callable[..., Any] = column_moments_program(
            call.arch, call.c, _run(call), call.dtype, min_blocks=STREAM_BLOCKS, **_stream(call)._asdict()
        )

    def forward(self, x: Tensor, partials: Tensor) -> None:
        """Write partials, float32 (2, parts, c), from x as (rows, columns)."""
        self._launch(x, partials)


class ColumnApply(Kernel[BatchNormTrainCall]):
    """The second launch: every block merges its channels' parts and writes its part of the output."""

    supported_archs = ColumnBatchNorm.supported_archs

    def __init__(self, call: BatchNormTrainCall | None = None) -> None:
        super().__init__(call)
        assert call is not None
        from tileops.kernels.batch_norm.column_program import column_apply_program

        self._launch: Callable[..., Any] = column_apply_program(
            *_program_facts(call), min_blocks=STREAM_BLOCKS, **_stream(call)._asdict()
        )

    def forward(self, *tensors: Tensor) -> None:
        """Take the tensors in the program's order; see `column_apply_program`."""
        self._launch(*tensors)


def _entry(call: BatchNormTrainCall) -> Entry:
    """The two launches as one entry, with the contract of `BatchNormTrain.forward`."""
    moments, apply = ColumnMoments(call), ColumnApply(call)
    stream = _stream(call)
    c, columns, part_rows = call.c, call.c * _run(call), stream.down * stream.unroll * stream.chunks

    def run(
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        shape, strides = (x.numel() // columns, columns), (columns, 1)
        rows = x.as_strided(shape, strides)
        partials = x.new_empty((2, -(-shape[0] // part_rows), c), dtype=torch.float32)
        moments(rows, partials)
        y = torch.empty_like(x)
        mean = x.new_empty(c, dtype=torch.float32)
        invstd = torch.empty_like(mean)
        # `mean` stands in for every tensor that is absent: the program does not read those.
        apply(
            rows,
            partials,
            mean if running_mean is None else running_mean,
            mean if running_var is None else running_var,
            mean if weight is None else weight,
            mean if bias is None else bias,
            y.as_strided(shape, strides),
            mean,
            invstd,
        )
        return y, mean, invstd

    return Entry(run, kernels=(moments, apply))


def _run(call: BatchNormTrainCall) -> int:
    return columns_of(call.spatial, call.channels_last)


def _program_facts(call: BatchNormTrainCall) -> tuple[Any, ...]:
    affine = (call.weight_dtype, call.bias_dtype)
    return (call.arch, call.c, _run(call), call.dtype, *affine, call.running, call.eps, call.momentum)


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
