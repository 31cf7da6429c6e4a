"""Layer norm's backward, of rows of any length."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.dtypes import refusal_of_dtypes
from tileops.kernels.layer_norm.backward_interface import LayerNormBwd, LayerNormBwdCall
from tileops.kernels.layer_norm.held_row_backward import facts_of
from tileops.kernels.row_backward import build_streamed


@final
class StreamedRowLayerNormBwd(LayerNormBwd):
    """Reads x and the gradient for the statistics of rows, then, backwards, in stripes of columns; serves any row."""

    supported_archs = at_least(80)
    general = True

    @classmethod
    def refusal(cls, call: LayerNormBwdCall) -> str | None:
        """Rows of any length, of a served dtype."""
        return refusal_of_dtypes(call.dtype, weight=call.weight_dtype, bias=call.bias_dtype)

    @classmethod
    def entry_for(cls, call: LayerNormBwdCall) -> tuple[Hashable, Callable[[], StreamedRowLayerNormBwd]]:
        """One build serves every row count."""
        return (call.device, facts_of(call)), lambda: cls(call)

    def __init__(self, call: LayerNormBwdCall) -> None:
        super().__init__(call)
        self._gradients = build_streamed(facts_of(call), call.arch, call.sm_count)

    def forward(self, grad: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor | None, ...]:
        """Launch the programs on rows."""
        return self._gradients(grad, x, weight)
