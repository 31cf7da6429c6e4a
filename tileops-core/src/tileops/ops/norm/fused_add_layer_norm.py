"""The sum of two tensors and its layer norm."""

from __future__ import annotations

from torch import Tensor

from tileops.kernels.fused_add_layer_norm import (
    FusedAddLayerNorm,
    FusedAddLayerNormCall,
    HeldRowFusedAddLayerNorm,
    StreamedRowFusedAddLayerNorm,
)
from tileops.ops.checks import check_number
from tileops.ops.norm.shape import AddsResidual
from tileops.ops.op_base import Op
from tileops.torch_boundary import TorchOp


class FusedAddLayerNormFwdOp(AddsResidual, Op):
    """Add a residual to a tensor; normalise the last axis of the sum, then scale and shift it.

    Args:
        eps: Added to the variance, in the units of x squared.
        target: A target that takes the op over, instead of kernel selection.
    """

    interfaces = {"fused_add_layer_norm": FusedAddLayerNorm}
    kernel_types = {"held_row": HeldRowFusedAddLayerNorm, "streamed_row": StreamedRowFusedAddLayerNorm}
    torch_ops = {"": TorchOp(contiguous=True)}
    results = ("output", "summed")
    call_sizes = AddsResidual.call_sizes

    def __init__(self, eps: float = 1e-6, *, target: str | None = None) -> None:
        super().__init__(target=target)
        self.eps = eps
        check_number("eps", eps, least=0.0)

    def forward(
        self, x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return `(y, summed)`: `summed = x + residual`, `y = (summed - mean) / sqrt(var + eps) * weight + bias`.

        Args:
            x: `(*batch, n)`, floating point, any layout.
            residual: Likewise, of x's shape and dtype, on x's device; it may share memory with x.
            weight: `(n,)`, float32 or x's dtype, on x's device.
            bias: Likewise.

        Returns:
            Two new contiguous tensors of x's shape and dtype. No argument is written.

        Raises:
            InputError: An argument does not fit.
            OpNotAvailableError: No kernel serves the call.
            AmbiguousDispatchError: Several kernels do and none is preferred.

        Numerics: the sum is rounded to x's dtype once, and y is the layer norm of that rounded sum; mean and
        population variance in float32, eps inside the root.
        Source: arXiv:1607.06450; agrees with `torch.nn.functional.layer_norm` of `x + residual`.
        """
        weight_dtype = None if weight is None else weight.dtype
        bias_dtype = None if bias is None else bias.dtype
        call = FusedAddLayerNormCall(x.device, x.shape[-1], x.dtype, self.eps, weight_dtype, bias_dtype)
        return self.kernel_for("fused_add_layer_norm", call)(x, residual, weight, bias)
