"""Layer norm: the call spec, the contract of its kernels, and the contract in plain torch."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor

from tileops.call_spec import CallSpec
from tileops.kernels.kernel_base import KernelInterface
from tileops.kernels.sampling import AWKWARD_ROWS, affine, in_dtype, normal, with_large_mean


@dataclasses.dataclass(frozen=True)
class LayerNormCall(CallSpec):
    """The facts of one layer-norm call.

    Args:
        n: Elements of a row: the product of the normalised axes.
        dtype: Dtype of x and of the result.
        eps: Added to the variance, in the units of x squared.
        weight_dtype: Dtype of the weight, float32 or x's; None where there is none.
        bias_dtype: Dtype of the bias, likewise.
    """

    n: int
    dtype: torch.dtype
    eps: float = 1e-5
    weight_dtype: torch.dtype | None = torch.float32
    bias_dtype: torch.dtype | None = torch.float32


class LayerNorm(KernelInterface[LayerNormCall]):
    """Normalise each row to mean 0 and variance 1, then scale and shift it."""

    request = LayerNormCall

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return `(x - mean) / sqrt(var + eps) * weight + bias`, statistics over each row.

        Args:
            x: `(*batch, *normalised)`, the trailing axes holding `n` elements together; `call.dtype`;
                contiguous, 16-byte aligned, at least one element.
            weight: `n` elements in the shape of the normalised axes, `call.weight_dtype`, contiguous, on x's
                device; None where `weight_dtype` is.
            bias: Likewise, `call.bias_dtype`.

        Returns:
            A new contiguous tensor of x's shape and dtype. No argument is written.

        Numerics: mean and population variance accumulate in float32 (float64 for float64), centred; the result
        is rounded once.
        """
        raise NotImplementedError

    @classmethod
    def reference(cls, call: LayerNormCall, *tensors: Tensor | None) -> Tensor:
        """The contract in plain torch, in the precision of x."""
        x, weight, bias = tensors
        assert x is not None
        rows = x.reshape(-1, call.n)
        centred = rows - rows.mean(dim=1, keepdim=True)
        y = centred / torch.sqrt(centred.square().mean(dim=1, keepdim=True) + call.eps)
        y = y if weight is None else y * weight.reshape(-1).to(y.dtype)
        y = y if bias is None else y + bias.reshape(-1).to(y.dtype)
        return y.reshape(x.shape)

    @classmethod
    def sample_calls(cls, device: torch.device) -> tuple[LayerNormCall, ...]:
        """Short, long, prime and one-element rows, in each dtype, with every presence of the affine tensors."""
        lengths = (1, 7, 64, 128, 256, 768, 1000, 1024, 2880, 4096, 4097, 8192, 16384, 32768, 65536, 131072)
        dtypes = (torch.float16, torch.bfloat16, torch.float32)
        mixed = itertools.cycle([(torch.float32,) * 2, ("x", "x"), (None, None), (torch.float32, None), (None, "x")])
        return tuple(
            LayerNormCall(device, n, dtype, weight_dtype=in_dtype(weight, dtype), bias_dtype=in_dtype(bias, dtype))
            for (n, dtype), (weight, bias) in zip(itertools.product(lengths, dtypes), mixed)
        )

    @classmethod
    def sample_tensors(cls, call: LayerNormCall, generator: torch.Generator) -> tuple[Tensor | None, ...]:
        """A batch of rows, half of them with a large mean, and the affine tensors that the call names."""
        rows = AWKWARD_ROWS[call.n % len(AWKWARD_ROWS)]
        x = with_large_mean(normal((rows, call.n), call.dtype, call.device, generator))
        weight = affine(call.n, call.weight_dtype, call.device, generator, around=1.0)
        bias = affine(call.n, call.bias_dtype, call.device, generator, around=0.0)
        return x, weight, bias
