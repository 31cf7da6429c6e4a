"""Layer norm by torch, for whatever no better kernel serves."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import final

import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from tileops.kernels.layer_norm import LayerNorm, LayerNormCall
from torch import Tensor

from tileops_backend_example.torch_common import like, refusal_of_dtype, widened


@final
class TorchLayerNorm(LayerNorm):
    """Any row length, in float32 or float64: general, hence below every other kernel."""

    devices = frozenset({"cpu"})
    general = True

    @classmethod
    def refusal(cls, call: LayerNormCall) -> str | None:
        """Serves what torch computes on a CPU."""
        return refusal_of_dtype(call.dtype)

    @classmethod
    def entry_for(cls, call: LayerNormCall) -> tuple[Hashable, Callable[[], TorchLayerNorm]]:
        """One kernel for each row length and eps."""
        return (call.n, call.eps), lambda: cls(call)

    def __init__(self, call: LayerNormCall) -> None:
        super().__init__(call)
        self.n = call.n
        self.eps = call.eps

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """See `LayerNorm.forward`."""
        rows = widened(x).view(-1, self.n)
        weight = like(weight, rows)
        bias = like(bias, rows)
        y = F.layer_norm(
            rows,
            (self.n,),
            None if weight is None else weight.view(-1),
            None if bias is None else bias.view(-1),
            self.eps,
        )
        return y.to(x.dtype).view(x.shape)
