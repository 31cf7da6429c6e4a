"""Instance norm that updates running statistics: call spec, contract, and the contract in plain torch.

What else instance norm does is done by other interfaces: without running statistics it is group norm with one
channel a group, and by running statistics it is batch norm in inference.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Annotated

import torch
from torch import Tensor

from tileops.call_spec import CallSpec, SizeClass
from tileops.kernels.batch_norm.interface import moved, scaled_and_shifted, statistics_dtype
from tileops.kernels.group_norm.interface import ROWS_CAP, sample_x
from tileops.kernels.kernel_base import KernelInterface
from tileops.kernels.sampling import affine, in_dtype, normal


@dataclasses.dataclass(frozen=True)
class InstanceNormTrainCall(CallSpec):
    """The facts of one call of instance norm that updates running statistics.

    A row is one channel of one sample: `spatial` elements, which lie together.

    Args:
        rows: Size class of the rows: batch times channels, rounded up to a power of two.
        spatial: Product of the spatial axes, at least 2.
        dtype: Dtype of x and of the result.
        eps: Added to the variance, in the units of x squared.
        momentum: Share of the batch's statistics in the new running ones, 0 to 1.
        weight_dtype: Dtype of the weight, float32 or x's; None where there is none.
        bias_dtype: Dtype of the bias, likewise.
    """

    rows: Annotated[int, SizeClass(cap=ROWS_CAP)]
    spatial: int
    dtype: torch.dtype
    eps: float = 1e-5
    momentum: float = 0.1
    weight_dtype: torch.dtype | None = torch.float32
    bias_dtype: torch.dtype | None = torch.float32


class InstanceNormTrain(KernelInterface[InstanceNormTrainCall]):
    """Normalise each channel of each sample by its own statistics, and update the running ones."""

    request = InstanceNormTrainCall
    writes = frozenset({"running_mean", "running_var"})

    def forward(
        self, x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Return `(x - mean) / sqrt(var + eps) * weight + bias`, statistics over each channel of each sample.

        Args:
            x: `(N, C, *spatial)`, `call.dtype`, contiguous, 16-byte aligned, at least one row of at least two
                elements.
            running_mean: `(C,)`, float32 (float64 for float64), contiguous, on x's device. Written:
                `(1 - momentum) * running_mean + momentum * m`, `m` the mean over the batch of each channel's `mean`.
            running_var: Likewise, with the mean over the batch of the unbiased variances.
            weight: `(C,)`, `call.weight_dtype`, contiguous, 16-byte aligned, on x's device; None where
                `weight_dtype` is.
            bias: Likewise, `call.bias_dtype`.

        Returns:
            A new contiguous tensor of x's shape and dtype.

        Numerics: mean and population variance accumulate in float32 (float64 for float64), centred; the result
        is rounded once, and two runs are bit-identical.
        """
        raise NotImplementedError

    @classmethod
    def reference(cls, call: InstanceNormTrainCall, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The contract in plain torch: the output, then the new running statistics."""
        x, running_mean, running_var, weight, bias = tensors
        assert x is not None
        assert running_mean is not None
        assert running_var is not None
        rows = x.reshape(*x.shape[:2], call.spatial)
        mean = rows.mean(dim=2, keepdim=True)
        centred = rows - mean
        variance = centred.square().mean(dim=2, keepdim=True)
        y = (centred / torch.sqrt(variance + call.eps)).reshape(x.shape)
        unbiased = variance.mean(dim=(0, 2)) * (call.spatial / (call.spatial - 1))
        return (
            scaled_and_shifted(y, weight, bias),
            moved(running_mean, mean.mean(dim=(0, 2)), call.momentum),
            moved(running_var, unbiased, call.momentum),
        )

    @classmethod
    def sample_calls(cls, device: torch.device) -> tuple[InstanceNormTrainCall, ...]:
        """Short, long and prime rows, many and few, in each dtype, with every presence of the affine tensors."""
        sizes = ((1, 7), (2, 2), (16, 121), (64, 4096), (1024, 49), (512, 1024), (4, 65537), (4096, 101), (1, 1 << 20))
        dtypes = (torch.float16, torch.bfloat16, torch.float32)
        mixed = itertools.cycle([(torch.float32,) * 2, ("x", "x"), (None, None), (torch.float32, None), (None, "x")])
        return tuple(
            InstanceNormTrainCall(
                device, rows, spatial, dtype, weight_dtype=in_dtype(weight, dtype), bias_dtype=in_dtype(bias, dtype)
            ).normalised()
            for ((rows, spatial), dtype), (weight, bias) in zip(itertools.product(sizes, dtypes), mixed)
        )

    @classmethod
    def sample_tensors(cls, call: InstanceNormTrainCall, generator: torch.Generator) -> tuple[Tensor | None, ...]:
        """A batch, half of its rows with a large mean, running statistics, and the affine tensors that the call names."""
        x = sample_x(call.rows, 1, call.spatial, call.dtype, call.device, generator)
        channels, kept = x.shape[1], statistics_dtype(call.dtype)
        running = [normal((channels,), kept, call.device, generator).abs() for _ in range(2)]
        weight = affine(channels, call.weight_dtype, call.device, generator, around=1.0)
        bias = affine(channels, call.bias_dtype, call.device, generator, around=0.0)
        return (x, *running, weight, bias)
