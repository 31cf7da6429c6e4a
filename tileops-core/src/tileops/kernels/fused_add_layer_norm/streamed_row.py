"""The sum of two tensors and its layer norm, of rows of any length."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.dtypes import refusal_of_dtypes
from tileops.kernels.fused_add_layer_norm.interface import FusedAddLayerNorm, FusedAddLayerNormCall
from tileops.kernels.row_launch import Launch, launch_rows, row_launch
from tileops.kernels.row_plan import streamed_row_plan


@final
class StreamedRowFusedAddLayerNorm(FusedAddLayerNorm):
    """Adds two rows with one block, and reads the sum back from the cache, backwards; serves any row."""

    supported_archs = at_least(80)
    general = True

    @classmethod
    def refusal(cls, call: FusedAddLayerNormCall) -> str | None:
        """Rows of any length, of a served dtype."""
        return refusal_of_dtypes(call.dtype, weight=call.weight_dtype, bias=call.bias_dtype)

    @classmethod
    def entry_for(cls, call: FusedAddLayerNormCall) -> tuple[Hashable, Callable[[], StreamedRowFusedAddLayerNorm]]:
        """One program serves every row count."""
        identity = (call.device, call.n, call.dtype, call.eps, call.weight_dtype, call.bias_dtype)
        return identity, lambda: cls(call)

    def __init__(self, call: FusedAddLayerNormCall) -> None:
        # Imported here: importing tilelang takes seconds, and only a kernel that is built needs it.
        from tileops.kernels.compiled_program import compiled_once
        from tileops.kernels.layer_norm.streamed_row_program import (
            layer_norm_streamed_row,
        )

        super().__init__(call)
        plan = streamed_row_plan(call.n, call.dtype)
        self._n, self._eps = call.n, float(call.eps)
        self._launch: Launch = compiled_once(
            layer_norm_streamed_row, call.arch, plan, call.dtype, call.weight_dtype, call.bias_dtype, adds_residual=True
        )

    def forward(self, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Launch the program on x and the residual as (rows, n)."""
        return launch_rows(self._launch, self._n, (x, residual), (weight, bias), self._eps)

    def repeated(self, *args: Any) -> Callable[..., Any]:
        """The launch alone."""
        return row_launch(self._launch, self._n, args[:2], args[2:], self._eps) or self
