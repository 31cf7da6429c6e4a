"""RMS norm by torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import final

import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from tileops.kernels.rms_norm import RMSNorm, RMSNormCall
from torch import Tensor

from tileops_backend_example.torch_common import like, refusal_of_dtype, widened


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
