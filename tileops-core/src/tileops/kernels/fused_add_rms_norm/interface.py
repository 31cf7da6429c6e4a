"""A sum and its RMS norm: the call spec, the contract of its kernels, and the contract in plain torch."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor

from tileops.call_spec import CallSpec
from tileops.kernels.kernel_base import KernelInterface
from tileops.kernels.sampling import AWKWARD_ROWS, affine, in_dtype, normal


@dataclasses.dataclass(frozen=True)
class FusedAddRMSNormCall(CallSpec):
    """The facts of one call that adds a residual and takes the RMS norm of the sum.

    Args:
        n: Elements of a row: the size of the last axis.
        dtype: Dtype of x, of the residual and of both results.
        eps: Added to the mean square, in the units of x squared.
        weight_dtype: Dtype of the weight, float32 or x's; None where there is none.
    """

    n: int
    dtype: torch.dtype
    eps: float = 1e-6
    weight_dtype: torch.dtype | None = torch.float32


class FusedAddRMSNorm(KernelInterface[FusedAddRMSNormCall]):
    """Add a residual; divide each row of the sum by its root mean square, then scale it."""

    request = FusedAddRMSNormCall

    def forward(self, x: Tensor, residual: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return `(y, summed)`: `summed = x + residual`, `y = summed / sqrt(mean(summed²) + eps) * weight`.

        Args:
            x: `(*batch, n)`, `call.dtype`, contiguous, 16-byte aligned, at least one element.
            residual: Likewise, of x's shape, on x's device; it may be x itself.
            weight: `(n,)`, `call.weight_dtype`, contiguous, on x's device; None where `weight_dtype` is.

        Returns:
            Two new contiguous tensors of x's shape and dtype, in memory of their own. No argument is written.

        Numerics: the sum is rounded to x's dtype once, and the mean square is that of the rounded sum, so that
        y is the RMS norm of the `summed` that is returned. The mean square accumulates in float32 (float64 for
        float64); y is rounded once.
        """
        raise NotImplementedError

    @classmethod
    def reference(cls, call: FusedAddRMSNormCall, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        """The contract in plain torch: the sum rounded to the call's dtype, the rest in the precision of x."""
        x, residual, weight = tensors
        assert x is not None
        assert residual is not None
        summed = (x + residual).to(call.dtype).to(x.dtype)
        y = summed / torch.sqrt(summed.square().mean(dim=-1, keepdim=True) + call.eps)
        return y if weight is None else y * weight.to(y.dtype), summed

    @classmethod
    def sample_calls(cls, device: torch.device) -> tuple[FusedAddRMSNormCall, ...]:
        """Short, long, prime and one-element rows, in each dtype, with and without a weight."""
        lengths = (1, 7, 64, 256, 1000, 2880, 4096, 4097, 8192, 16384, 65536, 131072)
        dtypes = (torch.float16, torch.bfloat16, torch.float32)
        weights = itertools.cycle([torch.float32, "x", None, "x", torch.float32])
        return tuple(
            FusedAddRMSNormCall(device, n, dtype, weight_dtype=in_dtype(weight, dtype))
            for (n, dtype), weight in zip(itertools.product(lengths, dtypes), weights)
        )

    @classmethod
    def sample_tensors(cls, call: FusedAddRMSNormCall, generator: torch.Generator) -> tuple[Tensor | None, ...]:
        """A batch of rows of magnitudes from tiny to large, residuals as large, and the weight of the call."""
        rows = AWKWARD_ROWS[call.n % len(AWKWARD_ROWS)]
        magnitudes = torch.logspace(-2, 2, rows, device=call.device).reshape(-1, 1).to(call.dtype)
        x, residual = (normal((rows, call.n), call.dtype, call.device, generator) * magnitudes for _ in range(2))
        return x, residual, affine(call.n, call.weight_dtype, call.device, generator, around=1.0)
