"""What a target's kernel returns, compared with what its op promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tileops.backend.units import Builder
from tileops.errors import BackendError
from tileops.ops.checks import shown_dtype, shown_shape, storage_of


def settled(op: Any, tensors: Sequence[Tensor | None], results: Any, builder: Builder) -> Any:
    """The results in the memory order that the op promises: themselves where they have it, else copies.

    Args:
        op: The op.
        tensors: Its arguments as they came.
        results: What the target's kernel returned for them.
        builder: What built the kernel.

    Raises:
        BackendError: A result is missing, has another shape, dtype or device than the op's, or lies in the memory of
            an argument.
    """
    promised = op.empty_results(*(None if tensor is None else _without_data(tensor) for tensor in tensors))
    wanted = _as_tuple(promised)
    if isinstance(results, Tensor) and sum(one is not None for one in wanted) == 1 < len(wanted):
        results = tuple(None if one is None else results for one in wanted)  # the only one that this call has
    given = _as_tuple(results)
    if isinstance(results, tuple) != isinstance(promised, tuple) or len(given) != len(wanted):
        raise _wrong(builder, f"returned {_shown(results)}; it must return {', '.join(op.results[: len(wanted)])}")
    for name, one, want in zip(op.results, given, wanted):
        _check(op, tensors, name, one, want, builder)
    laid_out = tuple(_laid_out(one, want) for one, want in zip(given, wanted))
    if all(one is other for one, other in zip(given, laid_out)):
        return results
    return laid_out if isinstance(results, tuple) else laid_out[0]


def _without_data(tensor: Tensor) -> Tensor:
    """A meta tensor like `tensor`, strides included."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", results) if isinstance(results, tuple) else (results,)


def _check(
    op: Any, tensors: Sequence[Tensor | None], name: str, one: Any, want: Tensor | None, builder: Builder
) -> None:
    device = cast("Tensor", tensors[0]).device
    if want is None and one is None:
        return
    if want is None or not isinstance(one, Tensor):
        promised = "None" if want is None else f"a tensor, {_described(want, device)}"
        raise _wrong(builder, f"returned {name} as {_shown(one)}; it must be {promised}")
    if (one.shape, one.dtype, one.device) != (want.shape, want.dtype, device):
        raise _wrong(
            builder, f"returned {name} as {_described(one, one.device)}; it must be {_described(want, device)}"
        )
    for argument, tensor in zip(op.argument_names, tensors):
        if tensor is not None and storage_of(one) == storage_of(tensor):
            raise _wrong(builder, f"returned {name} in the memory of {argument}; it must be new")


def _laid_out(one: Tensor | None, want: Tensor | None) -> Tensor | None:
    """A result with the strides that are promised; strides of axes of one element mean nothing."""
    if one is None or want is None or one.numel() == 0:
        return one
    if all(size == 1 or had == due for size, had, due in zip(one.shape, one.stride(), want.stride())):
        return one
    return torch.empty_strided(want.shape, want.stride(), dtype=one.dtype, device=one.device).copy_(one)


def _described(tensor: Tensor, device: torch.device) -> str:
    return f"{shown_dtype(tensor.dtype)} of shape {shown_shape(tensor.shape)} on {device}"


def _shown(value: Any) -> str:
    """A value as the message shows it: a tensor or a tuple by its kind, which its data would hide."""
    if isinstance(value, (tuple, list)):
        values = cast("Sequence[Any]", value)
        return f"a {type(values).__name__} of {len(values)}"
    return "a tensor" if isinstance(value, Tensor) else repr(value)


def _wrong(builder: Builder, what: str) -> BackendError:
    shipped = builder.owner.distribution or builder.owner.name
    return BackendError(f"{builder.op}: the kernel of target {builder.target!r} ({shipped}) {what}")
