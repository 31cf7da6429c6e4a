"""A sum and its layer norm by torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import final

import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from tileops.kernels.fused_add_layer_norm import FusedAddLayerNorm, FusedAddLayerNormCall
from torch import Tensor

from tileops_backend_example.torch_common import like, refusal_of_dtype, widened


@final
class TorchFusedAddLayerNorm(FusedAddLayerNorm):
    """Any row length, in float32 or float64: general, hence below every other kernel."""

    devices = frozenset({"cpu"})
    general = True

    @classmethod
    def refusal(cls, call: FusedAddLayerNormCall) -> str | None:
        """Serves what torch computes on a CPU."""
        return refusal_of_dtype(call.dtype)

    @classmethod
    def entry_for(cls, call: FusedAddLayerNormCall) -> tuple[Hashable, Callable[[], TorchFusedAddLayerNorm]]:
        """One kernel for each row length and eps."""
        return (call.n, call.eps), lambda: cls(call)

    def __init__(self, call: FusedAddLayerNormCall) -> None:
        super().__init__(call)
        self.n = call.n
        self.eps = call.eps

    def forward(self, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `FusedAddLayerNorm.forward`."""
        summed = x + residual
        rows = widened(summed).view(-1, self.n)
        y = F.layer_norm(rows, (self.n,), like(weight, rows), like(bias, rows), self.eps)
        return y.to(x.dtype).view(x.shape), summed
