"""Batch norm in training, several blocks a channel in two launches."""

from __future__ import annotations

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
from tileops.kernels.batch_norm.regions import refusal_of, vector_width
from tileops.kernels.kernel_base import Entry

THREADS: Final = 256

MIN_BLOCKS: Final = 3
"""Blocks that share an SM: 768 threads of 80 registers, with 96 KiB of reads in flight between them."""

CHUNK_BYTES: Final = 128
"""Bytes that a thread reads before it uses any: eight accesses of 16 bytes.

Measured on an H200 in float16, µs of 4 blocks that read 64 bytes and 3 that read 128: (32, 64, 12544) 50.8, 45.1;
(256, 64, 3136) 85.7, 84.0; (32, 256, 3136) 54.6, 48.2.
"""

CHUNK_VECTORS: Final = 12
"""The same for vectors too narrow to fill CHUNK_BYTES: each takes a register, however few bytes it has."""

WAVES: Final = 4
"""Parts are cut so that the chip takes about this many turns at them.

Few, since a part begins with merging all parts of its channel; several, since the last turn is part empty. Measured
on an H200 in float16, µs of 1, 2, 4 and 8 turns: (256, 64, 3136) 98.5, 87.6, 84.9, 93.9; (64, 64, 12544) 97.0, 87.1,
84.5, 93.2.
"""

MOST_CHUNKS: Final = 64
"""Longer parts gain nothing: merging a channel's parts is already nothing against reading one."""


class SplitChannels(NamedTuple):
    """How channels are cut, whatever the batch size: into parts of chunks of `unroll` vectors for each thread."""

    vector: int
    unroll: int
    blocks: int

    @property
    def chunk(self) -> int:
        """Vectors of a chunk."""
        return THREADS * self.unroll

    def cut(self, items: int, channels: int) -> Cut:
        """Parts of `items` vectors of each channel: about `blocks` in all, of at most MOST_CHUNKS chunks."""
        chunks = max(1, min(items * channels // (self.blocks * self.chunk), MOST_CHUNKS))
        return Cut(chunks, -(-items // (chunks * self.chunk)))


@final
class SplitChannelBatchNorm(BatchNormTrain):
    """Parts of channels in two launches: the general implementation, for channels that do not stay on chip."""

    supported_archs = at_least(80)
    general = True

    @classmethod
    def refusal(cls, call: BatchNormTrainCall) -> str | None:
        """None wherever a channel's values lie in runs of a line or more: tiles of columns are for the others."""
        return refusal_of("split_channel", call)

    @classmethod
    def entry_for(cls, call: BatchNormTrainCall) -> tuple[Hashable, Callable[[], Entry]]:
        """All batch sizes share the two programs; how long a part is is an argument of their launches."""
        return (*identity_facts(call, call.spatial), split_channels(call)), lambda: _entry(call)


def _entry(call: BatchNormTrainCall) -> Entry:
    """The two launches as one entry, with the contract of `BatchNormTrain.forward`."""
    from tileops.kernels.batch_norm.split_channel_program import split_apply_program, split_moments_program

    split, c, spatial = split_channels(call), call.c, call.spatial
    constants = constants_of(call)
    tuning = {"vector": split.vector, "threads": THREADS, "unroll": split.unroll, "min_blocks": MIN_BLOCKS}
    launches = TwoLaunches.built(
        lambda: Launch(call, split_moments_program(call.arch, c, spatial, call.dtype, **tuning)),
        lambda: Launch(call, split_apply_program(*program_facts(call, spatial), **tuning)),
    )

    def run(
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Results:
        n = x.shape[0]
        chunks, parts = split.cut(n * spatial // split.vector, c)
        statistics = (running_mean, running_var, weight, bias)
        return launches(x, (n, c, spatial), c, statistics, constants, chunks, (2, c, parts))

    return Entry(run, kernels=launches)


def split_channels(call: BatchNormTrainCall) -> SplitChannels:
    """How channels are cut for all batch sizes of a call."""
    vector = vector_width(call.spatial, call.dtype)
    unroll = min(CHUNK_VECTORS, CHUNK_BYTES // (vector * call.dtype.itemsize))
    return SplitChannels(vector, unroll, WAVES * MIN_BLOCKS * call.sm_count)
