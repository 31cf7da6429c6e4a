"""Group norm by torch, which is instance norm too where a group has one channel."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import final

import torch
from tileops.kernels.group_norm import GroupNorm, GroupNormBwd, GroupNormBwdCall, GroupNormCall
from torch import Tensor

from tileops_backend_example.torch_channels import all_but_channels, per_channel, scaled_and_shifted
from tileops_backend_example.torch_common import refusal_of_dtype, rounded, widened


@final
class TorchGroupNorm(GroupNorm):
    """Any group, in float32 or float64: general, hence below every other kernel."""

    devices = frozenset({"cpu"})
    general = True

    @classmethod
    def refusal(cls, call: GroupNormCall) -> str | None:
        """Serves what torch computes on a CPU."""
        return refusal_of_dtype(call.dtype)

    @classmethod
    def entry_for(cls, call: GroupNormCall) -> tuple[Hashable, Callable[[], TorchGroupNorm]]:
        """One kernel for each number of elements of a group and eps."""
        return (call.channels * call.spatial, call.eps), lambda: cls(call)

    def __init__(self, call: GroupNormCall) -> None:
        super().__init__(call)
        self.n = call.channels * call.spatial
        self.eps = call.eps

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """See `GroupNorm.forward`."""
        rows = widened(x).view(-1, self.n)
        variance, mean = torch.var_mean(rows, dim=1, correction=0, keepdim=True)
        y = ((rows - mean) * torch.rsqrt(variance + self.eps)).view(x.shape)
        return scaled_and_shifted(y, weight, bias).to(x.dtype)


@final
class TorchGroupNormBwd(GroupNormBwd):
    """Any group, in float32 or float64: general, hence below every other kernel."""

    devices = frozenset({"cpu"})
    general = True

    @classmethod
    def refusal(cls, call: GroupNormBwdCall) -> str | None:
        """Serves what torch computes on a CPU."""
        return refusal_of_dtype(call.dtype)

    @classmethod
    def entry_for(cls, call: GroupNormBwdCall) -> tuple[Hashable, Callable[[], TorchGroupNormBwd]]:
        """One kernel for whatever decides what is computed and in which dtypes it comes back."""
        n = call.channels * call.spatial
        return (n, call.eps, call.weight_dtype, call.bias_dtype, call.need), lambda: cls(call)

    def __init__(self, call: GroupNormBwdCall) -> None:
        super().__init__(call)
        self.n = call.channels * call.spatial
        self.eps = call.eps
        self.dtypes = (call.weight_dtype, call.bias_dtype)
        self.need = call.need

    def forward(self, grad: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor | None, ...]:
        """See `GroupNormBwd.forward`."""
        rows, grads = widened(x).view(-1, self.n), widened(grad)
        variance, mean = torch.var_mean(rows, dim=1, correction=0, keepdim=True)
        invstd = torch.rsqrt(variance + self.eps)
        unit = (rows - mean) * invstd
        grad_x = None
        if self.need[0]:
            scaled = (grads if weight is None else grads * per_channel(widened(weight), grads)).view(rows.shape)
            along = (scaled * unit).mean(dim=1, keepdim=True)
            grad_x = ((scaled - scaled.mean(dim=1, keepdim=True) - unit * along) * invstd).to(x.dtype).view(x.shape)
        axes = all_but_channels(x)
        grad_weight = (grads * unit.view(x.shape)).sum(axes) if self.need[1] else None
        grad_bias = grads.sum(axes) if self.need[2] else None
        return grad_x, *rounded((grad_weight, grad_bias), self.dtypes)
