"""Layer norm of rows that fit in registers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.configurations import Configuration
from tileops.kernels.dtypes import refusal_of_dtypes
from tileops.kernels.layer_norm.interface import LayerNorm, LayerNormCall
from tileops.kernels.row_launch import Launch, launch_rows, row_launch
from tileops.kernels.row_plan import HELD_BY_LAYER_NORM, held_row_configurations, held_row_plan, longest_held_row


@final
class HeldRowLayerNorm(LayerNorm):
    """Reads a row once into the registers of 1 to 512 threads; serves rows of up to 64 KiB."""

    supported_archs = at_least(80)

    @classmethod
    def refusal(cls, call: LayerNormCall) -> str | None:
        """Rows of a served dtype that 512 threads can hold, 32 registers each."""
        unserved = refusal_of_dtypes(call.dtype, weight=call.weight_dtype, bias=call.bias_dtype)
        if unserved is None and held_row_plan(call.n, call.dtype, HELD_BY_LAYER_NORM) is None:
            most = longest_held_row(call.n, call.dtype, HELD_BY_LAYER_NORM)
            return f"row of {call.n} elements; serves up to {most} of {call.dtype} at its alignment"
        return unserved

    @classmethod
    def entry_for(cls, call: LayerNormCall) -> tuple[Hashable, Callable[[], HeldRowLayerNorm]]:
        """One program serves every row count."""
        identity = (call.device, call.n, call.dtype, call.eps, call.weight_dtype, call.bias_dtype)
        return identity, lambda: cls(call)

    @classmethod
    def configurations(cls, call: LayerNormCall) -> Sequence[Configuration]:
        """Threads of a row and rows of a block."""
        return held_row_configurations(call.n, call.dtype, HELD_BY_LAYER_NORM)

    def __init__(self, call: LayerNormCall) -> None:
        # Imported here: importing tilelang takes seconds, and only a kernel that is built needs it.
        from tileops.kernels.compiled_program import compiled_once
        from tileops.kernels.layer_norm.held_row_program import layer_norm_held_row

        super().__init__(call)
        plan = held_row_plan(call.n, call.dtype, HELD_BY_LAYER_NORM)
        assert plan is not None, "refusal() refuses such rows"
        plan = dataclasses.replace(plan, **self.configuration)
        self._n, self._eps = call.n, float(call.eps)
        self._launch: Launch = compiled_once(
            layer_norm_held_row, call.arch, plan, call.dtype, call.weight_dtype, call.bias_dtype
        )

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Launch the program on x as (rows, n)."""
        return launch_rows(self._launch, self._n, (x,), (weight, bias), self._eps)

    def repeated(self, *args: Any) -> Callable[..., Any]:
        """The launch alone."""
        return row_launch(self._launch, self._n, args[:1], args[1:], self._eps) or self
