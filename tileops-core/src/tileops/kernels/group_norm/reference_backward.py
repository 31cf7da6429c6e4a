"""Group norm's backward in plain torch."""

from __future__ import annotations

from typing import final

from torch import Tensor

from tileops.kernels.dtypes import refusal_of_dtypes
from tileops.kernels.group_norm.backward_interface import GroupNormBwd, GroupNormBwdCall


@final
class ReferenceGroupNormBwd(GroupNormBwd):
    """Any sizes, by the reference in float32: general, hence below every other kernel."""

    general = True

    @classmethod
    def refusal(cls, call: GroupNormBwdCall) -> str | None:
        """Serves the dtypes that our programs serve."""
        return refusal_of_dtypes(call.dtype, weight=call.weight_dtype, bias=call.bias_dtype)

    def forward(self, grad: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor | None, ...]:
        """See `GroupNormBwd.forward`."""
        assert self.call is not None
        wide = (grad.float(), x.float(), None if weight is None else weight.float())
        gradients = self.reference(self.call, *wide)
        dtypes = (self.call.dtype, self.call.weight_dtype, self.call.bias_dtype)
        return tuple(None if one is None else one.to(dtype) for one, dtype in zip(gradients, dtypes))
