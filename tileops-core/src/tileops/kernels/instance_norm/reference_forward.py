"""Instance norm that updates running statistics, in plain torch."""

from __future__ import annotations

from typing import final

from torch import Tensor

from tileops.kernels.dtypes import refusal_of_dtypes
from tileops.kernels.instance_norm.interface import InstanceNormTrain, InstanceNormTrainCall


@final
class ReferenceInstanceNormTrain(InstanceNormTrain):
    """Any sizes, by the reference in float32: general, hence below every other kernel."""

    general = True

    @classmethod
    def refusal(cls, call: InstanceNormTrainCall) -> str | None:
        """Serves the dtypes that our programs serve."""
        return refusal_of_dtypes(call.dtype, weight=call.weight_dtype, bias=call.bias_dtype)

    def forward(
        self, x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """See `InstanceNormTrain.forward`."""
        assert self.call is not None
        y, mean, variance = self.reference(self.call, x.float(), running_mean, running_var, weight, bias)
        running_mean.copy_(mean)
        running_var.copy_(variance)
        return y.to(x.dtype)
