"""Batch norm by torch: kernels for training and for inference, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import ClassVar, final

import torch
from tileops import Kernel
from tileops.kernels.batch_norm import (
    BatchNormBwdCall,
    BatchNormBwdInfer,
    BatchNormBwdTrain,
    BatchNormInfer,
    BatchNormInferCall,
    BatchNormTrain,
    BatchNormTrainCall,
)
from torch import Tensor

from tileops_backend_example.torch_channels import CHANNELS, all_but_channels, per_channel, scaled_and_shifted
from tileops_backend_example.torch_common import refusal_of_dtype, rounded, widened


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
        axes = all_but_channels(x)
        variance, mean = torch.var_mean(wide, axes, correction=0)
        invstd = torch.rsqrt(variance + self.eps)
        y = normalised(wide, mean, invstd, weight, bias)
        if running_mean is not None and running_var is not None:
            torch.batch_norm_update_stats(x, running_mean, running_var, self.momentum)  # torch's, to the last bit
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
        invstd = torch.rsqrt(running_var + self.eps)
        return torch.empty_like(x).copy_(normalised(wide, running_mean, invstd, weight, bias))


class _TorchBatchNormBwd(Kernel[BatchNormBwdCall]):
    """Any shape, in float32 or float64: general, hence below every other kernel."""

    devices = frozenset({"cpu"})
    general = True
    training: ClassVar[bool]

    @classmethod
    def refusal(cls, call: BatchNormBwdCall) -> str | None:
        """Serves what torch computes on a CPU."""
        return refusal_of_dtype(call.dtype)

    @classmethod
    def entry_for(cls, call: BatchNormBwdCall) -> tuple[Hashable, Callable[[], _TorchBatchNormBwd]]:
        """One kernel for whatever decides what is computed and in which dtypes it comes back."""
        return (call.weight_dtype, call.bias_dtype, call.need), lambda: cls(call)

    def __init__(self, call: BatchNormBwdCall) -> None:
        super().__init__(call)
        self.dtypes = (call.weight_dtype, call.bias_dtype)
        self.need = call.need

    def forward(
        self, grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """See `BatchNormBwdTrain.forward` and `BatchNormBwdInfer.forward`."""
        wide, grads = widened(x), widened(grad)
        axes = all_but_channels(x)
        unit = (wide - per_channel(mean, wide)) * per_channel(invstd, wide)
        grad_weight, grad_bias = (grads * unit).sum(axes), grads.sum(axes)
        grad_x = None
        if self.need[0]:
            scale = invstd if weight is None else invstd * widened(weight)
            if self.training:
                values = x.numel() // x.shape[CHANNELS]
                grads = grads - per_channel(grad_bias / values, wide) - unit * per_channel(grad_weight / values, wide)
            grad_x = torch.empty_like(x).copy_(grads * per_channel(scale, wide))
        wanted = (grad_weight if self.need[1] else None, grad_bias if self.need[2] else None)
        return grad_x, *rounded(wanted, self.dtypes)


@final
class TorchBatchNormBwdTrain(_TorchBatchNormBwd, BatchNormBwdTrain):
    """The statistics are functions of x."""

    training = True


@final
class TorchBatchNormBwdInfer(_TorchBatchNormBwd, BatchNormBwdInfer):
    """The statistics are constants."""

    training = False


def normalised(x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`(x - mean) * invstd * weight + bias` for each channel.

    Centred first: torch's own kernel folds the mean into a shift, which costs digits where the mean is large.
    """
    return scaled_and_shifted((x - per_channel(mean, x)) * per_channel(invstd, x), weight, bias)
