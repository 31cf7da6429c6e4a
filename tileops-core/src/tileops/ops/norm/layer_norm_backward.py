"""Layer norm's backward."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tileops.kernels.layer_norm import HeldRowLayerNormBwd, LayerNormBwd, LayerNormBwdCall, StreamedRowLayerNormBwd
from tileops.ops.backward_op import BackwardOp
from tileops.ops.checks import check_number
from tileops.ops.norm.shape import GradientsOfRows, dtype_of, normalised, viewed
from tileops.torch_boundary import TorchOp


class LayerNormBwdOp(GradientsOfRows, BackwardOp):
    """The gradients of layer norm.

    Args:
        normalized_shape: The sizes of the trailing axes that were normalised; one number for the last axis.
        eps: What was added to the variance, in the units of x squared.
        need: Whether the gradients of x, weight and bias are wanted.
        bias_dtype: The dtype of the bias's gradient; None for that of the weight, of x where there is none.
        target: A target that takes the op over, instead of kernel selection.
    """

    interfaces = {"layer_norm_bwd": LayerNormBwd}
    kernel_types = {"held_row": HeldRowLayerNormBwd, "streamed_row": StreamedRowLayerNormBwd}
    torch_ops = {"": TorchOp(contiguous=True)}
    call_sizes = GradientsOfRows.call_sizes
    results = ("grad_x", "grad_weight", "grad_bias")

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        need: Sequence[bool] = (True, True, True),
        bias_dtype: torch.dtype | None = None,
        *,
        target: str | None = None,
    ) -> None:
        super().__init__(need, target=target)
        self.normalized_shape = normalised(normalized_shape)
        self.eps = eps
        self.bias_dtype = bias_dtype
        check_number("eps", eps, least=0.0)

    def forward(
        self, grad: Tensor, x: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of x, weight and bias of `LayerNormFwdOp`.

        Args:
            grad: The gradient of the output: x's shape and dtype, on x's device, any layout.
            x: The input of the forward: `(*batch, *normalized_shape)`, floating point, any layout.
            weight: `normalized_shape`, float32 or x's dtype, on x's device.

        Returns:
            `(grad_x, grad_weight, grad_bias)`, new and contiguous: x's shape and dtype; `normalized_shape` and the
            weight's dtype; `normalized_shape` and `bias_dtype`. None for what is not needed, and for the gradient
            of an absent weight. No argument is written.

        Raises:
            InputError: An argument does not fit.
            OpNotAvailableError: No kernel serves the call.
            AmbiguousDispatchError: Several kernels do and none is preferred.

        Numerics: statistics are recomputed from x; they and the sums are in float32 (float64 for float64).
        Source: arXiv:1607.06450; agrees with the gradients of `torch.nn.functional.layer_norm`.
        """
        kernel = self.kernel_for(*self.request(x, weight))
        grad_x, grad_weight, grad_bias = kernel(grad, x, weight)
        return grad_x, viewed(grad_weight, self.normalized_shape), viewed(grad_bias, self.normalized_shape)

    def request(self, x: Tensor, weight: Tensor | None = None) -> tuple[str, LayerNormBwdCall]:
        """The call spec. x alone says what device and dtype everything has."""
        of_x, of_weight, of_bias = self.need
        need = (of_x, of_weight and weight is not None, of_bias)
        n = math.prod(self.normalized_shape)
        call = LayerNormBwdCall(
            x.device, n, x.dtype, self.eps, dtype_of(weight), self._bias_dtype(x, weight) if of_bias else None, need
        )
        return "layer_norm_bwd", call

    def _bias_dtype(self, x: Tensor, weight: Tensor | None) -> torch.dtype:
        return self.bias_dtype or (x if weight is None else weight).dtype

    def empty_results(
        self, grad: Tensor, x: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """A gradient of x without elements, and sums over no rows."""
        of_x, of_weight, of_bias = self.wanted(grad, x, weight)
        shape, bias_dtype = self.normalized_shape, self._bias_dtype(x, weight)
        return (
            torch.empty_like(x, memory_format=torch.contiguous_format) if of_x else None,
            x.new_zeros(shape, dtype=dtype_of(weight)) if of_weight else None,
            x.new_zeros(shape, dtype=bias_dtype) if of_bias else None,
        )
