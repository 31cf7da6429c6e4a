"""Kernels that are their interface's reference, for an interface that has no better one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tileops.kernels.dtypes import refusal_of_dtypes
from tileops.kernels.kernel_base import Kernel


class BackwardByReference(Kernel[Any]):
    """The gradients of a norm by plain torch, computed in float32. General, hence below every kernel of its own.

    Written before a backward interface in the bases of a class, it makes that class a kernel. The call spec has
    `dtype`, `weight_dtype`, perhaps `bias_dtype`, and `need`.
    """

    general = True

    @classmethod
    def refusal(cls, call: Any) -> str | None:
        """Serves the dtypes that our programs serve."""
        return refusal_of_dtypes(call.dtype, weight=call.weight_dtype, bias=getattr(call, "bias_dtype", None))

    def forward(self, grad: Tensor, x: Tensor, *beside: Tensor | None) -> tuple[Tensor | None, ...]:
        """The reference on float32 tensors, each result rounded to its dtype."""
        call: Any = self.call
        wide = [None if tensor is None else tensor.float() for tensor in (grad, x, *beside)]
        grad_x, *others = self.reference(call, *wide)  # pyright: ignore[reportAttributeAccessIssue]
        dtypes = (call.weight_dtype, getattr(call, "bias_dtype", None))
        rounded = [None if one is None else one.to(dtype) for one, dtype in zip(others, dtypes)]
        return None if grad_x is None else torch.empty_like(x).copy_(grad_x), *rounded
