"""The sum of two tensors and its RMS norm."""

from __future__ import annotations

from torch import Tensor

from tileops.kernels.fused_add_rms_norm import (
    FusedAddRMSNorm,
    FusedAddRMSNormCall,
    HeldRowFusedAddRMSNorm,
    StreamedRowFusedAddRMSNorm,
)
from tileops.ops.checks import check_number
from tileops.ops.norm.shape import AddsResidual
from tileops.ops.op_base import Op
from tileops.torch_boundary import TorchOp


class FusedAddRMSNormFwdOp(AddsResidual, Op):
    """Add a residual to a tensor; divide the last axis of the sum by its root mean square, then scale it.

    Args:
        eps: Added to the mean square, in the units of x squared.
        target: A target that takes the op over, instead of kernel selection.
    """

    interfaces = {"fused_add_rms_norm": FusedAddRMSNorm}
    kernel_types = {"held_row": HeldRowFusedAddRMSNorm, "streamed_row": StreamedRowFusedAddRMSNorm}
    torch_ops = {"": TorchOp(contiguous=True)}
    results = ("output", "summed")
    call_sizes = AddsResidual.call_sizes

    def __init__(self, eps: float = 1e-6, *, target: str | None = None) -> None:
        super().__init__(target=target)
        self.eps = eps
        check_number("eps", eps, least=0.0)

    def forward(self, x: Tensor, residual: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return `(y, summed)`: `summed = x + residual`, `y = summed / sqrt(mean(summed²) + eps) * weight`.

        Args:
            x: `(*batch, n)`, floating point, any layout.
            residual: Likewise, of x's shape and dtype, on x's device; it may share memory with x.
            weight: `(n,)`, float32 or x's dtype, on x's device.

        Returns:
            Two new contiguous tensors of x's shape and dtype. No argument is written.

        Raises:
            InputError: An argument does not fit.
            OpNotAvailableError: No kernel serves the call.
            AmbiguousDispatchError: Several kernels do and none is preferred.

        Numerics: the sum is rounded to x's dtype once, and y is the RMS norm of that rounded sum; the mean square
        in float32, eps inside the root.
        Source: arXiv:1910.07467; agrees with `torch.nn.functional.rms_norm` of `x + residual`.
        """
        call = FusedAddRMSNormCall(x.device, x.shape[-1], x.dtype, self.eps, None if weight is None else weight.dtype)
        return self.kernel_for("fused_add_rms_norm", call)(x, residual, weight)
