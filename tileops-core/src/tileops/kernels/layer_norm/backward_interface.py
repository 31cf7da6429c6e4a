"""Layer norm's backward: the call spec, the contract of its kernels, and the contract in plain torch."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor

from tileops.call_spec import CallSpec
from tileops.kernels.gradients import wanted_gradients
from tileops.kernels.kernel_base import KernelInterface
from tileops.kernels.sampling import AWKWARD_ROWS, affine, in_dtype, normal, with_large_mean

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
class LayerNormBwdCall(CallSpec):
    """The facts of one call of layer norm's backward.

    Args:
        n: Elements of a row: the product of the normalised axes.
        dtype: Dtype of x, of its gradient and of the output's.
        eps: What the forward added to the variance, in the units of x squared.
        weight_dtype: Dtype of the weight and of its gradient, float32 or x's; None where there is no weight.
        bias_dtype: Dtype of the bias's gradient, float32 or x's; None where it is not wanted.
        need: Whether the gradients of x, weight and bias are wanted; the weight's only where there is one.
    """

    n: int
    dtype: torch.dtype
    eps: float = 1e-5
    weight_dtype: torch.dtype | None = torch.float32
    bias_dtype: torch.dtype | None = torch.float32
    need: tuple[bool, bool, bool] = (True, True, True)


class LayerNormBwd(KernelInterface[LayerNormBwdCall]):
    """The gradients of layer norm. The statistics are those of the row, which is read anyway."""

    request = LayerNormBwdCall

    def forward(self, grad: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias.

        With `x̂ = (x - mean) / sqrt(var + eps)` of each row and `g = grad * weight`:
        `(g - mean(g) - x̂ * mean(g * x̂)) / sqrt(var + eps)`, the sum of `grad * x̂` over the rows, and the sum of
        `grad` over the rows.

        Args:
            grad: The gradient of the output: x's shape, `call.dtype`, contiguous, 16-byte aligned, on x's device.
            x: `(*batch, *normalised)`, the trailing axes holding `n` elements together; `call.dtype`;
                contiguous, 16-byte aligned, at least one element.
            weight: `n` elements in the shape of the normalised axes, `call.weight_dtype`, contiguous, on x's
                device; None where `weight_dtype` is.

        Returns:
            Three new contiguous tensors: x's shape, `call.dtype`; `(n,)`, `call.weight_dtype`; `(n,)`,
            `call.bias_dtype`. None in place of each that `call.need` says is not wanted. No argument is written.

        Numerics: statistics and sums accumulate in float32 (float64 for float64), statistics centred; each
        result is rounded once, and two runs are bit-identical.
        """
        raise NotImplementedError

    @classmethod
    def reference(cls, call: LayerNormBwdCall, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """The contract in plain torch; differentiable."""
        grad, x, weight = tensors
        assert grad is not None
        assert x is not None
        rows, grads = x.reshape(-1, call.n), grad.reshape(-1, call.n)
        centred = rows - rows.mean(dim=1, keepdim=True)
        invstd = 1 / torch.sqrt(centred.square().mean(dim=1, keepdim=True) + call.eps)
        unit = centred * invstd
        scaled = grads if weight is None else grads * weight.reshape(-1).to(grads.dtype)
        along = (scaled * unit).mean(dim=1, keepdim=True)
        grad_x = (scaled - scaled.mean(dim=1, keepdim=True) - unit * along) * invstd
        results = (grad_x.reshape(x.shape), (grads * unit).sum(dim=0), grads.sum(dim=0))
        return wanted_gradients(call, x, results)

    @classmethod
    def sample_calls(cls, device: torch.device) -> tuple[LayerNormBwdCall, ...]:
        """Short, long, prime and one-element rows, in each dtype, with every subset of gradients."""
        lengths = (1, 7, 64, 128, 256, 768, 1000, 1024, 2880, 4096, 4097, 8192, 16384, 32768, 65536, 131072)
        dtypes = (torch.float16, torch.bfloat16, torch.float32)
        return tuple(
            LayerNormBwdCall(device, n, dtype, 1e-5, in_dtype(weight, dtype), in_dtype(bias, dtype), need)
            for (n, dtype), (weight, bias, need) in zip(itertools.product(lengths, dtypes), itertools.cycle(WANTED))
        )

    @classmethod
    def sample_tensors(cls, call: LayerNormBwdCall, generator: torch.Generator) -> tuple[Tensor | None, ...]:
        """A batch of rows, half of them with a large mean, a gradient, and the weight that the call names."""
        rows = AWKWARD_ROWS[call.n % len(AWKWARD_ROWS)]
        x = with_large_mean(normal((rows, call.n), call.dtype, call.device, generator))
        grad = normal((rows, call.n), call.dtype, call.device, generator)
        return grad, x, affine(call.n, call.weight_dtype, call.device, generator, around=1.0)

    @classmethod
    def tolerance(cls, dtype: torch.dtype) -> tuple[float, float]:
        """The sum over rows adds up the rounding of their means, 6e-5 of a deviation each in float32."""
        relative, absolute = super().tolerance(dtype)
        return relative, max(absolute, 5e-3) if dtype is torch.float32 else absolute
