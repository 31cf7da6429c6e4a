"""What the torch kernels of `(N, C, *spatial)` share."""

from __future__ import annotations

from torch import Tensor

CHANNELS = 1
"""The axis of the channels."""


def per_channel(values: Tensor, x: Tensor) -> Tensor:
    """A `(C,)` tensor shaped to broadcast along the channels of x."""
    return values.view(-1, *[1] * (x.dim() - CHANNELS - 1))


def scaled_and_shifted(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`y * weight + bias` for each channel."""
    y = y if weight is None else y * per_channel(weight.to(y.dtype), y)
    return y if bias is None else y + per_channel(bias.to(y.dtype), y)


def all_but_channels(x: Tensor) -> list[int]:
    """The axes that the values of a channel lie along."""
    return [axis for axis in range(x.dim()) if axis != CHANNELS]
