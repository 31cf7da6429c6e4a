"""Batch norm's backward in training where neighbours in memory belong to different channels, in two launches."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final, final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.batch_norm.backward_interface import BatchNormBwdCall, BatchNormBwdTrain
from tileops.kernels.batch_norm.backward_launch import SplitPrograms, identity_facts, program_facts, split_entry
from tileops.kernels.batch_norm.launch import Cut, Shape
from tileops.kernels.batch_norm.regions import refusal_of, run_of
from tileops.kernels.batch_norm.split_column import SplitColumns, columns_cut
from tileops.kernels.kernel_base import Entry

THREADS: Final = 256

MIN_BLOCKS: Final = 4
"""Blocks that share an SM: 1024 threads of 64 registers.

Measured on an H200 in float16, µs of 3 blocks of 256 threads that read 64 bytes of each tensor at a time, 1 block of 512
threads that reads as many, and 4 blocks of 256 that read half: (8192, 1024) 25.2, 22.7, 23.2; (128, 2048, 49) 41.6,
42.4, 39.8; (32, 64, 12544) with channels innermost 77.3, 74.7, 76.1.
"""

CHUNK_BYTES: Final = 32
"""Bytes of each of two tensors that a thread reads before it uses any: 64 KiB of reads in flight on an SM."""

CHUNK_ROWS: Final = 8
"""The same for vectors too narrow to fill CHUNK_BYTES: each takes a register, however few bytes it has."""


@final
class SplitColumnBatchNormBwd(BatchNormBwdTrain):
    """Parts of tiles of columns in two launches: `(N, C)`, channels innermost, channels in short runs."""

    supported_archs = at_least(80)

    @classmethod
    def refusal(cls, call: BatchNormBwdCall) -> str | None:
        """None where vectors are laid across channels and a block does not hold its tile."""
        return refusal_of("split_column", call)

    @classmethod
    def entry_for(cls, call: BatchNormBwdCall) -> tuple[Hashable, Callable[[], Entry]]:
        """All batch sizes share the programs; how long a part is is an argument of their launches."""
        identity = (*identity_facts(call, run_of(call)), split_gradients(call))
        return identity, lambda: split_entry(call, column_programs(call), training=True)


def column_programs(call: BatchNormBwdCall) -> SplitPrograms:
    """What an entry is made of that lays vectors across channels."""
    split, c, run = split_gradients(call), call.c, run_of(call)

    def sums(**asked: Any) -> Callable[..., Any]:
        from tileops.kernels.batch_norm.split_column_backward_program import split_column_sums_program

        return split_column_sums_program(*program_facts(call, run)[:-1], **asked, **split.tuning)

    def gradient() -> Callable[..., Any]:
        from tileops.kernels.batch_norm.split_column_backward_program import split_column_gradient_program

        return split_column_gradient_program(*program_facts(call, run), **split.tuning)

    def cut(x: Tensor) -> tuple[Shape, Cut]:
        rows = x.numel() // (c * run)
        return (rows, c * run), split.cut(rows)

    return SplitPrograms(sums, gradient, cut)


def split_gradients(call: BatchNormBwdCall) -> SplitColumns:
    """How columns are cut for all batch sizes of a call."""
    return columns_cut(call, THREADS, MIN_BLOCKS, CHUNK_BYTES, CHUNK_ROWS)
