"""RMS norm of rows that fit in registers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.configurations import Configuration
from tileops.kernels.dtypes import refusal_of_dtypes
from tileops.kernels.rms_norm.interface import RMSNorm, RMSNormCall
from tileops.kernels.row_launch import Launch, launch_rows, row_launch
from tileops.kernels.row_plan import HELD_BY_RMS_NORM, held_row_configurations, held_row_plan, longest_held_row


@final
class HeldRowRMSNorm(RMSNorm):
    """Reads a row once into the registers of 1 to 1024 threads; serves rows of up to 128 KiB."""

    supported_archs = at_least(80)

    @classmethod
    def refusal(cls, call: RMSNormCall) -> str | None:
        """Rows of a served dtype that 1024 threads can hold, 32 registers each."""
        unserved = refusal_of_dtypes(call.dtype, weight=call.weight_dtype)
        if unserved is None and held_row_plan(call.n, call.dtype, HELD_BY_RMS_NORM) is None:
            most = longest_held_row(call.n, call.dtype, HELD_BY_RMS_NORM)
            return f"row of {call.n} elements; serves up to {most} of {call.dtype} at its alignment"
        return unserved

    @classmethod
    def entry_for(cls, call: RMSNormCall) -> tuple[Hashable, Callable[[], HeldRowRMSNorm]]:
        """One program serves every row count."""
        identity = (call.device, call.n, call.dtype, call.eps, call.weight_dtype)
        return identity, lambda: cls(call)

    @classmethod
    def configurations(cls, call: RMSNormCall) -> Sequence[Configuration]:
        """Threads of a row and rows of a block."""
        return held_row_configurations(call.n, call.dtype, HELD_BY_RMS_NORM)

    def __init__(self, call: RMSNormCall) -> None:
        # Imported here: importing tilelang takes seconds, and only a kernel that is built needs it.
        from tileops.kernels.compiled_program import compiled_once
        from tileops.kernels.rms_norm.held_row_program import rms_norm_held_row

        super().__init__(call)
        plan = held_row_plan(call.n, call.dtype, HELD_BY_RMS_NORM)
        assert plan is not None, "refusal() refuses such rows"
        plan = dataclasses.replace(plan, **self.configuration)
        self._n, self._eps = call.n, float(call.eps)
        self._launch: Launch = compiled_once(rms_norm_held_row, call.arch, plan, call.dtype, call.weight_dtype)

    def forward(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Launch the program on x as (rows, n)."""
        return launch_rows(self._launch, self._n, (x,), (weight,), self._eps)

    def repeated(self, *args: Any) -> Callable[..., Any]:
        """The launch alone."""
        return row_launch(self._launch, self._n, args[:1], args[1:], self._eps) or self
