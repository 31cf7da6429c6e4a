"""How row kernels reach their programs, which take x and y as (rows, n) and affine tensors as (n,)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def launch_as_rows(launch: Callable[..., Any], n: int, x: Tensor, *affine: Tensor | None, y: Tensor) -> None:
    """Launch on views of tensors that have other axes. A view takes the host a microsecond, so callers ask first."""
    flat = [None if tensor is None else tensor.view(-1) for tensor in affine]
    launch(x.view(-1, n), *flat, y.view(-1, n))
