"""Batch norm: call specs, contracts and references of training and of inference.

The two are interfaces of their own because their contracts differ: training reads the batch's statistics,
returns them and writes the running ones; inference reads the running ones and writes nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Annotated

import torch
from torch import Tensor

from tileops.call_spec import CallSpec, SizeClass
from tileops.kernels.kernel_base import KernelInterface
from tileops.kernels.sampling import affine, in_dtype, normal, with_large_mean

BATCH_CAP = 1 << 20
"""Batch sizes from here on are one class: by then every region is decided by the other sizes."""


@dataclasses.dataclass(frozen=True)
class BatchNormTrainCall(CallSpec):
    """The facts of one batch-norm call in training.

    Args:
        n: Size class of the batch: its size rounded up to a power of two.
        c: Channels.
        spatial: Product of the spatial axes; 1 for `(N, C)`.
        dtype: Dtype of x and of the result.
        eps: Added to the variance, in the units of x squared.
        momentum: Share of the batch's statistics in the new running ones, 0 to 1.
        channels_last: Whether memory runs `(N, *spatial, C)` instead of `(N, C, *spatial)`; False where both
            are the same.
        weight_dtype: Dtype of the weight, float32 or x's; None where there is none.
        bias_dtype: Dtype of the bias, likewise.
        running: Whether there are running statistics.
    """

    n: Annotated[int, SizeClass(cap=BATCH_CAP)]
    c: int
    spatial: int
    dtype: torch.dtype
    eps: float = 1e-5
    momentum: float = 0.1
    channels_last: bool = False
    weight_dtype: torch.dtype | None = torch.float32
    bias_dtype: torch.dtype | None = torch.float32
    running: bool = True


@dataclasses.dataclass(frozen=True)
class BatchNormInferCall(CallSpec):
    """The facts of one batch-norm call in inference. The fields mean what they mean in training."""

    c: int
    spatial: int
    dtype: torch.dtype
    eps: float = 1e-5
    channels_last: bool = False
    weight_dtype: torch.dtype | None = torch.float32
    bias_dtype: torch.dtype | None = torch.float32


class BatchNormTrain(KernelInterface[BatchNormTrainCall]):
    """Normalise each channel by the batch's statistics, and update the running ones."""

    request = BatchNormTrainCall
    writes = frozenset({"running_mean", "running_var"})

    def forward(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `(x - mean) * invstd * weight + bias`, `mean` and `invstd` of each channel.

        Args:
            x: `(N, C, *spatial)`, `call.dtype`, dense in the memory order that the call names, 16-byte aligned,
                at least two values per channel.
            running_mean: `(C,)`, float32 (float64 for float64), contiguous, 16-byte aligned, on x's device; None where
                `call.running` is False. Written: `(1 - momentum) * running_mean + momentum * mean`.
            running_var: Likewise, with the unbiased variance.
            weight: `(C,)`, `call.weight_dtype`, contiguous, 16-byte aligned, on x's device; None where `weight_dtype` is.
            bias: Likewise, `call.bias_dtype`.

        Returns:
            The output, new, with x's shape, dtype and memory order; `mean` and `invstd = 1 / sqrt(var + eps)`,
            new, `(C,)`, float32 (float64 for float64), with the population variance.

        Numerics: statistics accumulate in float32 (float64 for float64) by a shifted or Welford scheme.
        """
        raise NotImplementedError

    @classmethod
    def reference(cls, call: BatchNormTrainCall, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """The contract in plain torch: output, mean, invstd, then the new running statistics."""
        x, running_mean, running_var, weight, bias = tensors
        assert x is not None
        axes = [axis for axis in range(x.dim()) if axis != 1]
        mean = x.mean(dim=axes)
        centred = x - per_channel(mean, x)
        variance = centred.square().mean(dim=axes)
        invstd = 1 / torch.sqrt(variance + call.eps)
        y = scaled_and_shifted(centred * per_channel(invstd, x), weight, bias)
        values = x.numel() // x.shape[1]
        kept = statistics_dtype(x.dtype)
        return (
            y,
            mean.to(kept),
            invstd.to(kept),
            None if running_mean is None else moved(running_mean, mean, call.momentum),
            None if running_var is None else moved(running_var, variance * (values / (values - 1)), call.momentum),
        )

    @classmethod
    def sample_calls(cls, device: torch.device) -> tuple[BatchNormTrainCall, ...]:
        """Shapes of every region and its boundaries, in each dtype and both memory orders."""
        shapes = [
            (32, 64, 1), (8192, 1024, 1), (4096, 3, 1), (64, 1000, 1), (2, 16, 4096), (8, 64, 1024), (4, 128, 49),
            (128, 256, 49), (32, 64, 12544), (32, 1024, 196), (4, 4, 1048576), (2, 1, 7), (16, 512, 4), (5, 7, 121),
            (1, 3, 101),
        ]  # fmt: skip
        dtypes = (torch.float16, torch.bfloat16, torch.float32)
        mixed = itertools.cycle(
            [
                (torch.float32, torch.float32, True),
                ("x", "x", True),
                (None, None, False),
                (torch.float32, None, True),
                (None, "x", True),
            ]
        )
        plain = [
            BatchNormTrainCall(
                device,
                n,
                c,
                spatial,
                dtype,
                weight_dtype=in_dtype(weight, dtype),
                bias_dtype=in_dtype(bias, dtype),
                running=running,
            )
            for ((n, c, spatial), dtype), (weight, bias, running) in zip(itertools.product(shapes, dtypes), mixed)
        ]
        last = [dataclasses.replace(call, channels_last=True) for call in plain if call.spatial > 1 and call.c > 1]
        return tuple(call.normalised() for call in plain + last if call.n * call.spatial > 1)

    @classmethod
    def sample_tensors(cls, call: BatchNormTrainCall, generator: torch.Generator) -> tuple[Tensor | None, ...]:
        """A batch whose size is no power of two where the class allows one, some channels with a large mean."""
        size = max(2, call.n - call.n // 4) if call.n > 1 else 1
        x = _sample_x(call, size, generator)
        running = [None, None]
        if call.running:
            kept = statistics_dtype(call.dtype)
            running = [normal((call.c,), kept, call.device, generator).abs() for _ in range(2)]
        weight = affine(call.c, call.weight_dtype, call.device, generator, around=1.0)
        bias = affine(call.c, call.bias_dtype, call.device, generator, around=0.0)
        return (x, *running, weight, bias)


class BatchNormInfer(KernelInterface[BatchNormInferCall]):
    """Normalise each channel by the running statistics."""

    request = BatchNormInferCall

    def forward(
        self, x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Return `(x - running_mean) / sqrt(running_var + eps) * weight + bias`.

        Args:
            x: `(N, C, *spatial)`, `call.dtype`, dense in the memory order that the call names, 16-byte aligned,
                at least one element.
            running_mean: `(C,)`, float32 (float64 for float64), contiguous, 16-byte aligned, on x's device.
            running_var: Likewise.
            weight: `(C,)`, `call.weight_dtype`, contiguous, 16-byte aligned, on x's device; None where `weight_dtype` is.
            bias: Likewise, `call.bias_dtype`.

        Returns:
            A new tensor with x's shape, dtype and memory order. No argument is written.

        Numerics: float32 (float64 for float64); the result is rounded once.
        """
        raise NotImplementedError

    @classmethod
    def reference(cls, call: BatchNormInferCall, *tensors: Tensor | None) -> Tensor:
        """The contract in plain torch, in the precision of x."""
        x, running_mean, running_var, weight, bias = tensors
        assert x is not None
        assert running_mean is not None
        assert running_var is not None
        mean, variance = running_mean.to(x.dtype), running_var.to(x.dtype)
        y = (x - per_channel(mean, x)) / torch.sqrt(per_channel(variance, x) + call.eps)
        return scaled_and_shifted(y, weight, bias)

    @classmethod
    def sample_calls(cls, device: torch.device) -> tuple[BatchNormInferCall, ...]:
        """Vectors along space and along channels, odd sizes, in each dtype and both memory orders."""
        shapes = [(64, 1), (3, 1), (1000, 1), (64, 12544), (256, 49), (7, 121), (512, 4), (1, 7), (3, 101)]
        dtypes = (torch.float16, torch.bfloat16, torch.float32)
        mixed = itertools.cycle([(torch.float32, torch.float32), ("x", "x"), (None, None), (torch.float32, None)])
        plain = [
            BatchNormInferCall(
                device, c, spatial, dtype, weight_dtype=in_dtype(weight, dtype), bias_dtype=in_dtype(bias, dtype)
            )
            for ((c, spatial), dtype), (weight, bias) in zip(itertools.product(shapes, dtypes), mixed)
        ]
        last = [dataclasses.replace(call, channels_last=True) for call in plain if call.spatial > 1 and call.c > 1]
        return tuple(plain + last)

    @classmethod
    def sample_tensors(cls, call: BatchNormInferCall, generator: torch.Generator) -> tuple[Tensor | None, ...]:
        """Three samples, statistics of their own, and the affine tensors that the call names."""
        x = _sample_x(call, 3, generator)
        kept = statistics_dtype(call.dtype)
        mean = normal((call.c,), kept, call.device, generator)
        variance = normal((call.c,), kept, call.device, generator).abs() + 0.1
        weight = affine(call.c, call.weight_dtype, call.device, generator, around=1.0)
        bias = affine(call.c, call.bias_dtype, call.device, generator, around=0.0)
        return x, mean, variance, weight, bias


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels keep statistics of tensors of `dtype`: float32, float64 for float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def per_channel(statistic: Tensor, x: Tensor) -> Tensor:
    """A `(C,)` tensor shaped to broadcast along axis 1 of x."""
    return statistic.reshape(1, -1, *[1] * (x.dim() - 2))


def scaled_and_shifted(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`y * weight + bias` for each channel, in the precision of y."""
    y = y if weight is None else y * per_channel(weight.to(y.dtype), y)
    return y if bias is None else y + per_channel(bias.to(y.dtype), y)


def moved(running: Tensor, batch: Tensor, momentum: float) -> Tensor:
    """A running statistic after a batch whose own is `batch`."""
    return (1 - momentum) * running + momentum * batch.to(running.dtype)


def _sample_x(call: BatchNormTrainCall | BatchNormInferCall, size: int, generator: torch.Generator) -> Tensor:
    """`(size, C, spatial)` in the call's memory order; the first half of the channels with a large mean."""
    channels = with_large_mean(normal((call.c, size, call.spatial), call.dtype, call.device, generator))
    if call.channels_last:
        return channels.permute(1, 2, 0).contiguous().permute(0, 2, 1)
    return channels.permute(1, 0, 2).contiguous()
