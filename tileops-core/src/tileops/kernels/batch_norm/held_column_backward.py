"""Batch norm's backward in training where neighbours in memory are of different channels, and a block holds all rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.batch_norm.backward_interface import BatchNormBwdCall, BatchNormBwdTrain
from tileops.kernels.batch_norm.backward_launch import Gradients, Results, identity_facts, program_facts
from tileops.kernels.batch_norm.held_column import REGISTERS
from tileops.kernels.batch_norm.launch import viewed
from tileops.kernels.batch_norm.regions import COLUMN_THREADS, WARP, held_tile, refusal_of, run_of


@final
class HeldColumnBatchNormBwd(BatchNormBwdTrain):
    """One block for a tile of columns, in one launch: `(N, C)`, channels innermost, channels in short runs."""

    supported_archs = at_least(80)

    @classmethod
    def refusal(cls, call: BatchNormBwdCall) -> str | None:
        """None where vectors are laid across channels and a block holds its tile of x and of the gradient."""
        return refusal_of("held_column", call)

    @classmethod
    def entry_for(cls, call: BatchNormBwdCall) -> tuple[Hashable, Callable[[], HeldColumnBatchNormBwd]]:
        """All batch sizes share one program."""
        return (*identity_facts(call, run_of(call)), held_tile(call)), lambda: cls(call)

    def __init__(self, call: BatchNormBwdCall | None = None) -> None:
        super().__init__(call)
        assert call is not None
        from tileops.kernels.batch_norm.held_column_backward_program import held_column_backward_program

        tile, steps = held_tile(call)
        self._results, self._columns = Results.of(call), call.c * run_of(call)
        self._launch: Callable[..., Any] = held_column_backward_program(
            *program_facts(call, run_of(call)),
            vector=tile.vector,
            across=tile.across,
            most_warps=COLUMN_THREADS // WARP,
            fill_warps=-(-call.sm_count * COLUMN_THREADS // (WARP * tile.tiles)),
            steps=steps,
            registers=REGISTERS,
        )

    def forward(self, grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None) -> Gradients:
        """One launch."""
        shape = (x.numel() // self._columns, self._columns)
        grad_x, *sums = gradients = self._results.empty(x)
        self._launch(viewed(grad, shape), viewed(x, shape), mean, invstd, weight, viewed(grad_x, shape), *sums)
        return gradients
