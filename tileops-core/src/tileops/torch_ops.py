"""The torch ops: their definitions, and what torch's dispatcher runs for them.

A torch op is defined when it is first asked for. Its schema is read from the annotations of `forward` and of
the constructor, its name from the class: `LayerNormFwdOp` is `layer_norm`, and `acme.ops.RowOp` of somebody
else's is `acme__RowOp`.

Each has an inner one, `_layer_norm`, of the same schema: what the public one calls once autograd has seen the
call. It is what compiled graphs run, and torch never enters Python for autograd there.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tileops.autograd import tangent_refusal, with_gradient
from tileops.backend.loading import load
from tileops.catalogue import IN_TREE_OPS, find_op
from tileops.errors import DeclarationError, InputError
from tileops.sharding import dtensor_class, run_sharded
from tileops.torch_guards import PLAIN
from tileops.torch_inductor import have_inductor_launch
from tileops.torch_schema import (
    Route,
    from_torch,
    is_symbolic,
    route_named,
    route_of,
    schema_of,
    tags_of,
    to_torch,
    torch_op_name,
    values_of,
    with_absent,
    with_values,
    without_absent,
)

# Private names of torch, with `OpOverload.redispatch` and those of forward_ad below. A test names each.
_C: Final = cast("Any", torch._C)
_transforms: Final[Callable[[], bool]] = _C._are_functorch_transforms_active
_below_autograd: Final[Callable[[], Any]] = _C._AutoDispatchBelowAutograd
_after_autograd: Final[Any] = _C._after_autograd_keyset
_without_keys: Final[Callable[[Any], Any]] = _C._ExcludeDispatchKeyGuard
_key_set: Final[Callable[[Any], Any]] = _C.DispatchKeySet
_key: Final[Callable[[str], Any]] = _C._dispatch_key_parse
_excluded: Final[Callable[[str], bool]] = _C._dispatch_tls_is_dispatch_key_excluded
_forward_ad: Final = cast("Any", forward_ad)

_AUTOCAST: Final = ("cpu", "cuda", "hpu", "mps", "xla", "xpu")
"""Device types with an autocast key of their own."""

_IN_TREE: Final = {op: torch_op_name("tileops", op) for op in IN_TREE_OPS}
"""What the names of an in-tree op's torch ops begin with."""

_library: Final = torch.library.Library("tileops", "FRAGMENT")
_lock = threading.RLock()  # not Final: a forked child gets a new one
_schemas: Final[dict[str, str]] = {}
_owners: Final[dict[str, Any]] = {}
_unfinished: Final[set[str]] = set()
_sharded: Final[set[str]] = set()


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


def owner_of(name: str) -> Any:
    """The op class that the torch op called `name` belongs to; None where there is none."""
    return _owners.get(name)


def packet(namespace: Any, name: str, find: Callable[[Any, str], Any]) -> Any:
    """`torch.ops.tileops.<name>`, defined where it was not.

    Threads that ask at once get one packet with one overload: torch's own namespace may make several, and its
    dispatcher keeps a borrowed pointer to one that is then freed.
    """
    public = name if name in _owners else name.removeprefix("_")  # `__main____RowOp` begins with one of its own
    for op, begins in _IN_TREE.items():
        if public.startswith(begins):
            find_op(op)
    if public not in _owners:
        load()  # a backend may bring the op
    with _lock:
        if public in _unfinished:  # torch asks while we define, and whoever found it now would call past autograd
            raise AttributeError(f"torch.ops.tileops.{name} is being defined")
        _define(public)
        found: Any = namespace.__dict__.get(name)
        return find(namespace, name) if found is None else found


def _define(name: str) -> None:
    """Define the torch op called `name` and its inner one, once, where some op class has it."""
    cls = _owners.get(name)
    if cls is None or name in _schemas:
        return
    route = route_named(cls, name)
    schema = schema_of(cls, route)
    _unfinished.add(name)
    try:
        _register(name, schema, route)
    finally:
        _unfinished.discard(name)
    _schemas[name] = schema
    for defined in (name, f"_{name}"):  # at the end: it puts the torch op where every thread finds it
        torch.library.register_vmap(f"tileops::{defined}", partial(_each, name, defined), lib=_library)


def _register(name: str, schema: str, route: Route) -> None:
    """Give torch both torch ops, with every kernel that they have but the rule for vmap."""
    tags = tags_of(route)
    # Each kernel looks the class up by name when it runs, so that a reloaded one takes over.
    for defined in (name, f"_{name}"):
        _library.define(f"{'_' * (defined != name)}{schema}", tags=tags)
        _library.impl(defined, _implementation(name, len(route.arguments)), "CompositeExplicitAutograd")
        _library.impl(defined, partial(_meta, name), "Meta")
    _library.impl(name, partial(_autograd, name), "Autograd", with_keyset=True)
    _library.impl(f"_{name}", torch.library.fallthrough_kernel, "Autograd")
    for device, dtype in route.autocast:
        key = f"Autocast{device.upper() if device in _AUTOCAST else 'PrivateUse1'}"
        _library.impl(name, partial(_autocast, name, device, dtype, _key_set(_key(key))), key)


# ------------------------------------------------------------------------------------------------------ kernels


def _implementation(name: str, count: int) -> Callable[..., Any]:
    """What the torch op runs on every device: what the eager call does, selection included.

    The op of the latest parameters is at hand: finding it again takes a sixth of an `F.layer_norm` on a CPU, and a
    model has few. The first `count` arguments are tensors; torch leaves out the last ones that have their default.
    """
    latest: tuple[Any, Any, Any] = (None, None, None)

    def run(*given: Any) -> Any:
        nonlocal latest
        parameters, cls = given[count:], _owners[name]
        known, route, op = latest
        if parameters != known or op.__class__ is not cls:
            route, op = with_values(cls, name, values_of(parameters))  # real numbers: no trace runs this
            latest = parameters, route, op
        tensors = with_absent(route, given[:count]) if route.absent else given[:count]
        results = op._repeated(tensors)
        if results is None:  # what a mode or a subclass runs is like no call outside it
            results = op._run(*tensors) if _excluded("PythonTLSSnapshot") else op._noted(tensors)
        return to_torch(route, results) if route.converts else results

    return run


def launcher(defined: str, *parameters: Any, target: str | None = None) -> Callable[..., Any]:
    """What a program of inductor's calls in place of a torch op with these parameters (`torch_inductor.py`).

    It takes the tensors. A call that is like an earlier one goes to its entry; any other is a call of the torch op.
    """
    torch_op = getattr(torch.ops.tileops, defined).default
    name = defined if defined in _owners else defined.removeprefix("_")
    given = parameters if target is None else (*parameters, target)
    route, op = with_values(_owners[name], name, values_of(given))

    def launch(*tensors: Any) -> Any:
        arguments = with_absent(route, tensors) if route.absent else tensors
        results = op._repeated(arguments) if _owners[name] is op.__class__ else None
        if results is None:
            return torch_op(*tensors, *given)
        return to_torch(route, results) if route.converts else results

    return launch


def _meta(name: str, *given: Any) -> Any:
    """What comes back, without data: the checks of the eager call, then empty results."""
    have_inductor_launch(name, len(route_named(_owners[name], name).arguments))
    route, op = _rebuilt(name, given)
    tensors = with_absent(route, given[: len(route.arguments)])
    op.check(*tensors)
    return to_torch(route, op.empty_results(*tensors))


def serve_dtensors(name: str) -> None:
    """Register the rule of the torch op's class for DTensors, once, where this process uses them.

    Every call asks that torch must see: it may be the first since the process does.
    """
    dtensor = dtensor_class()
    if dtensor is None or name in _sharded or _owners[name].sharding is None:
        return
    with _lock:
        for defined in () if name in _sharded else (name, f"_{name}"):
            rule = partial(_run_sharded, name)
            torch.library.register_torch_dispatch(f"tileops::{defined}", dtensor, rule, lib=_library)
        _sharded.add(name)


def _run_sharded(name: str, dtensor: Any, torch_op: Any, types: Any, given: Sequence[Any], named: Any) -> Any:
    """The call on DTensors. Torch gives it the class, the torch op and its arguments."""
    del types, named
    route, op = _rebuilt(name, given)
    count = len(route.arguments)

    def run(*tensors: Any) -> Sequence[Any]:
        results = from_torch(route, op, tensors, torch_op(*without_absent(route, tensors), *given[count:]))
        return results if route.results > 1 else (results,)

    results = run_sharded(op, dtensor, with_absent(route, given[:count]), run)
    return to_torch(route, results if route.results > 1 else results[0])


def _autograd(name: str, keys: Any, *given: Any) -> Any:
    """Record the call where a gradient is wanted; refuse a tangent, which would be lost; go on below autograd."""
    serve_dtensors(name)
    cls = _owners[name]
    count = len(route_named(cls, name).arguments)
    have_inductor_launch(name, count)
    present = [one for one in given[:count] if one is not None]
    if _forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(one).tangent is not None for one in present):
        raise tangent_refusal(cls.__name__)
    transformed = _transforms()
    torch_op = getattr(torch.ops.tileops, name if transformed else f"_{name}").default
    # Under a transform the levels below must meet the public op again.
    below = partial(torch_op.redispatch, keys & _after_autograd) if transformed else torch_op
    if torch.is_grad_enabled() and any(one.requires_grad for one in present):
        return _recorded(name, below, transformed, given)
    with _below_autograd():
        return below(*given)


def _recorded(name: str, below: Callable[..., Any], transformed: bool, given: Sequence[Any]) -> Any:
    """The call with its backward."""
    route, op = _rebuilt(name, given)
    count = len(route.arguments)

    def run(*tensors: Any) -> Any:
        with contextlib.ExitStack() as stack:
            if transformed:  # levels below record for themselves, and `forward` of an autograd.Function turns it off
                stack.enter_context(torch.enable_grad())
                stack.enter_context(_forward_ad._set_fwd_grad_enabled(True))  # noqa: FBT003 - torch's own signature
            stack.enter_context(_below_autograd())
            return from_torch(route, op, tensors, below(*without_absent(route, tensors), *given[count:]))

    tensors = with_absent(route, given[:count])
    if not transformed:
        real = all(type(one) in PLAIN and (one is None or one.device.type != "meta") for one in tensors)
        return to_torch(route, with_gradient(op, tensors, run, looks_up=real))
    from torch._functorch.utils import enable_single_level_autograd_function

    with enable_single_level_autograd_function():
        return to_torch(route, with_gradient(op, tensors, run, looks_up=False))


def _autocast(name: str, device: str, dtype: torch.dtype, keys: Any, *given: Any) -> Any:
    """Under autocast: floating-point arguments in the dtype that torch's own table gives them."""
    cast_ones = [
        one.to(dtype)
        if isinstance(one, Tensor)
        and one.is_floating_point()
        and one.device.type == device
        and one.dtype is not torch.float64
        else one
        for one in given
    ]
    with _without_keys(keys):
        return getattr(torch.ops.tileops, name).default(*cast_ones)


def _each(name: str, defined: str, info: Any, dims: Sequence[Any], *given: Any) -> Any:
    """Under vmap: one call for each sample."""
    cls = _owners[name]
    route = route_named(cls, name)
    for argument, tensor, dim in zip(route.arguments, given, dims):
        if argument in route.writes and tensor is not None and dim is None:
            raise InputError(
                f"{argument} is written, once for each sample of a vmap: give it a batch dimension as well"
            )
    torch_op = getattr(torch.ops.tileops, defined).default
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
    """The route and an op with these parameters, some of which a trace may have made symbolic."""
    cls = _owners[name]
    values = values_of(given[len(route_named(cls, name).arguments) :])
    make = with_values.__wrapped__ if is_symbolic(values) else with_values
    return make(cls, name, values)
