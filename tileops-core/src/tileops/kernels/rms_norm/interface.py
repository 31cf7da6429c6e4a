"""RMS norm: the call spec, the contract of its kernels, and the contract in plain torch."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor

from tileops.call_spec import CallSpec
from tileops.kernels.kernel_base import KernelInterface
from tileops.kernels.sampling import AWKWARD_ROWS, affine, normal


@dataclasses.dataclass(frozen=True)
class RMSNormCall(CallSpec):
    """The facts of one RMS-norm call.

    Args:
        n: Elements of a row: the product of the normalised axes.
        dtype: Dtype of x and of the result.
        eps: Added to the mean square, in the units of x squared.
        weight_dtype: Dtype of the weight, float32 or x's; None where there is none.
    """

    n: int
    dtype: torch.dtype
    eps: float
    weight_dtype: torch.dtype | None = torch.float32


class RMSNorm(KernelInterface[RMSNormCall]):
    """Divide each row by its root mean square, then scale it."""

    request = RMSNormCall

    def forward(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Return `x / sqrt(mean(x²) + eps) * weight`, the mean over each row.

        Args:
            x: `(*batch, *normalised)`, the trailing axes holding `n` elements together; `call.dtype`;
                contiguous, 16-byte aligned, at least one element.
            weight: `n` elements in the shape of the normalised axes, `call.weight_dtype`, contiguous, on x's
                device; None where `weight_dtype` is.

        Returns:
            A new contiguous tensor of x's shape and dtype. No argument is written.

        Numerics: the mean square accumulates in float32 (float64 for float64); the result is rounded once.
        """
        raise NotImplementedError

    @classmethod
    def reference(cls, call: RMSNormCall, *tensors: Tensor | None) -> Tensor:
        """The contract in plain torch, in the precision of x."""
        x, weight = tensors
        assert x is not None
        rows = x.reshape(-1, call.n)
        y = rows / torch.sqrt(rows.square().mean(dim=1, keepdim=True) + call.eps)
        y = y if weight is None else y * weight.reshape(-1).to(y.dtype)
        return y.reshape(x.shape)

    @classmethod
    def sample_calls(cls, device: torch.device) -> tuple[RMSNormCall, ...]:
        """Short, long, prime and one-element rows, in each dtype, with and without a weight."""
        lengths = (1, 7, 64, 128, 256, 768, 1000, 1024, 2880, 4096, 4097, 8192, 16384, 32768, 65536, 131072)
        dtypes = (torch.float16, torch.bfloat16, torch.float32)
        weights = itertools.cycle([torch.float32, "x", None, torch.float32])
        return tuple(
            RMSNormCall(device, n, dtype, 1e-6, weight_dtype=dtype if weight == "x" else weight)  # type: ignore[arg-type]
            for (n, dtype), weight in zip(itertools.product(lengths, dtypes), weights)
        )

    @classmethod
    def sample_tensors(cls, call: RMSNormCall, generator: torch.Generator) -> tuple[Tensor | None, ...]:
        """A batch of rows of magnitudes from tiny to large, and the weight that the call names."""
        rows = AWKWARD_ROWS[call.n % len(AWKWARD_ROWS)]
        x = normal((rows, call.n), call.dtype, call.device, generator)
        x = x * torch.logspace(-2, 2, rows, device=call.device).reshape(-1, 1).to(call.dtype)
        return x, affine(call.n, call.weight_dtype, call.device, generator, around=1.0)
