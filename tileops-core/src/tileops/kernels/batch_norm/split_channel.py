"""Batch norm in training, several blocks a channel in two launches."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from tileops.device import at_least
from tileops.kernels.batch_norm.interface import BATCH_CAP, BatchNormTrain, BatchNormTrainCall
from tileops.kernels.batch_norm.regions import channel_vectors, refusal_of, vector_width
from tileops.kernels.kernel_base import Entry, Kernel

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
        facts = (call.device, call.c, call.spatial, call.dtype, call.weight_dtype, call.bias_dtype, call.running)
        return (*facts, call.eps, call.momentum, _parts(call)), lambda: _entry(call)


class SplitMoments(Kernel[BatchNormTrainCall]):
    """The first launch: (mean, M2) of each part of each channel."""

    supported_archs = SplitChannelBatchNorm.supported_archs

    def __init__(self, call: BatchNormTrainCall | None = None) -> None:
        super().__init__(call)
        assert call is not None
        from tileops.kernels.batch_norm.split_channel_program import split_moments_program

        self._launch: Callable[..., Any] = split_moments_program(
            call.arch,
            call.c,
            call.spatial,
            call.dtype,
            threads=THREADS,
            min_blocks=MIN_BLOCKS,
            **_parts(call)._asdict(),
        )

    def forward(self, x: Tensor, partials: Tensor) -> None:
        """Write partials, float32 (2, c, parts), from x as (n, c, spatial)."""
        self._launch(x, partials)


class SplitApply(Kernel[BatchNormTrainCall]):
    """The second launch: every block merges its channel's parts and writes its part of the output."""

    supported_archs = SplitChannelBatchNorm.supported_archs

    def __init__(self, call: BatchNormTrainCall | None = None) -> None:
        super().__init__(call)
        assert call is not None
        from tileops.kernels.batch_norm.split_channel_program import split_apply_program

        self._launch: Callable[..., Any] = split_apply_program(
            call.arch,
            call.c,
            call.spatial,
            call.dtype,
            call.weight_dtype,
            call.bias_dtype,
            call.running,
            call.eps,
            call.momentum,
            threads=THREADS,
            min_blocks=MIN_BLOCKS,
            **_parts(call)._asdict(),
        )

    def forward(self, *tensors: Tensor) -> None:
        """Take the tensors in the program's order; see `split_apply_program`."""
        self._launch(*tensors)


def _entry(call: BatchNormTrainCall) -> Entry:
    """The two launches as one entry, with the contract of `BatchNormTrain.forward`."""
    moments, apply = SplitMoments(call), SplitApply(call)
    c, spatial = call.c, call.spatial
    cut = _parts(call)
    run_vectors, part_items = spatial // cut.vector, cut.items

    def run(
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        shape, strides = (x.shape[0], c, spatial), (c * spatial, spatial, 1)
        rows = x.as_strided(shape, strides)
        partials = x.new_empty((2, c, -(-x.shape[0] * run_vectors // part_items)), dtype=torch.float32)
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


def _parts(call: BatchNormTrainCall) -> Parts:
    """Parts enough for WAVES turns of the chip, of at least one chunk and at most MOST_CHUNKS."""
    vector = vector_width(call.spatial, call.dtype)
    unroll = min(CHUNK_VECTORS, CHUNK_BYTES // (vector * call.dtype.itemsize))
    blocks = WAVES * MIN_BLOCKS * call.sm_count
    chunks = channel_vectors(call) * call.c // (blocks * THREADS * unroll)
    # A batch size of the last class is open-ended, and its items may be more than 32 bits count.
    wide = call.n >= BATCH_CAP or channel_vectors(call) >= 1 << 30
    return Parts(vector, unroll, max(1, min(chunks, MOST_CHUNKS)), "int64" if wide else "int32")
