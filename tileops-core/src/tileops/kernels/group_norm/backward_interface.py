"""Group norm's backward: the call spec, the contract of its kernels, and the contract in plain torch.

The backward of instance norm by the statistics of its input calls this interface too.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Annotated

import torch
from torch import Tensor

from tileops.call_spec import CallSpec, SizeClass
from tileops.kernels.batch_norm.interface import per_channel
from tileops.kernels.gradients import wanted_gradients
from tileops.kernels.group_norm.interface import ROWS_CAP, SIZES, sample_x
from tileops.kernels.kernel_base import KernelInterface
from tileops.kernels.sampling import affine, in_dtype, normal

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
class GroupNormBwdCall(CallSpec):
    """The facts of one call of group norm's backward.

    A row is one group of one sample: `channels * spatial` elements, which lie together.

    Args:
        rows: Size class of the rows: batch times groups, rounded up to a power of two.
        channels: Channels of a group; 1 for instance norm.
        spatial: Product of the spatial axes; 1 for `(N, C)`.
        dtype: Dtype of x, of its gradient and of the output's.
        eps: What the forward added to the variance, in the units of x squared.
        weight_dtype: Dtype of the weight and of its gradient, float32 or x's; None where there is no weight.
        bias_dtype: Dtype of the bias's gradient, float32 or x's; None where it is not wanted.
        need: Whether the gradients of x, weight and bias are wanted; the weight's only where there is one.
    """

    rows: Annotated[int, SizeClass(cap=ROWS_CAP)]
    channels: int
    spatial: int
    dtype: torch.dtype
    eps: float = 1e-5
    weight_dtype: torch.dtype | None = torch.float32
    bias_dtype: torch.dtype | None = torch.float32
    need: tuple[bool, bool, bool] = (True, True, True)


class GroupNormBwd(KernelInterface[GroupNormBwdCall]):
    """The gradients of group norm. The statistics are those of the group, which is read anyway."""

    request = GroupNormBwdCall

    def forward(self, grad: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias.

        With `x̂ = (x - mean) / sqrt(var + eps)` of each group of each sample, `g = grad * weight`, and means over
        that group: `(g - mean(g) - x̂ * mean(g * x̂)) / sqrt(var + eps)`. With sums over the batch and over space:
        the sum of `grad * x̂`, and the sum of `grad`, of each channel.

        Args:
            grad: The gradient of the output: x's shape, `call.dtype`, contiguous, 16-byte aligned, on x's device.
            x: `(N, C, *spatial)`, C a multiple of `call.channels`: group g holds the channels from
                `g * call.channels` on. `call.dtype`, contiguous, 16-byte aligned, at least one element.
            weight: `(C,)`, `call.weight_dtype`, contiguous, 16-byte aligned, on x's device; None where
                `weight_dtype` is.

        Returns:
            Three new contiguous tensors: x's shape, `call.dtype`; `(C,)`, `call.weight_dtype`; `(C,)`,
            `call.bias_dtype`. None in place of each that `call.need` says is not wanted. No argument is written.

        Numerics: statistics and sums accumulate in float32 (float64 for float64), statistics centred; each
        result is rounded once, and two runs are bit-identical.
        """
        raise NotImplementedError

    @classmethod
    def reference(cls, call: GroupNormBwdCall, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """The contract in plain torch; differentiable."""
        grad, x, weight = tensors
        assert grad is not None
        assert x is not None
        rows = x.reshape(-1, call.channels * call.spatial)
        centred = rows - rows.mean(dim=1, keepdim=True)
        invstd = 1 / torch.sqrt(centred.square().mean(dim=1, keepdim=True) + call.eps)
        unit = centred * invstd
        scaled = (grad if weight is None else grad * per_channel(weight.to(grad.dtype), grad)).reshape(rows.shape)
        along = (scaled * unit).mean(dim=1, keepdim=True)
        grad_x = (scaled - scaled.mean(dim=1, keepdim=True) - unit * along) * invstd
        over = [axis for axis in range(x.dim()) if axis != 1]
        results = (grad_x.reshape(x.shape), (grad * unit.reshape(x.shape)).sum(dim=over), grad.sum(dim=over))
        return wanted_gradients(call, x, results)

    @classmethod
    def sample_calls(cls, device: torch.device) -> tuple[GroupNormBwdCall, ...]:
        """The sizes of the forward's samples, in each dtype, with every subset of gradients."""
        dtypes = (torch.float16, torch.bfloat16, torch.float32)
        return tuple(
            GroupNormBwdCall(
                device, *sizes, dtype, 1e-5, in_dtype(weight, dtype), in_dtype(bias, dtype), need
            ).normalised()
            for (sizes, dtype), (weight, bias, need) in zip(itertools.product(SIZES, dtypes), itertools.cycle(WANTED))
        )

    @classmethod
    def sample_tensors(cls, call: GroupNormBwdCall, generator: torch.Generator) -> tuple[Tensor | None, ...]:
        """A batch, half of its groups with a large mean, a gradient, and the weight that the call names."""
        x = sample_x(call.rows, call.channels, call.spatial, call.dtype, call.device, generator)
        grad = normal(tuple(x.shape), call.dtype, call.device, generator)
        return grad, x, affine(x.shape[1], call.weight_dtype, call.device, generator, around=1.0)

    @classmethod
    def tolerance(cls, dtype: torch.dtype) -> tuple[float, float]:
        """A sum over millions of values in float32, of which most cancel, has an error of its own."""
        relative, absolute = super().tolerance(dtype)
        return relative, max(absolute, 5e-3) if dtype is torch.float32 else absolute
