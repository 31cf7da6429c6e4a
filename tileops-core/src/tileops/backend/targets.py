"""Targets: a backend's name for a set of kernels that takes over whole ops."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tileops.backend.loading import load
from tileops.backend.registration import Builder, registry
from tileops.catalogue import meant
from tileops.errors import UnknownTargetError


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """What a builder learns of one input tensor. Holds no tensor.

    Args:
        device: Its device, with its index.
        dtype: Its dtype.
        shape: Its sizes, in elements.
    """

    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor | None) -> TensorSpec | None:
        """The spec of `tensor`; None for an absent input."""
        return None if tensor is None else cls(tensor.device, tensor.dtype, tuple(tensor.shape))


def registered_targets() -> tuple[str, ...]:
    """The names of all targets, sorted."""
    load()
    return tuple(sorted({builder.target for builder in registry().builders()}))


def builder_of(op: str, target: str) -> Builder:
    """The builder of `target` for the op called `op`; raises an `UnknownTargetError` that lists the known ones."""
    load()
    builders = registry().builders()
    found = next((builder for builder in builders if (builder.op, builder.target) == (op, target)), None)
    if found is not None:
        return found
    known = registered_targets()
    if target not in known:
        listed = ", ".join(known) or "none is registered"
        raise UnknownTargetError(f"{op}: no target is called {target!r}; known targets: {listed}{meant(target, known)}")
    served = ", ".join(sorted({builder.op for builder in builders if builder.target == target}))
    raise UnknownTargetError(f"target {target!r} has nothing for {op}; it takes over: {served}")
