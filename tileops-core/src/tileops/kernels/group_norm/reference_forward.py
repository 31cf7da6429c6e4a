"""Group norm in plain torch."""

from __future__ import annotations

from typing import final

from torch import Tensor

from tileops.kernels.dtypes import refusal_of_dtypes
from tileops.kernels.group_norm.interface import GroupNorm, GroupNormCall


@final
class ReferenceGroupNorm(GroupNorm):
    """Any sizes, by the reference in float32: general, hence below every other kernel."""

    general = True

    @classmethod
    def refusal(cls, call: GroupNormCall) -> str | None:
        """Serves the dtypes that our programs serve."""
        return refusal_of_dtypes(call.dtype, weight=call.weight_dtype, bias=call.bias_dtype)

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """See `GroupNorm.forward`."""
        assert self.call is not None
        return self.reference(self.call, x.float(), weight, bias).to(x.dtype)
