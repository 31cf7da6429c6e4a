"""What the backward interfaces share: which gradients a reference returns, and kernels that are their reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor


def wanted_gradients(call: Any, x: Tensor, gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients that a call wants; None in place of the others.

    They have the call's dtypes where x has its dtype; else they stay in the precision of x.
    """
    dtypes = (call.dtype, call.weight_dtype, getattr(call, "bias_dtype", None))
    kept = zip(gradients, call.need, dtypes if x.dtype is call.dtype else (x.dtype,) * len(gradients))
    return tuple(gradient.to(dtype) if needed else None for gradient, needed, dtype in kept)


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
