"""Batch norm in inference: a map."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final, final

import torch
from torch import Tensor

from tileops.device import at_least
from tileops.kernels.batch_norm.interface import BatchNormInfer, BatchNormInferCall
from tileops.kernels.batch_norm.regions import run_of, vector_width
from tileops.kernels.dtypes import refusal_of_dtypes

THREADS: Final = 256

RUN_BYTES: Final = 8
"""The narrowest access along a run that keeps up with memory: half of the widest, twice as many in flight."""

RUN_UNROLL: Final = 4
"""Vectors of a thread along runs: 1024 threads an SM then have 64 KiB of reads in flight."""

COLUMN_UNROLL: Final = 8
"""Rows of a thread across channels: four numbers a lane are read for them once."""

RUN_BLOCKS: Final = 6
"""Blocks of an SM along runs: 1536 threads of 40 registers."""

COLUMN_BLOCKS: Final = 3
"""Blocks of an SM across channels: 768 threads of 80 registers, 56 of which are data and lanes."""


@final
class ElementwiseBatchNorm(BatchNormInfer):
    """`(x - mean) * scale + shift`, vectors along runs of a channel where they are wide there, else across channels."""

    supported_archs = at_least(80)

    @classmethod
    def refusal(cls, call: BatchNormInferCall) -> str | None:
        """Every shape, in the dtypes that our programs have."""
        return refusal_of_dtypes(call.dtype, weight=call.weight_dtype, bias=call.bias_dtype)

    @classmethod
    def entry_for(cls, call: BatchNormInferCall) -> tuple[Hashable, Callable[[], ElementwiseBatchNorm]]:
        """The call is the identity: it holds no batch size."""
        return call, lambda: cls(call)

    def __init__(self, call: BatchNormInferCall | None = None) -> None:
        super().__init__(call)
        assert call is not None
        along, self._eps = _along_runs(call), float(call.eps)
        self._columns = call.spatial if along else call.c * run_of(call)
        self._launch: Callable[..., Any] = _run_map(call) if along else _column_map(call)
        # Elements of a full chip whose threads take a vector each.
        vector = vector_width(call.spatial if along else call.c * run_of(call), call.dtype)
        self._turn = call.sm_count * (RUN_BLOCKS if along else COLUMN_BLOCKS) * THREADS * vector
        self._most_taken = RUN_UNROLL if along else COLUMN_UNROLL

    def forward(
        self, x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """One launch. `running_mean` stands in for an absent tensor: the program does not read it as that."""
        size = x.numel()
        shape, strides = (size // self._columns, self._columns), (self._columns, 1)
        y = torch.empty_like(x)
        self._launch(
            x.as_strided(shape, strides),
            min(self._most_taken, 1 + size // self._turn),  # few each, until all of the chip is busy
            running_mean,
            running_var,
            running_mean if weight is None else weight,
            running_mean if bias is None else bias,
            y.as_strided(shape, strides),
            self._eps,
        )
        return y


def _along_runs(call: BatchNormInferCall) -> bool:
    """Whether a channel's runs take vectors that are wide, or as wide as any would be."""
    if call.channels_last or call.spatial == 1:
        return False
    width = vector_width(call.spatial, call.dtype)
    return width * call.dtype.itemsize >= RUN_BYTES or width == vector_width(call.c * call.spatial, call.dtype)


def _run_map(call: BatchNormInferCall) -> Callable[..., Any]:
    from tileops.kernels.batch_norm.elementwise_program import run_map_program

    return run_map_program(
        call.arch,
        call.c,
        call.spatial,
        call.dtype,
        call.weight_dtype,
        call.bias_dtype,
        vector=vector_width(call.spatial, call.dtype),
        threads=THREADS,
        unroll=RUN_UNROLL,
        min_blocks=RUN_BLOCKS,
    )


def _column_map(call: BatchNormInferCall) -> Callable[..., Any]:
    from tileops.kernels.batch_norm.elementwise_program import column_map_program

    run = run_of(call)
    vector = vector_width(call.c * run, call.dtype)
    across = min(call.c * run // vector, THREADS)
    return column_map_program(
        call.arch,
        call.c,
        run,
        call.dtype,
        call.weight_dtype,
        call.bias_dtype,
        vector=vector,
        across=across,
        down=THREADS // across,
        threads=THREADS,
        unroll=COLUMN_UNROLL,
        min_blocks=COLUMN_BLOCKS,
    )
