"""RMS norm's backward in plain torch."""

from __future__ import annotations

from typing import final

from torch import Tensor

from tileops.kernels.dtypes import refusal_of_dtypes
from tileops.kernels.gradients import gradients_by_reference
from tileops.kernels.rms_norm.backward_interface import RMSNormBwd, RMSNormBwdCall


@final
class ReferenceRMSNormBwd(RMSNormBwd):
    """Any row length, by the reference in float32: general, hence below every other kernel."""

    general = True

    @classmethod
    def refusal(cls, call: RMSNormBwdCall) -> str | None:
        """Serves the dtypes that our programs serve."""
        return refusal_of_dtypes(call.dtype, weight=call.weight_dtype)

    def __init__(self, call: RMSNormBwdCall) -> None:
        super().__init__(call)
        self.dtypes = (call.weight_dtype,)

    def forward(self, grad: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor | None, ...]:
        """See `RMSNormBwd.forward`."""
        return gradients_by_reference(self, self.dtypes, grad, x, weight)
