"""RMS norm by torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import final

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from tileops.kernels.rms_norm import RMSNorm, RMSNormBwd, RMSNormBwdCall, RMSNormCall
from torch import Tensor

from tileops_backend_example.torch_common import like, refusal_of_dtype, rounded, widened


@final
class TorchRMSNorm(RMSNorm):
    """Any row length, in float32 or float64: general, hence below every other kernel."""

    devices = frozenset({"cpu"})
    general = True

    @classmethod
    def refusal(cls, call: RMSNormCall) -> str | None:
        """Serves what torch computes on a CPU."""
        return refusal_of_dtype(call.dtype)

    @classmethod
    def entry_for(cls, call: RMSNormCall) -> tuple[Hashable, Callable[[], TorchRMSNorm]]:
        """One kernel for each row length and eps."""
        return (call.n, call.eps), lambda: cls(call)

    def __init__(self, call: RMSNormCall) -> None:
        super().__init__(call)
        self.n = call.n
        self.eps = call.eps

    def forward(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """See `RMSNorm.forward`."""
        rows = widened(x).view(-1, self.n)
        weight = like(weight, rows)
        y = F.rms_norm(rows, (self.n,), None if weight is None else weight.view(-1), self.eps)
        return y.to(x.dtype).view(x.shape)


@final
class TorchRMSNormBwd(RMSNormBwd):
    """Any row length, in float32 or float64: general, hence below every other kernel."""

    devices = frozenset({"cpu"})
    general = True

    @classmethod
    def refusal(cls, call: RMSNormBwdCall) -> str | None:
        """Serves what torch computes on a CPU."""
        return refusal_of_dtype(call.dtype)

    @classmethod
    def entry_for(cls, call: RMSNormBwdCall) -> tuple[Hashable, Callable[[], TorchRMSNormBwd]]:
        """One kernel for whatever decides what is computed and in which dtypes it comes back."""
        return (call.n, call.eps, call.weight_dtype, call.need), lambda: cls(call)

    def __init__(self, call: RMSNormBwdCall) -> None:
        super().__init__(call)
        self.n = call.n
        self.eps = call.eps
        self.dtypes = (call.weight_dtype,)
        self.need = call.need

    def forward(self, grad: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor | None, ...]:
        """See `RMSNormBwd.forward`."""
        rows, grads = widened(x).view(-1, self.n), widened(grad).view(-1, self.n)
        factor = torch.rsqrt(rows.square().mean(dim=1, keepdim=True) + self.eps)
        unit = rows * factor
        grad_x = None
        if self.need[0]:
            scaled = grads if weight is None else grads * widened(weight).view(-1)
            grad_x = (scaled - unit * (scaled * unit).mean(dim=1, keepdim=True)) * factor
            grad_x = grad_x.to(x.dtype).view(x.shape)
        grad_weight = (grads * unit).sum(dim=0) if self.need[1] else None
        return grad_x, *rounded((grad_weight,), self.dtypes)
