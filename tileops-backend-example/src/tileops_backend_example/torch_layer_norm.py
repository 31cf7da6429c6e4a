"""Layer norm by torch, for whatever no better kernel serves."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import final

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from tileops.kernels.layer_norm import LayerNorm, LayerNormBwd, LayerNormBwdCall, LayerNormCall
from torch import Tensor

from tileops_backend_example.torch_common import like, refusal_of_dtype, rounded, widened


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


@final
class TorchLayerNormBwd(LayerNormBwd):
    """Any row length, in float32 or float64: general, hence below every other kernel."""

    devices = frozenset({"cpu"})
    general = True

    @classmethod
    def refusal(cls, call: LayerNormBwdCall) -> str | None:
        """Serves what torch computes on a CPU."""
        return refusal_of_dtype(call.dtype)

    @classmethod
    def entry_for(cls, call: LayerNormBwdCall) -> tuple[Hashable, Callable[[], TorchLayerNormBwd]]:
        """One kernel for whatever decides what is computed and in which dtypes it comes back."""
        return (call.n, call.eps, call.weight_dtype, call.bias_dtype, call.need), lambda: cls(call)

    def __init__(self, call: LayerNormBwdCall) -> None:
        super().__init__(call)
        self.n = call.n
        self.eps = call.eps
        self.dtypes = (call.weight_dtype, call.bias_dtype)
        self.need = call.need

    def forward(self, grad: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor | None, ...]:
        """See `LayerNormBwd.forward`."""
        rows, grads = widened(x).view(-1, self.n), widened(grad).view(-1, self.n)
        variance, mean = torch.var_mean(rows, dim=1, correction=0, keepdim=True)
        invstd = torch.rsqrt(variance + self.eps)
        unit = (rows - mean) * invstd
        grad_x = None
        if self.need[0]:
            scaled = grads if weight is None else grads * widened(weight).view(-1)
            along = (scaled * unit).mean(dim=1, keepdim=True)
            grad_x = ((scaled - scaled.mean(dim=1, keepdim=True) - unit * along) * invstd).to(x.dtype).view(x.shape)
        grad_weight = (grads * unit).sum(dim=0) if self.need[1] else None
        grad_bias = grads.sum(dim=0) if self.need[2] else None
        return grad_x, *rounded((grad_weight, grad_bias), self.dtypes)
