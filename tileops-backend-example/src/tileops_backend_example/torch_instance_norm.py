"""Instance norm that updates running statistics, by torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import final

import torch
from tileops.kernels.instance_norm import InstanceNormTrain, InstanceNormTrainCall
from torch import Tensor

from tileops_backend_example.torch_channels import scaled_and_shifted
from tileops_backend_example.torch_common import refusal_of_dtype, widened


@final
class TorchInstanceNormTrain(InstanceNormTrain):
    """Any shape, in float32 or float64: general, hence below every other kernel."""

    devices = frozenset({"cpu"})
    general = True

    @classmethod
    def refusal(cls, call: InstanceNormTrainCall) -> str | None:
        """Serves what torch computes on a CPU."""
        return refusal_of_dtype(call.dtype)

    @classmethod
    def entry_for(cls, call: InstanceNormTrainCall) -> tuple[Hashable, Callable[[], TorchInstanceNormTrain]]:
        """One kernel for each number of elements of a row, eps and momentum."""
        return (call.spatial, call.eps, call.momentum), lambda: cls(call)

    def __init__(self, call: InstanceNormTrainCall) -> None:
        super().__init__(call)
        self.n = call.spatial
        self.eps = call.eps
        self.momentum = call.momentum

    def forward(
        self, x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """See `InstanceNormTrain.forward`."""
        rows = widened(x).view(*x.shape[:2], self.n)
        variance, mean = torch.var_mean(rows, dim=2, correction=0, keepdim=True)
        y = ((rows - mean) * torch.rsqrt(variance + self.eps)).view(x.shape)
        running_mean.lerp_(mean.mean(dim=(0, 2)), self.momentum)
        running_var.lerp_(variance.mean(dim=(0, 2)) * (self.n / (self.n - 1)), self.momentum)
        return scaled_and_shifted(y, weight, bias).to(x.dtype)
