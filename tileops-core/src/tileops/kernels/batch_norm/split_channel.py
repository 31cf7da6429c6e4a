"""Batch norm in training, several blocks a channel in two launches."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final, NamedTuple, final

from tileops.device import at_least
from tileops.kernels.batch_norm.interface import BATCH_CAP, BatchNormTrain, BatchNormTrainCall
from tileops.kernels.batch_norm.launch import Launch, identity_facts, program_facts, two_launches
from tileops.kernels.batch_norm.regions import channel_vectors, refusal_of, vector_width
from tileops.kernels.kernel_base import Entry

THREADS: Final = 256

MIN_BLOCKS: Final = 4
"""Blocks that share an SM: 1024 threads of 64 registers, with 64 KiB of reads in flight between them."""

CHUNK_BYTES: Final = 64
"""Bytes that a thread reads before it uses any: four accesses of 16 bytes."""

CHUNK_VECTORS: Final = 12
"""The same for vectors too narrow to fill CHUNK_BYTES: each takes a register, however few bytes it has."""

WAVES: Final = 8
"""Parts are cut so that the chip takes about this many turns at them: the last turn, part empty, costs little."""

MOST_CHUNKS: Final = 16
"""Longer parts gain nothing: merging a channel's parts is already nothing against reading one."""


class Parts(NamedTuple):
    """How a channel is cut: a part is `chunks` chunks of `unroll` vectors for each of THREADS threads."""

    vector: int
    unroll: int
    chunks: int
    counter: str

    @property
    def items(self) -> int:
        """Vectors of a part."""
        return THREADS * self.unroll * self.chunks


@final
class SplitChannelBatchNorm(BatchNormTrain):
    """Parts of channels in two launches: the general implementation, for channels that do not stay on chip."""

    supported_archs = at_least(80)
    general = True

    @classmethod
    def refusal(cls, call: BatchNormTrainCall) -> str | None:
        """None wherever a channel's values lie in runs of a line or more: `column` has the others."""
        return refusal_of("split_channel", call)

    @classmethod
    def entry_for(cls, call: BatchNormTrainCall) -> tuple[Hashable, Callable[[], Entry]]:
        """Batch sizes share the two programs as far as they cut channels alike."""
        return (*identity_facts(call, call.spatial), _parts(call)), lambda: _entry(call)


def _entry(call: BatchNormTrainCall) -> Entry:
    """The two launches as one entry, with the contract of `BatchNormTrain.forward`."""
    from tileops.kernels.batch_norm.split_channel_program import split_apply_program, split_moments_program

    cut = _parts(call)
    tuning: dict[str, Any] = {"threads": THREADS, "min_blocks": MIN_BLOCKS, **cut._asdict()}
    c, spatial, run_vectors = call.c, call.spatial, call.spatial // cut.vector
    return two_launches(
        Launch(call, split_moments_program(call.arch, c, spatial, call.dtype, **tuning)),
        Launch(call, split_apply_program(*program_facts(call, spatial), **tuning)),
        channels=c,
        shape_of=lambda x: (x.shape[0], c, spatial),
        partials_of=lambda shape: (2, c, -(-shape[0] * run_vectors // cut.items)),
    )


def _parts(call: BatchNormTrainCall) -> Parts:
    """Parts enough for WAVES turns of the chip, of at least one chunk and at most MOST_CHUNKS."""
    vector = vector_width(call.spatial, call.dtype)
    unroll = min(CHUNK_VECTORS, CHUNK_BYTES // (vector * call.dtype.itemsize))
    blocks = WAVES * MIN_BLOCKS * call.sm_count
    chunks = channel_vectors(call) * call.c // (blocks * THREADS * unroll)
    # A batch size of the last class is open-ended, and its items may be more than 32 bits count.
    wide = call.n >= BATCH_CAP or channel_vectors(call) >= 1 << 30
    return Parts(vector, unroll, max(1, min(chunks, MOST_CHUNKS)), "int64" if wide else "int32")
