"""Batch norm by torch: one kernel for training, one for inference."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import final

import torch
from tileops.kernels.batch_norm import BatchNormInfer, BatchNormInferCall, BatchNormTrain, BatchNormTrainCall
from torch import Tensor

from tileops_backend_example.torch_common import like, refusal_of_dtype, widened


@final
class TorchBatchNormTrain(BatchNormTrain):
    """Any shape, in float32 or float64: general, hence below every other kernel."""

    devices = frozenset({"cpu"})
    general = True

    @classmethod
    def refusal(cls, call: BatchNormTrainCall) -> str | None:
        """Serves what torch computes on a CPU."""
        return refusal_of_dtype(call.dtype)

    @classmethod
    def entry_for(cls, call: BatchNormTrainCall) -> tuple[Hashable, Callable[[], TorchBatchNormTrain]]:
        """One kernel for each eps and momentum."""
        return (call.eps, call.momentum), lambda: cls(call)

    def __init__(self, call: BatchNormTrainCall) -> None:
        super().__init__(call)
        self.eps = call.eps
        self.momentum = call.momentum

    def forward(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BatchNormTrain.forward`."""
        wide = widened(x)
        y, mean, invstd = torch.native_batch_norm(
            wide,
            like(weight, wide),
            like(bias, wide),
            running_mean,
            running_var,
            training=True,
            momentum=self.momentum,
            eps=self.eps,
        )
        return torch.empty_like(x).copy_(y), mean, invstd


@final
class TorchBatchNormInfer(BatchNormInfer):
    """Any shape, in float32 or float64: general, hence below every other kernel."""

    devices = frozenset({"cpu"})
    general = True

    @classmethod
    def refusal(cls, call: BatchNormInferCall) -> str | None:
        """Serves what torch computes on a CPU."""
        return refusal_of_dtype(call.dtype)

    @classmethod
    def entry_for(cls, call: BatchNormInferCall) -> tuple[Hashable, Callable[[], TorchBatchNormInfer]]:
        """One kernel for each eps."""
        return call.eps, lambda: cls(call)

    def __init__(self, call: BatchNormInferCall) -> None:
        super().__init__(call)
        self.eps = call.eps

    def forward(
        self, x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """See `BatchNormInfer.forward`."""
        wide = widened(x)
        y, _, _ = torch.native_batch_norm(
            wide,
            like(weight, wide),
            like(bias, wide),
            running_mean,
            running_var,
            training=False,
            momentum=0.0,
            eps=self.eps,
        )
        return torch.empty_like(x).copy_(y)
