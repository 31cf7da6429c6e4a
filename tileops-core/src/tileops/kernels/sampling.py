"""Tensors for samples of calls: the awkward values that every kernel must get right."""

from __future__ import annotations

import torch
from torch import Tensor

AWKWARD_ROWS = (1, 3, 8, 133)
"""Row counts that do not divide into blocks: one, a prime below a warp's share, a full group, more than an SM
each."""


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    """Standard normal values, drawn on the CPU in float32 so that a seed means the same on every device."""
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(device=device, dtype=dtype)


def with_large_mean(x: Tensor) -> Tensor:
    """`x` with its first half of rows moved far from zero: as far as its dtype resolves a deviation of one.

    A kernel that computes E[x²] − E[x]² on raw values fails on those rows.
    """
    mean = {torch.float32: 1000.0, torch.float64: 1000.0, torch.float16: 100.0, torch.bfloat16: 8.0}[x.dtype]
    moved = x.clone()
    moved[: (x.shape[0] + 1) // 2] += mean
    return moved


def affine(
    size: int, dtype: torch.dtype | None, device: torch.device, generator: torch.Generator, *, around: float
) -> Tensor | None:
    """A weight (around 1) or a bias (around 0) of `size` elements, or None."""
    return None if dtype is None else normal((size,), dtype, device, generator) * 0.25 + around


def in_dtype(choice: object, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype that a sample names: x's where it says "x", a given one, or none."""
    return dtype if choice == "x" else choice if isinstance(choice, torch.dtype) else None
