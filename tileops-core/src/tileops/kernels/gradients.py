"""What the backward interfaces share: which gradients a reference returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def wanted_gradients(call: Any, x: Tensor, gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients that a call wants; None in place of the others.

    They have the call's dtypes where x has its dtype; else they stay in the precision of x.
    """
    dtypes = (call.dtype, call.weight_dtype, getattr(call, "bias_dtype", None))
    kept = zip(gradients, call.need, dtypes if x.dtype is call.dtype else (x.dtype,) * len(gradients))
    return tuple(gradient.to(dtype) if needed else None for gradient, needed, dtype in kept)
