"""RMS norm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tileops.kernels.rms_norm import HeldRowRMSNorm, RMSNorm, RMSNormCall, StreamedRowRMSNorm
from tileops.ops.checks import check_number
from tileops.ops.norm.rms_norm_backward import RMSNormBwdOp
from tileops.ops.norm.shape import NormalisesRows, machine_eps, normalised
from tileops.ops.op_base import Op
from tileops.torch_boundary import TorchOp


class RMSNormFwdOp(NormalisesRows, Op):
    """Divide the trailing axes of a tensor by their root mean square, then scale.

    Args:
        normalized_shape: The sizes of the trailing axes to normalise over; one number for the last axis.
        eps: Added to the mean square, in the units of x squared; None for the machine epsilon that
            `torch.nn.functional.rms_norm` takes: of x's dtype, of float32 where x has fewer bits.
        target: A target that takes the op over, instead of kernel selection.
    """

    interfaces = {"rms_norm": RMSNorm}
    kernel_types = {"held_row": HeldRowRMSNorm, "streamed_row": StreamedRowRMSNorm}
    backward = RMSNormBwdOp
    torch_ops = {"": TorchOp(contiguous=True, autocast={"cuda": torch.float32})}
    call_sizes = NormalisesRows.call_sizes

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float | None = None, *, target: str | None = None
    ) -> None:
        super().__init__(target=target)
        self.normalized_shape = normalised(normalized_shape)
        self.eps = eps
        if eps is not None:
            check_number("eps", eps, least=0.0)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return `x / sqrt(mean(x²) + eps) * weight`, the mean over the normalised axes.

        Args:
            x: `(*batch, *normalized_shape)`, floating point, any layout.
            weight: `normalized_shape`, float32 or x's dtype, on x's device.

        Returns:
            A new contiguous tensor of x's shape and dtype. No argument is written.

        Raises:
            InputError: An argument does not fit.
            OpNotAvailableError: No kernel serves the call.
            AmbiguousDispatchError: Several kernels do and none is preferred.

        Numerics: the mean square in float32, eps inside the root.
        Source: arXiv:1910.07467; agrees with `torch.nn.functional.rms_norm`.
        """
        n = math.prod(self.normalized_shape)
        eps = machine_eps(x.dtype) if self.eps is None else self.eps
        call = RMSNormCall(x.device, n, x.dtype, eps, None if weight is None else weight.dtype)
        return self.kernel_for("rms_norm", call)(x, weight)
