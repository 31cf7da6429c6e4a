"""Batch norm in training where neighbours in memory belong to different channels, and one block holds all rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final, final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.batch_norm.interface import BatchNormTrain, BatchNormTrainCall
from tileops.kernels.batch_norm.launch import Results, constants_of, identity_facts, launch_training, program_facts
from tileops.kernels.batch_norm.regions import COLUMN_THREADS, WARP, held_tile, refusal_of, run_of

REGISTERS: Final = 128
"""Registers of a thread: COLUMN_THREADS of them have an SM's 65536."""


@final
class HeldColumnBatchNorm(BatchNormTrain):
    """One block for a tile of columns, in one launch: `(N, C)`, channels innermost, channels in short runs."""

    supported_archs = at_least(80)

    @classmethod
    def refusal(cls, call: BatchNormTrainCall) -> str | None:
        """None where vectors are laid across channels and a block holds its tile."""
        return refusal_of("held_column", call)

    @classmethod
    def entry_for(cls, call: BatchNormTrainCall) -> tuple[Hashable, Callable[[], HeldColumnBatchNorm]]:
        """All batch sizes share one program."""
        return (*identity_facts(call, run_of(call)), held_tile(call)), lambda: cls(call)

    def __init__(self, call: BatchNormTrainCall | None = None) -> None:
        super().__init__(call)
        assert call is not None
        from tileops.kernels.batch_norm.held_column_program import held_column_program

        tile, steps = held_tile(call)
        self._c, self._columns, self._constants = call.c, call.c * run_of(call), constants_of(call)
        self._launch: Callable[..., Any] = held_column_program(
            *program_facts(call, run_of(call)),
            vector=tile.vector,
            across=tile.across,
            most_warps=COLUMN_THREADS // WARP,
            fill_warps=-(-call.sm_count * COLUMN_THREADS // (WARP * tile.tiles)),
            steps=steps,
            registers=REGISTERS,
        )

    def forward(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Results:
        """One launch."""
        shape = (x.numel() // self._columns, self._columns)
        statistics = (running_mean, running_var, weight, bias)
        return launch_training(self._launch, x, shape, self._c, statistics, self._constants)
