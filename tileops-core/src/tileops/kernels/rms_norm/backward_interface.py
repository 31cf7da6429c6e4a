"""RMS norm's backward: the call spec, the contract of its kernels, and the contract in plain torch."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor

from tileops.call_spec import CallSpec
from tileops.kernels.gradients import wanted_gradients
from tileops.kernels.kernel_base import KernelInterface
from tileops.kernels.sampling import AWKWARD_ROWS, affine, in_dtype, normal

WANTED = (
    (torch.float32, (True, True)),
    ("x", (True, True)),
    (None, (True, False)),
    (torch.float32, (False, True)),
    ("x", (True, False)),
)
"""What samples vary: the dtype of the weight, "x" for that of x, and the gradients that are wanted."""


@dataclasses.dataclass(frozen=True)
class RMSNormBwdCall(CallSpec):
    """The facts of one call of RMS norm's backward.

    Args:
        n: Elements of a row: the product of the normalised axes.
        dtype: Dtype of x, of its gradient and of the output's.
        eps: What the forward added to the mean square, in the units of x squared.
        weight_dtype: Dtype of the weight and of its gradient, float32 or x's; None where there is no weight.
        need: Whether the gradients of x and weight are wanted; the weight's only where there is one.
    """

    n: int
    dtype: torch.dtype
    eps: float
    weight_dtype: torch.dtype | None = torch.float32
    need: tuple[bool, bool] = (True, True)


class RMSNormBwd(KernelInterface[RMSNormBwdCall]):
    """The gradients of RMS norm. The mean square is that of the row, which is read anyway."""

    request = RMSNormBwdCall

    def forward(self, grad: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and weight.

        With `x̂ = x / sqrt(mean(x²) + eps)` of each row and `g = grad * weight`:
        `(g - x̂ * mean(g * x̂)) / sqrt(mean(x²) + eps)`, and the sum of `grad * x̂` over the rows.

        Args:
            grad: The gradient of the output: x's shape, `call.dtype`, contiguous, 16-byte aligned, on x's device.
            x: `(*batch, *normalised)`, the trailing axes holding `n` elements together; `call.dtype`;
                contiguous, 16-byte aligned, at least one element.
            weight: `n` elements in the shape of the normalised axes, `call.weight_dtype`, contiguous, on x's
                device; None where `weight_dtype` is.

        Returns:
            Two new contiguous tensors: x's shape, `call.dtype`; `(n,)`, `call.weight_dtype`. None in place of
            each that `call.need` says is not wanted. No argument is written.

        Numerics: the mean square and the sums accumulate in float32 (float64 for float64); each result is
        rounded once, and two runs are bit-identical.
        """
        raise NotImplementedError

    @classmethod
    def reference(cls, call: RMSNormBwdCall, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """The contract in plain torch; differentiable."""
        grad, x, weight = tensors
        assert grad is not None
        assert x is not None
        rows, grads = x.reshape(-1, call.n), grad.reshape(-1, call.n)
        factor = 1 / torch.sqrt(rows.square().mean(dim=1, keepdim=True) + call.eps)
        unit = rows * factor
        scaled = grads if weight is None else grads * weight.reshape(-1).to(grads.dtype)
        grad_x = (scaled - unit * (scaled * unit).mean(dim=1, keepdim=True)) * factor
        results = (grad_x.reshape(x.shape), (grads * unit).sum(dim=0))
        return wanted_gradients(call, x, results)

    @classmethod
    def sample_calls(cls, device: torch.device) -> tuple[RMSNormBwdCall, ...]:
        """Short, long, prime and one-element rows, in each dtype, with every subset of gradients."""
        lengths = (1, 7, 64, 128, 256, 768, 1000, 1024, 2880, 4096, 4097, 8192, 16384, 32768, 65536, 131072)
        dtypes = (torch.float16, torch.bfloat16, torch.float32)
        return tuple(
            RMSNormBwdCall(device, n, dtype, 1e-6, in_dtype(weight, dtype), need)
            for (n, dtype), (weight, need) in zip(itertools.product(lengths, dtypes), itertools.cycle(WANTED))
        )

    @classmethod
    def sample_tensors(cls, call: RMSNormBwdCall, generator: torch.Generator) -> tuple[Tensor | None, ...]:
        """A batch of rows of magnitudes from tiny to large, a gradient, and the weight that the call names."""
        rows = AWKWARD_ROWS[call.n % len(AWKWARD_ROWS)]
        x = normal((rows, call.n), call.dtype, call.device, generator)
        x = x * torch.logspace(-2, 2, rows, device=call.device).reshape(-1, 1).to(call.dtype)
        grad = normal((rows, call.n), call.dtype, call.device, generator)
        return grad, x, affine(call.n, call.weight_dtype, call.device, generator, around=1.0)
