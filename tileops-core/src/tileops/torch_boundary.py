"""Where a call meets PyTorch: the calls that go through its dispatcher.

An eager call on plain tensors never enters torch's dispatcher (`torch_guards.py`). Every other call (tracing,
modes, transforms, subclasses) is one node `torch.ops.tileops.<name>` (`torch_ops.py`), with the op's tensors and
parameters as arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import is_tensor_like  # pyright: ignore[reportUnknownVariableType]

from tileops.autograd import with_gradient
from tileops.errors import DeclarationError, InputError
from tileops.torch_ops import declare, owner_of, serve_dtensors
from tileops.torch_schema import Route, TorchOp, from_torch, without_absent

__all__ = [
    "TorchOp",
    "call_through",
    "declare",
    "note_written",
    "refuse_nested",
    "with_gradient",
    "written_positions",
]


def call_through(op: Any, tensors: Sequence[Any]) -> Any:
    """Call the torch op of `op` with these tensors and the op's parameters."""
    for tensor in tensors:
        if tensor is not None and not is_tensor_like(tensor):
            op.check(*tensors)  # says which argument it is
    route = _route_of(op, tensors)
    tensors = without_absent(route, tensors)
    refuse_nested(route.arguments, tensors)
    if owner_of(route.name) is not op.__class__:
        raise DeclarationError(
            f"torch.ops.tileops.{route.name} belongs to another class called {op.__class__.__qualname__}. If that one "
            "was defined after this op was made, make the op anew; if before, and with another schema, give this "
            "class another name"
        )
    torch_op = getattr(torch.ops.tileops, route.name).default
    if not is_dynamo_compiling():
        serve_dtensors(route.name)
    absent = [None] * (len(route.arguments) - len(tensors))
    arguments = [*tensors, *absent, *[getattr(op, name) for name in route.parameters]]
    results = torch_op(*arguments) if op.target is None else torch_op(*arguments, op.target)
    return from_torch(route, op, tensors, results)


def _route_of(op: Any, tensors: Sequence[Any]) -> Route:
    for route in _routes_of(op):
        if all(one is None or at not in route.absent for at, one in enumerate(tensors)):
            return route
    raise DeclarationError(f"no entry of {op.__class__.__qualname__}.torch_ops covers {op}")


def _routes_of(op: Any) -> list[Route]:
    """The routes of calls of `op`, whatever their tensors."""
    return [route for route in op._routes if all(getattr(op, name) == value for name, value in route.where)]


def refuse_nested(names: Sequence[str], tensors: Sequence[Any]) -> None:
    """Refuse a nested tensor, which has no shape. A plain call asks only when a check failed on that."""
    for name, tensor in zip(names, tensors):
        if isinstance(tensor, Tensor) and tensor.is_nested:
            raise InputError(f"{name} is a nested tensor; give each of its parts by itself: {name}.unbind()") from None


def note_written(*tensors: Tensor | None) -> None:
    """Tell autograd that a kernel wrote these tensors, which it cannot see where the kernel takes pointers."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if tensor is not None])


def written_positions(op: Any) -> frozenset[int]:
    """Which of the arguments calls of `op` write."""
    writes = {name for route in _routes_of(op) for name in route.writes}
    return frozenset(at for at, name in enumerate(op.argument_names) if name in writes)
