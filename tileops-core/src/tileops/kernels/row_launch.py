"""How row kernels reach their programs, which take x and y as (rows, n) and affine tensors as (n,)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch import Tensor

Launch = Callable[..., Any]
"""A compiled program: takes x, the affine tensors and y."""

# Private names of torch. The first is what code that torch compiled allocates with: on an H200 it takes the host
# 1.2 µs where `empty_like` takes 1.8.
_guards: Final = getattr(getattr(cast("Any", torch._C), "_dynamo", None), "guards", None)
_empty_strided_cuda: Final[Any] = getattr(_guards, "_empty_strided_cuda", None)
_current_device: Final[Any] = getattr(torch._C, "_cuda_getDevice", None)


def launch_rows(launch: Launch, n: int, x: Tensor, *affine: Tensor | None) -> Tensor:
    """Launch on x as (rows, n), and return y with x's axes."""
    y = torch.empty_like(x)
    if _are_rows(n, x, affine):
        launch(x, *affine, y)
    else:
        flat = [None if tensor is None else tensor.view(-1) for tensor in affine]
        launch(x.view(-1, n), *flat, y.view(-1, n))
    return y


def row_launch(launch: Launch, n: int, x: Tensor, *affine: Tensor | None) -> Callable[..., Tensor] | None:
    """`launch_rows` for tensors that differ from these in the number of rows alone, without what that asks.

    Returns:
        A function of x and the affine tensors; None where there is none for tensors like these.
    """
    if not _are_rows(n, x, affine) or x.device.type != "cuda" or None in (_empty_strided_cuda, _current_device):
        return None
    arguments = ", ".join(["x", *(f"affine_{at}" for at in range(len(affine)))])
    y = "empty((x.shape[0], n), strides, dtype)"
    if torch.cuda.device_count() > 1:  # it allocates on the current device
        y += " if current_device() == index else empty_like(x)"
    made: dict[str, Any] = {
        "launch": launch,
        "empty": _empty_strided_cuda,
        "current_device": _current_device,
        "empty_like": torch.empty_like,
        "n": n,
        "strides": (n, 1),
        "dtype": x.dtype,
        "index": x.device.index,
        "__name__": __name__,
    }
    # Written out for each number of tensors: to pass them on as a tuple costs a hundredth of a short call.
    exec(f"def run({arguments}):\n    y = {y}\n    launch({arguments}, y)\n    return y", made)  # noqa: S102
    return made["run"]


def _are_rows(n: int, x: Tensor, affine: tuple[Tensor | None, ...]) -> bool:
    """Whether the program takes these tensors as they are. A view takes the host a microsecond."""
    return x.ndim == 2 and x.shape[1] == n and all(tensor is None or tensor.ndim == 1 for tensor in affine)
