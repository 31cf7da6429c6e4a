"""Gradients by an interface's reference: for a backward that has no kernel of its own yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor


def gradients_by_reference(
    kernel: Any, dtypes: Sequence[torch.dtype | None], grad: Tensor, x: Tensor, *beside: Tensor | None
) -> tuple[Tensor | None, ...]:
    """What a backward kernel returns, by the reference of its interface on float32 tensors.

    Args:
        kernel: The kernel.
        dtypes: Of each gradient beside that of x.
        grad: The gradient of the output.
        x: The input. Its gradient has its dtype and memory order.
        beside: The other arguments of the kernel.
    """
    wide = [None if tensor is None else tensor.float() for tensor in (grad, x, *beside)]
    grad_x, *others = cast("tuple[Tensor | None, ...]", kernel.reference(kernel.call, *wide))
    rounded = [None if one is None else one.to(dtype) for one, dtype in zip(others, dtypes)]
    return None if grad_x is None else torch.empty_like(x).copy_(grad_x), *rounded
