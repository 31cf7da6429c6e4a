"""Batch norm in training, one block a channel."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final, final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.batch_norm.interface import BatchNormTrain, BatchNormTrainCall
from tileops.kernels.batch_norm.launch import identity_facts, launch_training, program_facts
from tileops.kernels.batch_norm.regions import (
    BLOCK_THREADS,
    channel_vectors,
    held_steps,
    refusal_of,
    vector_width,
)

THREAD_BYTES: Final = 64
"""Bytes that a thread holds where there are blocks enough: four accesses in flight, and still many threads."""

LEAST_THREADS: Final = 64
"""Below two warps a block is mostly latency, and an SM's 32 block slots run out before its threads do."""

OTHER_REGISTERS: Final = 36
"""Registers of a thread beside the data: addresses, sums, the affine pair; read off the compiler's report."""


@final
class HeldChannelBatchNorm(BatchNormTrain):
    """One block a channel, which its registers hold: channels of up to 48 KiB."""

    supported_archs = at_least(80)

    @classmethod
    def refusal(cls, call: BatchNormTrainCall) -> str | None:
        """None where one block is the fastest to serve a channel."""
        return refusal_of("held_channel", call)

    @classmethod
    def entry_for(cls, call: BatchNormTrainCall) -> tuple[Hashable, Callable[[], HeldChannelBatchNorm]]:
        """Batch sizes share a program as far as they ask for the same block."""
        return (*identity_facts(call, call.spatial), *_block(call)), lambda: cls(call)

    def __init__(self, call: BatchNormTrainCall | None = None) -> None:
        super().__init__(call)
        assert call is not None
        from tileops.kernels.batch_norm.held_channel_program import held_channel_program

        threads, steps = _block(call)
        vector = vector_width(call.spatial, call.dtype)
        self._shape = (call.c, call.spatial)
        self._launch: Callable[..., Any] = held_channel_program(
            *program_facts(call, call.spatial),
            vector=vector,
            threads=threads,
            steps=steps,
            min_blocks=_blocks_per_sm(threads, steps * max(1, vector * call.dtype.itemsize // 4)),
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
        shape = (x.shape[0], *self._shape)
        return launch_training(self._launch, x, shape, self._shape[0], (running_mean, running_var, weight, bias))


def _block(call: BatchNormTrainCall) -> tuple[int, int]:
    """(threads, vectors a thread): all threads where blocks are few, else as many as hold THREAD_BYTES each."""
    vectors = channel_vectors(call)
    vector = vector_width(call.spatial, call.dtype)
    each = max(1, THREAD_BYTES // (vector * call.dtype.itemsize)) if call.c >= 2 * call.sm_count else 1
    threads = LEAST_THREADS
    while threads < BLOCK_THREADS and threads * min(each, held_steps(vector, call.dtype)) < vectors:
        threads *= 2
    return threads, -(-vectors // threads)


def _blocks_per_sm(threads: int, data_registers: int) -> int:
    """How many blocks share an SM's 65536 registers and 1536 threads (2048 on some boards)."""
    return max(1, min(65536 // (threads * (data_registers + OTHER_REGISTERS)), 1536 // threads))
