"""What the torch kernels share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SERVED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def refusal_of_dtype(dtype: torch.dtype) -> str | None:
    """Why x of `dtype` is not served, or None."""
    if dtype in SERVED:
        return None
    return f"x is {str(dtype).removeprefix('torch.')}; serves float16, bfloat16, float32 and float64"


def widened(tensor: Tensor) -> Tensor:
    """The tensor in the dtype that statistics accumulate in: float64 stays, everything else is float32."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def like(tensor: Tensor | None, x: Tensor) -> Tensor | None:
    """An optional parameter in the dtype of x."""
    return None if tensor is None else tensor.to(x.dtype)


def rounded(gradients: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
    """Gradients in the dtypes of what they are gradients of; None where one is not wanted."""
    return [None if gradient is None else gradient.to(dtype) for gradient, dtype in zip(gradients, dtypes)]
