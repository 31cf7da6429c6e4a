"""Kernels of targets: what a builder makes for the specs and parameters of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tileops.backend.targets import TensorSpec, builder_of
from tileops.errors import BuildError
from tileops.ops.checks import contiguous
from tileops.torch_boundary import note_written


def specs_of(tensors: Sequence[Tensor | None]) -> tuple[TensorSpec | None, ...]:
    """What a builder is asked with, in signature order."""
    return tuple(TensorSpec.of(tensor) for tensor in tensors)


def build_target_kernel(
    op: str, target: str, specs: Sequence[TensorSpec | None], params: Mapping[str, Any]
) -> Callable[..., Any]:
    """What `target` runs in place of the op called `op`.

    Raises:
        UnknownTargetError: Nobody registered the target, or it has nothing for the op.
        BuildError: Its builder failed. Nothing is stored; the next call asks again.
    """
    builder = builder_of(op, target)
    try:
        kernel = builder.build(*specs, **params)
    except Exception as error:
        shipped = builder.owner.distribution or builder.owner.name
        raise BuildError(
            f"{op}: target {target!r} ({shipped}) could not build its kernel: {type(error).__name__}: {error}"
        ) from error
    if not callable(kernel):
        raise BuildError(f"{op}: the builder of target {target!r} returned {kernel!r}, which nobody can call")
    return kernel


def run_target_kernel(kernel: Callable[..., Any], tensors: Sequence[Tensor | None], writes: frozenset[int]) -> Any:
    """Run a target's kernel: inputs arrive contiguous and aligned, arguments that it may write as they are."""
    arguments = (
        tensor if tensor is None or position in writes else contiguous(tensor)
        for position, tensor in enumerate(tensors)
    )
    results = kernel(*arguments)
    note_written(*(tensors[position] for position in writes))
    return results
