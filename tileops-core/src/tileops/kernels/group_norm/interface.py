"""Group norm: the call spec, the contract of its kernels, and the contract in plain torch.

Instance norm by the statistics of its input is the same thing with one channel a group, so both ops call this
interface.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Annotated

import torch
from torch import Tensor

from tileops.call_spec import CallSpec, SizeClass
from tileops.kernels.batch_norm.interface import scaled_and_shifted
from tileops.kernels.kernel_base import KernelInterface
from tileops.kernels.sampling import affine, in_dtype, normal, with_large_mean

ROWS_CAP = 1 << 20
"""Numbers of rows from here on are one class: by then every region is decided by the other sizes."""

SIZES = (
    (1, 1, 1), (2, 1, 7), (4, 7, 1), (8, 4, 64), (16, 2, 121), (32, 40, 64), (64, 1, 4096), (64, 10, 1024),
    (64, 80, 256), (256, 8, 3136), (1024, 1, 49), (2048, 16, 16), (2, 3, 65537), (1, 1, 1 << 20), (4096, 3, 101),
)  # fmt: skip
"""What samples vary: rows, channels of a group and spatial size. One element and primes, many rows and few, groups
that a warp holds and groups that a cluster does not."""


@dataclasses.dataclass(frozen=True)
class GroupNormCall(CallSpec):
    """The facts of one group-norm call.

    A row is one group of one sample: `channels * spatial` elements, which lie together.

    Args:
        rows: Size class of the rows: batch times groups, rounded up to a power of two.
        channels: Channels of a group; 1 for instance norm.
        spatial: Product of the spatial axes; 1 for `(N, C)`.
        dtype: Dtype of x and of the result.
        eps: Added to the variance, in the units of x squared.
        weight_dtype: Dtype of the weight, float32 or x's; None where there is none.
        bias_dtype: Dtype of the bias, likewise.
    """

    rows: Annotated[int, SizeClass(cap=ROWS_CAP)]
    channels: int
    spatial: int
    dtype: torch.dtype
    eps: float = 1e-5
    weight_dtype: torch.dtype | None = torch.float32
    bias_dtype: torch.dtype | None = torch.float32


class GroupNorm(KernelInterface[GroupNormCall]):
    """Normalise each group of channels of each sample, then scale and shift each channel."""

    request = GroupNormCall

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return `(x - mean) / sqrt(var + eps) * weight + bias`, statistics over each group of each sample.

        Args:
            x: `(N, C, *spatial)`, C a multiple of `call.channels`: group g holds the channels from
                `g * call.channels` on. `call.dtype`, contiguous, 16-byte aligned, at least one element.
            weight: `(C,)`, `call.weight_dtype`, contiguous, 16-byte aligned, on x's device; None where
                `weight_dtype` is.
            bias: Likewise, `call.bias_dtype`.

        Returns:
            A new contiguous tensor of x's shape and dtype. No argument is written.

        Numerics: mean and population variance accumulate in float32 (float64 for float64), centred; the result
        is rounded once.
        """
        raise NotImplementedError

    @classmethod
    def reference(cls, call: GroupNormCall, *tensors: Tensor | None) -> Tensor:
        """The contract in plain torch, in the precision of x."""
        x, weight, bias = tensors
        assert x is not None
        rows = x.reshape(-1, call.channels * call.spatial)
        centred = rows - rows.mean(dim=1, keepdim=True)
        y = centred / torch.sqrt(centred.square().mean(dim=1, keepdim=True) + call.eps)
        return scaled_and_shifted(y.reshape(x.shape), weight, bias)

    @classmethod
    def sample_calls(cls, device: torch.device) -> tuple[GroupNormCall, ...]:
        """Groups of all `SIZES`, in each dtype, with every presence of the affine tensors."""
        dtypes = (torch.float16, torch.bfloat16, torch.float32)
        mixed = itertools.cycle([(torch.float32,) * 2, ("x", "x"), (None, None), (torch.float32, None), (None, "x")])
        return tuple(
            GroupNormCall(
                device, *sizes, dtype, weight_dtype=in_dtype(weight, dtype), bias_dtype=in_dtype(bias, dtype)
            ).normalised()
            for (sizes, dtype), (weight, bias) in zip(itertools.product(SIZES, dtypes), mixed)
        )

    @classmethod
    def sample_tensors(cls, call: GroupNormCall, generator: torch.Generator) -> tuple[Tensor | None, ...]:
        """A batch, half of its groups with a large mean, and the affine tensors that the call names."""
        x = sample_x(call.rows, call.channels, call.spatial, call.dtype, call.device, generator)
        weight = affine(x.shape[1], call.weight_dtype, call.device, generator, around=1.0)
        bias = affine(x.shape[1], call.bias_dtype, call.device, generator, around=0.0)
        return x, weight, bias


def sample_x(
    rows: int, channels: int, spatial: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    """`(N, C, spatial)` whose number of groups is of the class `rows` and no power of two where that allows one.

    Of three samples, or of three groups: where the batch is long, sums over it are.
    """
    few, many = (1, 1) if rows == 1 else (min(3, rows), max(1, rows // 4))
    batch, groups = (few, many) if spatial % 2 == 0 else (many, few)
    x = with_large_mean(normal((batch * groups, channels * spatial), dtype, device, generator))
    return x.view(batch, groups * channels, spatial)
