"""A sum and its layer norm: the call spec, the contract of its kernels, and the contract in plain torch."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor

from tileops.call_spec import CallSpec
from tileops.kernels.kernel_base import KernelInterface
from tileops.kernels.sampling import AWKWARD_ROWS, affine, in_dtype, normal, with_large_mean


@dataclasses.dataclass(frozen=True)
class FusedAddLayerNormCall(CallSpec):
    """The facts of one call that adds a residual and takes the layer norm of the sum.

    Args:
        n: Elements of a row: the size of the last axis.
        dtype: Dtype of x, of the residual and of both results.
        eps: Added to the variance, in the units of x squared.
        weight_dtype: Dtype of the weight, float32 or x's; None where there is none.
        bias_dtype: Dtype of the bias, likewise.
    """

    n: int
    dtype: torch.dtype
    eps: float = 1e-6
    weight_dtype: torch.dtype | None = torch.float32
    bias_dtype: torch.dtype | None = torch.float32


class FusedAddLayerNorm(KernelInterface[FusedAddLayerNormCall]):
    """Add a residual; normalise each row of the sum to mean 0 and variance 1, then scale and shift it."""

    request = FusedAddLayerNormCall

    def forward(self, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return `(y, summed)`: `summed = x + residual`, `y = (summed - mean) / sqrt(var + eps) * weight + bias`.

        Args:
            x: `(*batch, n)`, `call.dtype`, contiguous, 16-byte aligned, at least one element.
            residual: Likewise, of x's shape, on x's device; it may be x itself.
            weight: `(n,)`, `call.weight_dtype`, contiguous, on x's device; None where `weight_dtype` is.
            bias: Likewise, `call.bias_dtype`.

        Returns:
            Two new contiguous tensors of x's shape and dtype, in memory of their own. No argument is written.

        Numerics: the sum is rounded to x's dtype once, and the statistics are those of the rounded sum, so that
        y is the layer norm of the `summed` that is returned. Mean and population variance accumulate in float32
        (float64 for float64), centred; y is rounded once.
        """
        raise NotImplementedError

    @classmethod
    def reference(cls, call: FusedAddLayerNormCall, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        """The contract in plain torch: the sum rounded to the call's dtype, the rest in the precision of x."""
        x, residual, weight, bias = tensors
        assert x is not None
        assert residual is not None
        summed = (x + residual).to(call.dtype).to(x.dtype)
        centred = summed - summed.mean(dim=-1, keepdim=True)
        y = centred / torch.sqrt(centred.square().mean(dim=-1, keepdim=True) + call.eps)
        y = y if weight is None else y * weight.to(y.dtype)
        return y if bias is None else y + bias.to(y.dtype), summed

    @classmethod
    def sample_calls(cls, device: torch.device) -> tuple[FusedAddLayerNormCall, ...]:
        """Short, long, prime and one-element rows, in each dtype, with every presence of the affine tensors."""
        lengths = (1, 7, 64, 256, 1000, 2880, 4096, 4097, 8192, 16384, 65536, 131072)
        dtypes = (torch.float16, torch.bfloat16, torch.float32)
        mixed = itertools.cycle([(torch.float32,) * 2, ("x", "x"), (None, None), (torch.float32, None), (None, "x")])
        return tuple(
            FusedAddLayerNormCall(
                device, n, dtype, weight_dtype=in_dtype(weight, dtype), bias_dtype=in_dtype(bias, dtype)
            )
            for (n, dtype), (weight, bias) in zip(itertools.product(lengths, dtypes), mixed)
        )

    @classmethod
    def sample_tensors(cls, call: FusedAddLayerNormCall, generator: torch.Generator) -> tuple[Tensor | None, ...]:
        """A batch of rows, half of them with a large mean, a residual, and the affine tensors of the call."""
        rows = AWKWARD_ROWS[call.n % len(AWKWARD_ROWS)]
        x, residual = (normal((rows, call.n), call.dtype, call.device, generator) for _ in range(2))
        weight = affine(call.n, call.weight_dtype, call.device, generator, around=1.0)
        bias = affine(call.n, call.bias_dtype, call.device, generator, around=0.0)
        return with_large_mean(x), residual, weight, bias
