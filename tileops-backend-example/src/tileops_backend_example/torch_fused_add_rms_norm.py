"""A sum and its RMS norm by torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import final

import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from tileops.kernels.fused_add_rms_norm import FusedAddRMSNorm, FusedAddRMSNormCall
from torch import Tensor

from tileops_backend_example.torch_common import like, refusal_of_dtype, widened


@final
class TorchFusedAddRMSNorm(FusedAddRMSNorm):
    """Any row length, in float32 or float64: general, hence below every other kernel."""

    devices = frozenset({"cpu"})
    general = True

    @classmethod
    def refusal(cls, call: FusedAddRMSNormCall) -> str | None:
        """Serves what torch computes on a CPU."""
        return refusal_of_dtype(call.dtype)

    @classmethod
    def entry_for(cls, call: FusedAddRMSNormCall) -> tuple[Hashable, Callable[[], TorchFusedAddRMSNorm]]:
        """One kernel for each row length and eps."""
        return (call.n, call.eps), lambda: cls(call)

    def __init__(self, call: FusedAddRMSNormCall) -> None:
        super().__init__(call)
        self.n = call.n
        self.eps = call.eps

    def forward(self, x: Tensor, residual: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `FusedAddRMSNorm.forward`."""
        summed = x + residual
        rows = widened(summed).view(-1, self.n)
        y = F.rms_norm(rows, (self.n,), like(weight, rows), self.eps)
        return y.to(x.dtype).view(x.shape), summed
