"""Ops on DTensors: each process computes on its shard.

An op class says in `sharding` how. The rule is registered with torch when an op meets a program that uses
`torch.distributed.tensor`, which is imported for nobody else.

The rules stand in place of DTensor's own dispatch. Its `register_sharding` cannot say what batch norm needs, and
remembers a decision by the tensors alone: a call that normalises other axes of the same x would get the old one.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from tileops.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

Run = Callable[..., Sequence[Any]]
"""An op on plain tensors, in this process alone; returns its results, None for those that a call does not want."""


class ShardingRule(Protocol):
    """How an op runs on DTensors."""

    def __call__(self, op: Any, run: Run, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return the results of a call, DTensors or None.

        Args:
            op: The op.
            run: The op on this process's tensors.
            tensors: The arguments: DTensors of one mesh, or None.
        """
        ...


@dataclasses.dataclass(frozen=True)
class ShardByShard:
    """The rule of an op that computes each shard along some axes without the others.

    Shards along those axes stay where they are. Along any other axis x is gathered first.

    Args:
        axes: The axes that x may be sharded along, from the op and the number of x's axes.
        sharded: The arguments that have x's shards; every other is replicated.
        sums: The results that are sums over all shards; every other has x's shards.
    """

    axes: Callable[[Any, int], Collection[int]]
    sharded: tuple[str, ...] = ("x",)
    sums: tuple[str, ...] = ()

    def __call__(self, op: Any, run: Run, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """Run the op on this process's shard."""
        named = dict(zip(op.argument_names, tensors))
        x = named["x"]
        placements = placements_along(x, self.axes(op, x.dim()))
        results = run(*(
            shard_of(one, placements) if name in self.sharded else replicated(one) for name, one in named.items()
        ))  # fmt: skip
        return tuple(
            None if result is None
            else distributed(result, x, pending(placements)) if name in self.sums
            else distributed(result, x, placements, shape=x.shape)
            for name, result in zip(op.results, results)
        )  # fmt: skip


def placements_along(x: DTensor, axes: Collection[int]) -> list[Placement]:
    """Where x is when it is sharded along `axes` alone.

    It stays as it is, but for shards along other axes, which are gathered, and pending sums, which are carried out:
    by a scatter along the first of `axes` that is not sharded yet, where there is one.
    """
    from torch.distributed.tensor import Replicate, Shard

    taken = [getattr(one, "dim", None) for one in x.placements]
    free = [axis for axis in axes if axis not in taken]

    def place(one: Any) -> Placement:
        if one.is_partial():
            return Shard(free.pop(0)) if free else Replicate()
        return one if one.is_replicate() or one.dim in axes else Replicate()

    return [place(one) for one in x.placements]


def pending(placements: Sequence[Placement]) -> list[Placement]:
    """The placements of a sum over shards that are placed so, of which each process has its own share."""
    from torch.distributed.tensor import Partial, Replicate

    return [Replicate() if one.is_replicate() else Partial() for one in placements]


def everywhere(mesh: Any) -> list[Placement]:
    """The placements of a tensor that every process holds all of."""
    from torch.distributed.tensor import Replicate

    return [Replicate()] * mesh.ndim


def shard_of(tensor: Any, placements: Sequence[Placement]) -> Any:
    """This process's shard of a DTensor, placed so; None for None."""
    if tensor is None:
        return None
    if list(tensor.placements) != list(placements):
        # What requires grad would be recorded; an inference tensor, which does not, cannot be detached.
        tensor = tensor.detach() if tensor.requires_grad else tensor
        tensor = tensor.redistribute(tensor.device_mesh, placements)
    return tensor.to_local()


def replicated(tensor: Any) -> Any:
    """All of a DTensor; None for None."""
    return None if tensor is None else shard_of(tensor, everywhere(tensor.device_mesh))


def distributed(
    local: Tensor, like: DTensor, placements: Sequence[Placement], *, shape: torch.Size | None = None
) -> DTensor:
    """The DTensor that this process holds `local` of.

    Args:
        local: What this process holds.
        like: A DTensor on the same mesh; where `local` is not contiguous, one with its strides.
        placements: Where the DTensor is.
        shape: Its shape; None where that is the shape of `local`.
    """
    from torch.distributed.tensor import DTensor

    sizes = local.shape if shape is None else shape
    strides = contiguous_strides(sizes) if local.is_contiguous() else like.stride()
    return DTensor.from_local(local, like.device_mesh, placements, run_check=False, shape=sizes, stride=strides)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))


# ------------------------------------------------------------------------------------------------- for the torch ops


def dtensor_class() -> Any:
    """The class DTensor; None in a process that does not use it."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def run_sharded(op: Any, dtensor: type[Any], tensors: Sequence[Any], run: Run) -> Sequence[Any]:
    """The results of a call on DTensors, by the rule of the op.

    Raises:
        InputError: An argument is no DTensor, or is on another mesh than the first that is one.
    """
    given = [(name, tensor) for name, tensor in zip(op.argument_names, tensors) if tensor is not None]
    first, mesh = next((name, tensor.device_mesh) for name, tensor in given if isinstance(tensor, dtensor))
    for name, tensor in given:
        if not isinstance(tensor, dtensor):
            raise InputError(
                f"{name} is a plain tensor and {first} a DTensor; place both on one mesh: "
                f"distribute_tensor({name}, mesh)"
            )
        if tensor.device_mesh != mesh:
            raise InputError(f"{name} is on {tensor.device_mesh} and {first} on {mesh}; place both on one mesh")
    rule: ShardingRule = op.__class__.sharding
    with torch.no_grad():  # what moves here needs no gradient of its own: the op's backward has a rule, too
        return rule(op, run, tensors)
