"""Gradients: what a call of an op leaves for its backward, and the backward.

An op class that names a backward op is differentiable. Its backward is a call of that op, so it selects a kernel
like any call; a backward op's own gradient is its formula in plain torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from tileops.backend.loading import load
from tileops.backend.registration import registry, when_registry_changes
from tileops.errors import DeclarationError, InputError
from tileops.scopes import Scope, active, in_force
from tileops.torch_schema import names_of, op_with


class _Plan(NamedTuple):
    """How a call of an op becomes a call of its backward op: positions among the op's arguments.

    Args:
        arguments: Their names.
        gradients: Those that have a gradient, in the order of the backward op's results.
        saved: What the backward op takes beside the gradient; counted past the arguments, a result. None where a
            name is none of this op's: then its `saved` is not inherited.
        requested: Those that the backward op's call spec is made of.
        shared: Parameters that the backward op has too.
        dtypes: The parameters of the backward op that are dtypes of arguments.
        typed: Those arguments.
    """

    arguments: tuple[str, ...]
    gradients: tuple[int, ...]
    saved: tuple[int, ...] | None
    requested: tuple[int, ...]
    shared: tuple[str, ...]
    dtypes: tuple[str, ...]
    typed: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def _plan(cls: Any) -> _Plan:
    """Read from the names."""
    arguments, parameters = names_of(cls.forward), names_of(cls.__init__)
    known, taken = (*arguments, *cls.results), names_of(cls.backward.forward)[1:]
    own = [name for name in names_of(cls.backward.__init__) if name not in ("need", "target")]
    dtypes = tuple(name for name in own if name not in parameters)
    try:
        return _Plan(
            arguments=arguments,
            gradients=tuple(arguments.index(name.removeprefix("grad_")) for name in cls.backward.results),
            saved=tuple(map(known.index, taken)) if set(taken) <= set(known) else None,
            requested=tuple(map(arguments.index, names_of(cls.backward.request))),
            shared=tuple(name for name in own if name in parameters),
            dtypes=dtypes,
            typed=tuple(arguments.index(name.removesuffix("_dtype")) for name in dtypes),
        )
    except ValueError as unknown:
        raise DeclarationError(
            f"{cls.backward.__qualname__} is no backward of {cls.__qualname__}, which takes "
            f"{', '.join(arguments)}: {unknown}"
        ) from None


def saved_by_name(op: Any, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments and results of a call that its backward op takes beside the gradient."""
    saved = _plan(op.__class__).saved
    if saved is None:
        raise DeclarationError(
            f"{type(op).__qualname__} must have a saved of its own: its backward takes "
            f"{', '.join(names_of(type(op).backward.forward)[1:])}, not all of which it has"
        )
    values = (*arguments, *results)
    return tuple([values[at] for at in saved])


def backward_of(op: Any, arguments: Sequence[Any]) -> Any:
    """The backward op of a call, which knows whose gradients are wanted: made once for each set of facts.

    Raises:
        InputError: An argument that has no gradient requires grad.
    """
    plan = _plan(op.__class__)
    wanted = tuple([one is not None and one.requires_grad for one in arguments])
    typed = [arguments[at] for at in plan.typed]
    dtypes = tuple([None if one is None else one.dtype for one in typed])
    facts = (op.__class__, wanted, dtypes, tuple([getattr(op, name) for name in plan.shared]), op.target)
    try:
        return _made(*facts)
    except TypeError:  # symbolic numbers of a trace have no hash
        return _made.__wrapped__(*facts)


@functools.lru_cache(maxsize=4096)
def _made(cls: Any, wanted: Sequence[bool], dtypes: Sequence[Any], shared: Sequence[Any], target: str | None) -> Any:
    plan = _plan(cls)
    for at, (name, is_wanted) in enumerate(zip(plan.arguments, wanted)):
        if is_wanted and at not in plan.gradients:
            raise InputError(f"{name} requires grad, and {cls.__name__} has no gradient for it; give {name}.detach()")
    need = tuple(wanted[at] for at in plan.gradients)
    parameters = (*zip(plan.shared, shared), *zip(plan.dtypes, dtypes), ("need", need))
    return op_with(cls.backward, parameters, _target_of_backward(cls.backward.__name__, target))


def _target_of_backward(op: str, target: str | None) -> str | None:
    """The target of the forward, where that has something for the backward op; else its kernel is selected."""
    if target is None:
        return None
    load()
    return target if (op, target) in {(one.op, one.target) for one in registry().builders()} else None


when_registry_changes(_made.cache_clear)


def with_gradient(op: Any, tensors: Sequence[Any], run: Callable[..., Any], *, looks_up: bool = True) -> Any:
    """The results of a call of `op` of which a gradient is wanted.

    Args:
        op: The op.
        tensors: Its arguments.
        run: Gives its results, with grad mode off.
        looks_up: Whether the entry of the backward is looked up as well, so that a backward that nobody serves is
            refused here. It takes real tensors.
    """
    cls = op.__class__
    if cls.backward is None:
        if not hasattr(op, "formula"):
            raise gradient_refusal(cls.__name__)
        return op.formula(*tensors)
    plan = _plan(cls)
    arguments: tuple[Any, ...] = (*tensors, *[None] * (len(plan.arguments) - len(tensors)))
    backward = backward_of(op, arguments)
    if looks_up and backward.target is None and arguments[0].numel() > 0:
        backward.kernel_for(*backward.request(*[arguments[at] for at in plan.requested]))
    return _call(op, backward, run, *arguments)


def recording(op: Any, tensors: Sequence[Any]) -> Callable[..., Any] | None:
    """What `with_gradient` ends in for a call, all its arguments given: for calls of equal facts. None for a formula."""
    if op.backward is None:
        return None
    arguments = (*tensors, *[None] * (len(_plan(op.__class__).arguments) - len(tensors)))
    return functools.partial(_call, op, backward_of(op, arguments), op)


def gradient_refusal(op: str) -> InputError:
    """The error of a call whose gradient is wanted, of an op that has no backward."""
    return InputError(
        f"a gradient is wanted (an argument requires grad) and {op} has no backward; call it under "
        "torch.no_grad(), or detach the arguments"
    )


def _as_no_view(result: Tensor) -> Tensor:
    """A result whose caller may write to it, which torch forbids where an autograd.Function returns a view."""
    return torch.ops.aten._unsafe_view(result, result.shape) if result._is_view() else result


def _in_scope(scope: Scope | None, backward: Any, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The call of a backward op under the scope of its forward. Compiled, it has the scope in which it runs."""
    if active() is scope or is_dynamo_compiling():
        return backward(*tensors)
    with in_force(scope):
        return backward(*tensors)


class _Differentiated(torch.autograd.Function):
    """One call of an op with its backward, eager or below torch's dispatcher.

    `forward` takes the context, and `setup_context` is not used: binding its signature would cost twice the call.
    """

    @staticmethod
    def forward(ctx: Any, op: Any, backward: Any, run: Callable[..., Any], *arguments: Any) -> Any:
        returned = run(*arguments)
        first, *others = cast("tuple[Any, ...]", returned) if isinstance(returned, tuple) else (returned,)
        results = (_as_no_view(first), *others)
        ctx.save_for_backward(*op.saved(arguments, results))
        if others:
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*[result for result in others if result is not None])
        ctx.name, ctx.backward_op, ctx.scope = op.__class__.__name__, backward, active()
        ctx.arguments, ctx.gradients = len(arguments), _plan(op.__class__).gradients
        return results if isinstance(returned, tuple) else results[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [None] * ctx.arguments
        if grads[0] is not None:
            results = _in_scope(ctx.scope, ctx.backward_op, grads[0], *ctx.saved_tensors)
            for at, result in zip(ctx.gradients, results):
                gradients[at] = result
        return None, None, None, *gradients

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:  # noqa: ARG004 - torch calls it with them
        raise tangent_refusal(ctx.name)


def tangent_refusal(op: str) -> InputError:
    """The error of a call with a tangent: forward-mode differentiation."""
    return InputError(f"an argument has a tangent and {op} has no forward-mode derivative; call it with primals")


# The `apply` of C++, below the one that asks about torch.func and costs as much as a call.
_call: Final[Callable[..., Any]] = cast("Any", super(torch.autograd.Function, _Differentiated)).apply
