"""Layer norm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tileops.kernels.layer_norm import HeldRowLayerNorm, LayerNorm, LayerNormCall, StreamedRowLayerNorm
from tileops.ops.checks import check_number
from tileops.ops.norm.layer_norm_backward import LayerNormBwdOp
from tileops.ops.norm.shape import NormalisesRows, normalised
from tileops.ops.op_base import Op
from tileops.torch_boundary import TorchOp


class LayerNormFwdOp(NormalisesRows, Op):
    """Normalise the trailing axes of a tensor, then scale and shift.

    Args:
        normalized_shape: The sizes of the trailing axes to normalise over; one number for the last axis.
        eps: Added to the variance, in the units of x squared.
        target: A target that takes the op over, instead of kernel selection.
    """

    interfaces = {"layer_norm": LayerNorm}
    kernel_types = {"held_row": HeldRowLayerNorm, "streamed_row": StreamedRowLayerNorm}
    backward = LayerNormBwdOp
    torch_ops = {"": TorchOp(contiguous=True, autocast={"cuda": torch.float32})}
    call_sizes = NormalisesRows.call_sizes

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-5, *, target: str | None = None) -> None:
        super().__init__(target=target)
        self.normalized_shape = normalised(normalized_shape)
        self.eps = eps
        check_number("eps", eps, least=0.0)

    def forward(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Return `(x - mean) / sqrt(var + eps) * weight + bias`, statistics over the normalised axes.

        Args:
            x: `(*batch, *normalized_shape)`, floating point, any layout.
            weight: `normalized_shape`, float32 or x's dtype, on x's device.
            bias: Likewise.

        Returns:
            A new contiguous tensor of x's shape and dtype. No argument is written.

        Raises:
            InputError: An argument does not fit.
            OpNotAvailableError: No kernel serves the call.
            AmbiguousDispatchError: Several kernels do and none is preferred.

        Numerics: mean and population variance in float32, eps inside the root.
        Source: arXiv:1607.06450; agrees with `torch.nn.functional.layer_norm`.
        """
        n = math.prod(self.normalized_shape)
        weight_dtype = None if weight is None else weight.dtype
        bias_dtype = None if bias is None else bias.dtype
        call = LayerNormCall(x.device, n, x.dtype, self.eps, weight_dtype, bias_dtype)
        return self.kernel_for("layer_norm", call)(x, weight, bias)
