"""A target that takes over one whole op, for whoever names it: `RMSNormFwdOp(…, target="example")`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from tileops.backend import Declined, TensorSpec
from torch import Tensor

from tileops_backend_example.torch_common import refusal_of_dtype


def build_rms_norm(
    x: TensorSpec, weight: TensorSpec | None, *, normalized_shape: Sequence[int], eps: float | None
) -> Callable[..., Tensor]:
    """Build RMS norm for inputs of these specs: called once for equal specs and parameters.

    Args:
        x: Device, dtype and shape of the input.
        weight: Likewise; None where the call gives none.
        normalized_shape: The op's parameter.
        eps: Likewise.

    Returns:
        A function of the op's tensors that returns the op's result.

    Raises:
        Declined: torch does not compute in x's dtype.
    """
    del weight  # it is brought to x's dtype
    reason = refusal_of_dtype(x.dtype)
    if reason is not None:
        raise Declined(reason)

    def run(x: Tensor, weight: Tensor | None) -> Tensor:
        same = None if weight is None else weight.to(x.dtype)
        return F.rms_norm(x, tuple(normalized_shape), same, eps)

    return run
