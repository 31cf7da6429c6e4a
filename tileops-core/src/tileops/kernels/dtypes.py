"""The dtypes that the in-tree norm kernels serve."""

from __future__ import annotations

from typing import Final

import torch

SERVED_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of x; an affine tensor may be in x's or in float32."""


def refusal_of_dtypes(dtype: torch.dtype, **affine: torch.dtype | None) -> str | None:
    """Why programs do not serve these dtypes of x, weight and bias; None where they do."""
    if dtype not in SERVED_DTYPES:
        return f"x is {_shown(dtype)}; serves float16, bfloat16 and float32"
    for name, its_dtype in affine.items():
        if its_dtype not in (None, torch.float32, dtype):
            return f"{name} is {_shown(its_dtype)}; serves float32 and the dtype of x, {_shown(dtype)}"
    return None


def _shown(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
