"""RMS norm's backward."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tileops.kernels.rms_norm import HeldRowRMSNormBwd, RMSNormBwd, RMSNormBwdCall, StreamedRowRMSNormBwd
from tileops.ops.backward_op import BackwardOp
from tileops.ops.checks import check_number
from tileops.ops.norm.shape import GradientsOfRows, dtype_of, machine_eps, normalised, viewed
from tileops.torch_boundary import TorchOp


class RMSNormBwdOp(GradientsOfRows, BackwardOp):
    """The gradients of RMS norm.

    Args:
        normalized_shape: The sizes of the trailing axes that were normalised; one number for the last axis.
        eps: What was added to the mean square, in the units of x squared; None as in `RMSNormFwdOp`.
        need: Whether the gradients of x and weight are wanted.
        target: A target that takes the op over, instead of kernel selection.
    """

    interfaces = {"rms_norm_bwd": RMSNormBwd}
    kernel_types = {"held_row": HeldRowRMSNormBwd, "streamed_row": StreamedRowRMSNormBwd}
    torch_ops = {"": TorchOp(contiguous=True)}
    call_sizes = GradientsOfRows.call_sizes
    results = ("grad_x", "grad_weight")

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        need: Sequence[bool] = (True, True),
        *,
        target: str | None = None,
    ) -> None:
        super().__init__(need, target=target)
        self.normalized_shape = normalised(normalized_shape)
        self.eps = eps
        if eps is not None:
            check_number("eps", eps, least=0.0)

    def forward(self, grad: Tensor, x: Tensor, weight: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of x and weight of `RMSNormFwdOp`.

        Args:
            grad: The gradient of the output: x's shape and dtype, on x's device, any layout.
            x: The input of the forward: `(*batch, *normalized_shape)`, floating point, any layout.
            weight: `normalized_shape`, float32 or x's dtype, on x's device.

        Returns:
            `(grad_x, grad_weight)`, new and contiguous: x's shape and dtype; `normalized_shape` and the weight's
            dtype. None for what is not needed, and for the gradient of an absent weight. No argument is written.

        Raises:
            InputError: An argument does not fit.
            OpNotAvailableError: No kernel serves the call.
            AmbiguousDispatchError: Several kernels do and none is preferred.

        Numerics: the mean square is recomputed from x; it and the sums are in float32 (float64 for float64).
        Source: arXiv:1910.07467; agrees with the gradients of `torch.nn.functional.rms_norm`.
        """
        grad_x, grad_weight = self.kernel_for(*self.request(x, weight))(grad, x, weight)
        return grad_x, viewed(grad_weight, self.normalized_shape)

    def request(self, x: Tensor, weight: Tensor | None = None) -> tuple[str, RMSNormBwdCall]:
        """The call spec. x alone says what device and dtype everything has."""
        need = (self.need[0], self.need[1] and weight is not None)
        eps = machine_eps(x.dtype) if self.eps is None else self.eps
        call = RMSNormBwdCall(x.device, math.prod(self.normalized_shape), x.dtype, eps, dtype_of(weight), need)
        return "rms_norm_bwd", call

    def empty_results(
        self, grad: Tensor, x: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """A gradient of x without elements, and a sum over no rows."""
        of_x, of_weight = self.wanted(grad, x, weight)
        return (
            torch.empty_like(x, memory_format=torch.contiguous_format) if of_x else None,
            x.new_zeros(self.normalized_shape, dtype=dtype_of(weight)) if of_weight else None,
        )
