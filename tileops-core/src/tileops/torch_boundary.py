"""Where a call meets PyTorch: the torch ops, and the calls that go through them.

An eager call on plain tensors never enters torch's dispatcher (`torch_guards.py`). Every other call (tracing,
modes, transforms, subclasses) is one node `torch.ops.tileops.<name>`, with the op's tensors and parameters as arguments.

A torch op is defined when it is first asked for. Its schema is read from the annotations of `forward` and of
the constructor, its name from the class: `LayerNormFwdOp` is `layer_norm`, and `acme.ops.RowOp` of somebody
else's is `acme__RowOp`.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import is_tensor_like  # pyright: ignore[reportUnknownVariableType]

from tileops.catalogue import IN_TREE_OPS, find_op
from tileops.errors import DeclarationError, InputError
from tileops.torch_schema import Route, TorchOp, route_of, schema_of, torch_op_name

__all__ = [
    "TorchOp",
    "call_through",
    "declare",
    "gradient_refusal",
    "note_written",
    "refuse_nested",
    "written_positions",
]

# Private names of torch, with `forward_ad._current_level` and `OpOverload.redispatch` below. A test names each.
_C: Final = cast("Any", torch._C)
_any_requires_grad: Final[Callable[..., bool]] = _C._any_requires_grad
_below_autograd: Final[Callable[[], Any]] = _C._AutoDispatchBelowAutograd
_after_autograd: Final[Any] = _C._after_autograd_keyset
_OpNamespace: Final[Any] = cast("Any", torch)._ops._OpNamespace
_forward_ad: Final = cast("Any", forward_ad)


def call_through(op: Any, tensors: Sequence[Any]) -> Any:
    """Call the torch op of `op` with these tensors and the op's parameters."""
    for tensor in tensors:
        if tensor is not None and not is_tensor_like(tensor):
            op.check(*tensors)  # says which argument it is
    route = _route_of(op)
    refuse_nested(route.arguments, tensors)
    if _owners.get(route.name) is not op.__class__:
        raise DeclarationError(
            f"torch.ops.tileops.{route.name} belongs to another class called {op.__class__.__qualname__}. If that one "
            "was defined after this op was made, make the op anew; if before, and with another schema, give this "
            "class another name"
        )
    torch_op = getattr(torch.ops.tileops, route.name).default
    absent = [None] * (len(route.arguments) - len(tensors))
    arguments = [*tensors, *absent, *[getattr(op, name) for name in route.parameters]]
    results = torch_op(*arguments) if op.target is None else torch_op(*arguments, op.target)
    if route.returned is None:
        return results
    returned = (results,) if len(route.returned) == 1 else results
    return tuple([returned[route.returned.index(at)] if at in route.returned else None for at in range(route.results)])


def _route_of(op: Any) -> Route:
    for route in op._routes:
        if all(getattr(op, name) == value for name, value in route.where):
            return route
    raise DeclarationError(f"no entry of {op.__class__.__qualname__}.torch_ops covers {op}")


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
    route = _route_of(op)
    return frozenset(at for at, name in enumerate(route.arguments) if name in route.writes)


def gradient_refusal(op: str) -> InputError:
    """The error of a call whose gradient is wanted, of an op that has no backward."""
    return InputError(
        f"a gradient is wanted (an argument requires grad) and {op} has no backward; call it under "
        "torch.no_grad(), or detach the arguments"
    )


# --------------------------------------------------------------------------------------------------- definitions

_library: Final = torch.library.Library("tileops", "FRAGMENT")
_lock = threading.RLock()  # not Final: a forked child gets a new one
_schemas: Final[dict[str, str]] = {}
_owners: Final[dict[str, Any]] = {}


def _after_fork_in_child() -> None:
    global _lock  # noqa: PLW0603 - nobody in the child can release the parent's lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def declare(cls: Any) -> None:
    """Enter an op class, when it is created. Nothing is defined and no annotation is read yet.

    A class made again (a reload, a cell run twice) takes its torch ops over where the schema is the same.
    """
    cls._routes = tuple(route_of(cls, suffix, part) for suffix, part in cls.torch_ops.items())
    with _lock:
        for route in cls._routes:
            if _schemas.get(route.name) in (None, _schema_or_none(cls, route)):
                _owners[route.name] = cls


def _schema_or_none(cls: Any, route: Route) -> str | None:
    """The class's schema, where one by this name is defined already: what a reload compares."""
    if route.name not in _schemas:
        return None
    try:
        return schema_of(cls, route)
    except DeclarationError:
        return "unreadable"


class _Namespace(_OpNamespace):
    """`torch.ops.tileops`, which defines an op when it is first asked for, also while dynamo traces.

    Threads that ask at once get one packet with one overload: torch's own namespace may make several, and its
    dispatcher keeps a borrowed pointer to one that is then freed.
    """

    __module__ = "torch._ops"  # which graphs write into the names of their nodes

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("__"):  # `__self__` and its like
            _define(name)
        with _lock:
            found = vars(self).get(name)
            return _OpNamespace.__getattr__(self, name) if found is None else found

    def __setattr__(self, name: str, value: Any) -> None:
        getattr(value, "default", None)  # the overload is made before another thread can see its packet
        _OpNamespace.__setattr__(self, name, value)


if not isinstance(torch.ops.tileops, _Namespace):
    cast("Any", torch.ops).tileops = _Namespace("tileops")


def _define(name: str) -> None:
    """Define the torch op called `name`, once, where some op class has it."""
    for op in IN_TREE_OPS:
        if name.startswith(torch_op_name("tileops", op)):
            find_op(op)
    with _lock:
        cls = _owners.get(name)
        if cls is None or name in _schemas:
            return
        schema = schema_of(cls, _named(cls, name))
        _schemas[name] = schema  # before: `define` asks this namespace whether it has such an op
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        # Each looks the class up by name when it runs, so that a reloaded one takes over.
        _library.impl(name, partial(_run, name), "CompositeExplicitAutograd")
        _library.impl(name, partial(_meta, name), "Meta")
        _library.impl(name, partial(_autograd, name), "Autograd", with_keyset=True)
        torch.library.register_vmap(f"tileops::{name}", partial(_each, name), lib=_library)


def _named(cls: Any, name: str) -> Route:
    return next(route for route in cls._routes if route.name == name)


def _run(name: str, *given: Any) -> Any:
    """The implementation, on every device: what the eager call does, selection included."""
    route, op = _rebuilt(name, given)
    return _returned(route, op._run(*given[: len(route.arguments)]))


def _meta(name: str, *given: Any) -> Any:
    """What comes back, without data: the checks of the eager call, then empty results."""
    route, op = _rebuilt(name, given)
    op.check(*given[: len(route.arguments)])
    return _returned(route, op.empty_results(*given[: len(route.arguments)]))


def _autograd(name: str, keys: Any, *given: Any) -> Any:
    """Refuse a wanted gradient or a tangent, which would be lost in silence; else go on below autograd."""
    cls = _owners[name]
    tensors = [one for one in given[: len(_named(cls, name).arguments)] if one is not None]
    if torch.is_grad_enabled() and _any_requires_grad(*tensors):
        raise gradient_refusal(cls.__name__)
    if _forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(one).tangent is not None for one in tensors):
        raise InputError(
            f"an argument has a tangent and {cls.__name__} has no forward-mode derivative; call it with primals"
        )
    with _below_autograd():
        return getattr(torch.ops.tileops, name).default.redispatch(keys & _after_autograd, *given)


def _each(name: str, info: Any, dims: Sequence[Any], *given: Any) -> Any:
    """Under vmap: one call for each sample."""
    cls = _owners[name]
    route = _named(cls, name)
    for argument, tensor, dim in zip(route.arguments, given, dims):
        if argument in route.writes and tensor is not None and dim is None:
            raise InputError(
                f"{argument} is written, once for each sample of a vmap: give it a batch dimension as well"
            )
    torch_op = getattr(torch.ops.tileops, name).default
    batched = [isinstance(one, Tensor) and dim is not None for one, dim in zip(given, dims)]
    samples = [
        torch_op(*(one.select(dim, i) if is_batched else one for one, dim, is_batched in zip(given, dims, batched)))
        for i in range(info.batch_size)
    ]
    if isinstance(samples[0], Tensor):
        return torch.stack(samples), 0
    results = tuple(torch.stack(one) for one in zip(*samples))
    return results, (0,) * len(results)


def _rebuilt(name: str, given: Sequence[Any]) -> tuple[Route, Any]:
    """The route and an op with these parameters. torch leaves out trailing arguments that have their default."""
    cls = _owners[name]
    route = _named(cls, name)
    values = [
        tuple(cast("Any", one)) if isinstance(one, (list, tuple)) else one for one in given[len(route.arguments) :]
    ]
    target = values[len(route.parameters)] if len(values) > len(route.parameters) else None
    parameters = (*zip(route.parameters, values), *route.where)
    if not any(isinstance(one, (torch.SymInt, torch.SymFloat)) for value in values for one in _flat(value)):
        return route, _built(cls, parameters, target)
    op = cls.__new__(cls)  # symbolic numbers of a trace: checked where the op was made, and unfit for a table
    vars(op).update(parameters, target=target)
    return route, op


@functools.lru_cache(maxsize=4096)
def _built(cls: Any, parameters: tuple[tuple[str, Any], ...], target: str | None) -> Any:
    given = dict(parameters)
    return cls(**given) if target is None else cls(**given, target=target)


def _flat(value: Any) -> Sequence[Any]:
    return cast("Sequence[Any]", value) if isinstance(value, tuple) else (value,)


def _returned(route: Route, results: Any) -> Any:
    """Of the op's results those that the torch op returns."""
    if route.returned is None:
        return results
    kept = [results[at] for at in route.returned]
    return tuple(kept) if len(kept) > 1 else kept[0]
