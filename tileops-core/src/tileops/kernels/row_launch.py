"""How row kernels reach their programs, which take rows as (rows, n) and affine tensors as (n,)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor

Launch = Callable[..., Any]
"""A compiled program: takes rows, affine tensors, rows to fill, and eps."""

# Private names of torch. The first is what code that torch compiled allocates with: on an H200 it takes the host
# 1.2 µs where `empty_like` takes 1.8.
_guards: Final = getattr(getattr(cast("Any", torch._C), "_dynamo", None), "guards", None)
_empty_strided_cuda: Final[Any] = getattr(_guards, "_empty_strided_cuda", None)
_current_device: Final[Any] = getattr(torch._C, "_cuda_getDevice", None)


def launch_rows(launch: Launch, n: int, rows: Sequence[Tensor], affine: Sequence[Tensor | None], eps: float) -> Any:
    """Launch on `rows`, each as (rows, n), `affine`, each as (n,) or None, and eps.

    Returns:
        What it fills: for each tensor of `rows` one like it; of one, the tensor itself.
    """
    filled = tuple([torch.empty_like(one) for one in rows])
    if _are_flat(n, rows, affine):
        launch(*rows, *affine, *filled, eps)
    else:
        flat = [None if tensor is None else tensor.view(-1) for tensor in affine]
        launch(*[one.view(-1, n) for one in rows], *flat, *[one.view(-1, n) for one in filled], eps)
    return filled[0] if len(filled) == 1 else filled


def row_launch(
    launch: Launch, n: int, rows: Sequence[Tensor], affine: Sequence[Tensor | None], eps: float
) -> Callable[..., Any] | None:
    """`launch_rows` for tensors that differ from these in the number of rows alone, without what that asks.

    Returns:
        A function of the tensors, one argument each; None where there is none for tensors like these.
    """
    x = rows[0]
    if not _are_flat(n, rows, affine) or x.device.type != "cuda" or None in (_empty_strided_cuda, _current_device):
        return None
    arguments = ", ".join([f"argument_{at}" for at in range(len(rows) + len(affine))])
    filled = ", ".join([f"filled_{at}" for at in range(len(rows))])
    fill = "empty((argument_0.shape[0], n), strides, dtype)"
    if torch.cuda.device_count() > 1:  # it allocates on the current device
        fill += " if current_device() == index else empty_like(argument_0)"
    made: dict[str, Any] = {
        "launch": launch,
        "empty": _empty_strided_cuda,
        "current_device": _current_device,
        "empty_like": torch.empty_like,
        "n": n,
        "eps": eps,
        "strides": (n, 1),
        "dtype": x.dtype,
        "index": x.device.index,
        "__name__": __name__,
    }
    # Written out for each number of tensors: to pass them on as a tuple costs a hundredth of a short call.
    lines = [f"def run({arguments}):", *[f"filled_{at} = {fill}" for at in range(len(rows))]]
    exec("\n    ".join([*lines, f"launch({arguments}, {filled}, eps)", f"return {filled}"]), made)  # noqa: S102
    return made["run"]


def _are_flat(n: int, rows: Sequence[Tensor], affine: Sequence[Tensor | None]) -> bool:
    """Whether the program takes these tensors as they are. A view takes the host a microsecond."""
    x = rows[0]
    return x.ndim == 2 and x.shape[1] == n and all(tensor is None or tensor.ndim == 1 for tensor in affine)
