"""Layer norm of rows of any length."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.dtypes import refusal_of_dtypes
from tileops.kernels.layer_norm.interface import LayerNorm, LayerNormCall
from tileops.kernels.row_launch import Launch, launch_rows, row_launch
from tileops.kernels.row_plan import streamed_row_plan


@final
class StreamedRowLayerNorm(LayerNorm):
    """Reads a row twice with one block, the second time backwards, through the cache; serves any row."""

    supported_archs = at_least(80)
    general = True

    @classmethod
    def refusal(cls, call: LayerNormCall) -> str | None:
        """Rows of any length, of a served dtype."""
        return refusal_of_dtypes(call.dtype, weight=call.weight_dtype, bias=call.bias_dtype)

    @classmethod
    def entry_for(cls, call: LayerNormCall) -> tuple[Hashable, Callable[[], StreamedRowLayerNorm]]:
        """One program serves every row count."""
        identity = (call.device, call.n, call.dtype, call.eps, call.weight_dtype, call.bias_dtype)
        return identity, lambda: cls(call)

    def __init__(self, call: LayerNormCall) -> None:
        # Imported here: importing tilelang takes seconds, and only a kernel that is built needs it.
        from tileops.kernels.compiled_program import compiled_once
        from tileops.kernels.layer_norm.streamed_row_program import (
            layer_norm_streamed_row,
        )

        super().__init__(call)
        plan = streamed_row_plan(call.n, call.dtype)
        self._n, self._eps = call.n, float(call.eps)
        self._launch: Launch = compiled_once(
            layer_norm_streamed_row, call.arch, plan, call.dtype, call.weight_dtype, call.bias_dtype
        )

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Launch the program on x as (rows, n)."""
        return launch_rows(self._launch, self._n, (x,), (weight, bias), self._eps)

    def repeated(self, *args: Any) -> Callable[..., Any]:
        """The launch alone."""
        return row_launch(self._launch, self._n, args[:1], args[1:], self._eps) or self
