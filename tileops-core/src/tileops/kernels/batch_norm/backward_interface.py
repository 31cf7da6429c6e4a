"""Batch norm's backward: the call spec, the contracts of its kernels, and the contracts in plain torch.

Training and inference are two interfaces, as in the forward: in training the statistics are functions of x, and
each gradient of x needs the whole channel; in inference they are constants.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Annotated

import torch
from torch import Tensor

from tileops.call_spec import CallSpec, SizeClass
from tileops.kernels.batch_norm.interface import (
    BATCH_CAP,
    BatchNormTrain,
    BatchNormTrainCall,
    per_channel,
    statistics_dtype,
)
from tileops.kernels.gradients import wanted_gradients
from tileops.kernels.kernel_base import KernelInterface
from tileops.kernels.sampling import in_dtype, normal

WANTED = (
    (torch.float32, torch.float32, (True, True, True)),
    ("x", "x", (True, True, True)),
    (None, None, (True, False, False)),
    (torch.float32, None, (True, True, False)),
    (None, "x", (True, False, True)),
    ("x", None, (True, False, False)),
    (torch.float32, "x", (False, True, True)),
)
"""What samples vary: dtypes of weight and bias, "x" for that of x, and the gradients that are wanted."""


@dataclasses.dataclass(frozen=True)
class BatchNormBwdCall(CallSpec):
    """The facts of one call of batch norm's backward.

    Args:
        n: Size class of the batch: its size rounded up to a power of two.
        c: Channels.
        spatial: Product of the spatial axes; 1 for `(N, C)`.
        dtype: Dtype of x, of its gradient and of the output's.
        channels_last: Whether memory runs `(N, *spatial, C)` instead of `(N, C, *spatial)`; False where both
            are the same.
        weight_dtype: Dtype of the weight and of its gradient, float32 or x's; None where there is no weight.
        bias_dtype: Dtype of the bias's gradient, float32 or x's; None where it is not wanted.
        need: Whether the gradients of x, weight and bias are wanted; the weight's only where there is one.
    """

    n: Annotated[int, SizeClass(cap=BATCH_CAP)]
    c: int
    spatial: int
    dtype: torch.dtype
    channels_last: bool = False
    weight_dtype: torch.dtype | None = torch.float32
    bias_dtype: torch.dtype | None = torch.float32
    need: tuple[bool, bool, bool] = (True, True, True)


class _BatchNormBwd(KernelInterface[BatchNormBwdCall]):
    """What the two interfaces share."""

    request = BatchNormBwdCall

    def forward(
        self, grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias."""
        raise NotImplementedError

    @classmethod
    def sample_calls(cls, device: torch.device) -> tuple[BatchNormBwdCall, ...]:
        """The shapes of the training forward's samples, in each dtype and both memory orders."""
        return tuple(
            BatchNormBwdCall(
                device, call.n, call.c, call.spatial, call.dtype, call.channels_last,
                in_dtype(weight, call.dtype), in_dtype(bias, call.dtype), need,
            )
            for call, (weight, bias, need) in zip(BatchNormTrain.sample_calls(device), itertools.cycle(WANTED))
        )  # fmt: skip

    @classmethod
    def sample_tensors(cls, call: BatchNormBwdCall, generator: torch.Generator) -> tuple[Tensor | None, ...]:
        """What the training forward's samples are, their statistics, and a gradient in the memory order of x."""
        forward = BatchNormTrainCall(
            call.device, call.n, call.c, call.spatial, call.dtype, channels_last=call.channels_last,
            weight_dtype=call.weight_dtype, bias_dtype=None, running=False,
        )  # fmt: skip
        x, _, _, weight, _ = BatchNormTrain.sample_tensors(forward, generator)
        assert x is not None
        _, mean, invstd, *_ = BatchNormTrain.reference(forward, x.double(), None, None, None, None)
        assert mean is not None
        assert invstd is not None
        grad = torch.empty_like(x).copy_(normal(tuple(x.shape), call.dtype, call.device, generator))
        kept = statistics_dtype(call.dtype)
        return grad, x, mean.to(kept), invstd.to(kept), weight

    @classmethod
    def tolerance(cls, dtype: torch.dtype) -> tuple[float, float]:
        """A sum over millions of values in float32, of which most cancel, has an error of its own."""
        relative, absolute = super().tolerance(dtype)
        return relative, max(absolute, 5e-3) if dtype is torch.float32 else absolute


class BatchNormBwdTrain(_BatchNormBwd):
    """The gradients of batch norm in training, where the statistics are functions of x."""

    def forward(
        self, grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias.

        With `x̂ = (x - mean) * invstd` and means and sums over each channel:
        `(grad - mean(grad) - x̂ * mean(grad * x̂)) * invstd * weight`, the sum of `grad * x̂`, the sum of `grad`.

        Args:
            grad: The gradient of the output: x's shape and memory order, `call.dtype`, dense, 16-byte aligned, on
                x's device.
            x: `(N, C, *spatial)`, `call.dtype`, dense in the memory order that the call names, 16-byte aligned,
                at least two values per channel.
            mean: `(C,)`, float32 (float64 for float64), contiguous, 16-byte aligned, on x's device: the mean of x that the forward
                returned.
            invstd: Likewise, `1 / sqrt(var + eps)`.
            weight: `(C,)`, `call.weight_dtype`, contiguous, 16-byte aligned, on x's device; None where `weight_dtype` is.

        Returns:
            Three new tensors: x's shape, memory order and `call.dtype`; `(C,)`, `call.weight_dtype`; `(C,)`,
            `call.bias_dtype`. None in place of each that `call.need` says is not wanted. No argument is written.

        Numerics: sums accumulate in float32 (float64 for float64); each result is rounded once, and two runs are
        bit-identical.
        """
        raise NotImplementedError

    @classmethod
    def reference(cls, call: BatchNormBwdCall, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """The contract in plain torch; differentiable, through the statistics of x too."""
        _, x, mean, invstd, _ = tensors
        assert x is not None
        assert mean is not None
        assert invstd is not None
        mean, invstd = _as_functions_of(x, mean, invstd)
        grad, unit, over, scale = _parts(x, mean, invstd, tensors)
        along = (grad * unit).mean(dim=over, keepdim=True)
        grad_x = (grad - grad.mean(dim=over, keepdim=True) - unit * along) * scale
        return wanted_gradients(call, x, (grad_x, (grad * unit).sum(dim=over), grad.sum(dim=over)))


class BatchNormBwdInfer(_BatchNormBwd):
    """The gradients of batch norm in inference, where the statistics are constants."""

    def forward(
        self, grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias.

        With `x̂ = (x - mean) * invstd` and sums over each channel: `grad * invstd * weight`, the sum of
        `grad * x̂`, the sum of `grad`.

        Args:
            grad: The gradient of the output: x's shape and memory order, `call.dtype`, dense, 16-byte aligned, on
                x's device.
            x: `(N, C, *spatial)`, `call.dtype`, dense in the memory order that the call names, 16-byte aligned,
                at least one element.
            mean: `(C,)`, float32 (float64 for float64), contiguous, 16-byte aligned, on x's device: the running mean.
            invstd: Likewise, `1 / sqrt(running_var + eps)`.
            weight: `(C,)`, `call.weight_dtype`, contiguous, 16-byte aligned, on x's device; None where `weight_dtype` is.

        Returns:
            Three new tensors: x's shape, memory order and `call.dtype`; `(C,)`, `call.weight_dtype`; `(C,)`,
            `call.bias_dtype`. None in place of each that `call.need` says is not wanted. No argument is written.

        Numerics: sums accumulate in float32 (float64 for float64); each result is rounded once, and two runs are
        bit-identical.
        """
        raise NotImplementedError

    @classmethod
    def reference(cls, call: BatchNormBwdCall, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """The contract in plain torch; differentiable."""
        _, x, mean, invstd, _ = tensors
        assert x is not None
        assert mean is not None
        assert invstd is not None
        grad, unit, over, scale = _parts(x, mean, invstd, tensors)
        return wanted_gradients(call, x, (grad * scale, (grad * unit).sum(dim=over), grad.sum(dim=over)))


def _as_functions_of(x: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """The statistics, with their values, as functions of x: what a second derivative needs.

    What is added to those of x is a constant: the rounding of the mean, and the forward's eps.
    """
    variance_of_x, mean_of_x = torch.var_mean(x, _all_but_channels(x), correction=0)
    rounding = (mean.to(x.dtype) - mean_of_x).detach()
    eps = (invstd.to(x.dtype).square().reciprocal() - variance_of_x).detach()
    return mean_of_x + rounding, torch.rsqrt(variance_of_x + eps)


def _all_but_channels(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def _parts(
    x: Tensor, mean: Tensor, invstd: Tensor, tensors: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor, list[int], Tensor]:
    """The gradient, `x̂`, the axes of a channel, and what scales a channel, all in the precision of x."""
    grad, weight = tensors[0], tensors[4]
    assert grad is not None
    mean, invstd = per_channel(mean.to(x.dtype), x), per_channel(invstd.to(x.dtype), x)
    scale = invstd if weight is None else invstd * per_channel(weight.to(x.dtype), x)
    return grad, (x - mean) * invstd, _all_but_channels(x), scale
