"""Batch norm's backward in plain torch, in training and in inference."""

from __future__ import annotations

from typing import final

from torch import Tensor

from tileops.kernels.batch_norm.backward_interface import BatchNormBwdCall, BatchNormBwdInfer, BatchNormBwdTrain
from tileops.kernels.dtypes import refusal_of_dtypes
from tileops.kernels.gradients import gradients_by_reference


class _ByReference:
    """Any shape, by the reference in float32: general, hence below every other kernel."""

    general = True

    @classmethod
    def refusal(cls, call: BatchNormBwdCall) -> str | None:
        """Serves the dtypes that our programs serve."""
        return refusal_of_dtypes(call.dtype, weight=call.weight_dtype, bias=call.bias_dtype)

    def __init__(self, call: BatchNormBwdCall) -> None:
        super().__init__(call)  # pyright: ignore[reportCallIssue] - the interface's, which comes next
        self.dtypes = (call.weight_dtype, call.bias_dtype)

    def forward(
        self, grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """See the interface."""
        return gradients_by_reference(self, self.dtypes, grad, x, mean, invstd, weight)


@final
class ReferenceBatchNormBwdTrain(_ByReference, BatchNormBwdTrain):
    """The gradients in training."""


@final
class ReferenceBatchNormBwdInfer(_ByReference, BatchNormBwdInfer):
    """The gradients in inference."""
