"""Batch norm's backward in training, several blocks a channel in two launches."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final, final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.batch_norm.backward_interface import BatchNormBwdCall, BatchNormBwdTrain
from tileops.kernels.batch_norm.backward_launch import SplitPrograms, identity_facts, program_facts, split_entry
from tileops.kernels.batch_norm.launch import Cut, Shape
from tileops.kernels.batch_norm.regions import refusal_of, vector_width
from tileops.kernels.batch_norm.split_channel import THREADS, SplitChannels
from tileops.kernels.kernel_base import Entry

MIN_BLOCKS: Final = 4
"""Blocks that share an SM."""

WAVES: Final = 4
"""Parts are cut so that the chip takes about this many turns at them; see `split_channel`.

Measured on an H200 in float16, µs of 2, 4 and 8 turns: (32, 64, 12544) 67.7, 65.9, 66.8; (256, 64, 3136) 137.4, 128.8,
126.8.
"""

CHUNK_BYTES: Final = 32
"""Bytes of each of two tensors that a thread reads before it uses any: 64 KiB of reads in flight on an SM.

Measured on an H200 in float16, µs of 32 and 64: (32, 64, 12544) 65.9, 65.7; (64, 512, 784) 70.6, 70.4.
"""

CHUNK_VECTORS: Final = 6
"""The same for vectors too narrow to fill CHUNK_BYTES: each takes a register, however few bytes it has."""


@final
class SplitChannelBatchNormBwd(BatchNormBwdTrain):
    """Parts of channels in two launches: the general implementation, for channels that do not stay on chip."""

    supported_archs = at_least(80)
    general = True

    @classmethod
    def refusal(cls, call: BatchNormBwdCall) -> str | None:
        """None wherever a channel's values lie in runs of a line or more: tiles of columns are for the others."""
        return refusal_of("split_channel", call)

    @classmethod
    def entry_for(cls, call: BatchNormBwdCall) -> tuple[Hashable, Callable[[], Entry]]:
        """All batch sizes share the programs; how long a part is is an argument of their launches."""
        identity = (*identity_facts(call, call.spatial), split_gradients(call))
        return identity, lambda: split_entry(call, channel_programs(call), training=True)


def channel_programs(call: BatchNormBwdCall) -> SplitPrograms:
    """What an entry is made of that lays vectors along a channel."""
    split, c, spatial = split_gradients(call), call.c, call.spatial
    tuning = {"vector": split.vector, "threads": THREADS, "unroll": split.unroll, "min_blocks": MIN_BLOCKS}

    def sums(**asked: Any) -> Callable[..., Any]:
        from tileops.kernels.batch_norm.split_channel_backward_program import split_channel_sums_program

        return split_channel_sums_program(*program_facts(call, spatial)[:-1], **asked, **tuning)

    def gradient() -> Callable[..., Any]:
        from tileops.kernels.batch_norm.split_channel_backward_program import split_channel_gradient_program

        return split_channel_gradient_program(*program_facts(call, spatial), **tuning)

    def cut(x: Tensor) -> tuple[Shape, Cut]:
        n = x.shape[0]
        return (n, c, spatial), split.cut(n * spatial // split.vector, c)

    return SplitPrograms(sums, gradient, cut)


def split_gradients(call: BatchNormBwdCall) -> SplitChannels:
    """How channels are cut for all batch sizes of a call."""
    vector = vector_width(call.spatial, call.dtype)
    unroll = min(CHUNK_VECTORS, CHUNK_BYTES // (vector * call.dtype.itemsize))
    return SplitChannels(vector, unroll, WAVES * MIN_BLOCKS * call.sm_count)
