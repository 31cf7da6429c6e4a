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

from tileops.backend.loading import load
from tileops.backend.registration import registry
from tileops.errors import DeclarationError, InputError
from tileops.torch_schema import names_of, op_with


class _Plan(NamedTuple):
    """How a call of an op becomes a call of its backward op: positions among the op's arguments.

    Args:
        gradients: Those that have a gradient, in the order of the backward op's results.
        saved: What the backward op takes beside the gradient; counted past the arguments, a result.
        requested: Those that the backward op's call spec is made of.
        shared: Parameters that the backward op has too.
        dtypes: Parameters of the backward op that are the dtype of an argument, with its position.
    """

    gradients: tuple[int, ...]
    saved: tuple[int | None, ...]
    requested: tuple[int, ...]
    shared: tuple[str, ...]
    dtypes: tuple[tuple[str, int], ...]


@functools.lru_cache(maxsize=1024)
def _plan(cls: Any) -> _Plan:
    """Read from the names. What is saved is None where a name is none of this op's: then its `saved` says it."""
    arguments, parameters = names_of(cls.forward), names_of(cls.__init__)
    known = (*arguments, *cls.results)
    own = [name for name in names_of(cls.backward.__init__) if name not in ("need", "target")]
    try:
        return _Plan(
            gradients=tuple(arguments.index(name.removeprefix("grad_")) for name in cls.backward.results),
            saved=tuple(known.index(name) if name in known else None for name in names_of(cls.backward.forward)[1:]),
            requested=tuple(arguments.index(name) for name in names_of(cls.backward.request)),
            shared=tuple(name for name in own if name in parameters),
            dtypes=tuple((n, arguments.index(n.removesuffix("_dtype"))) for n in own if n not in parameters),
        )
    except ValueError as unknown:
        raise DeclarationError(
            f"{cls.backward.__qualname__} is no backward of {cls.__qualname__}, which takes "
            f"{', '.join(arguments)}: {unknown}"
        ) from None


def saved_by_name(op: Any, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments and results of a call that its backward op takes beside the gradient."""
    values, plan = (*arguments, *results), _plan(type(op))
    if None in plan.saved:
        raise DeclarationError(f"{type(op).__qualname__} needs a saved: its backward takes what is not among its names")
    return tuple(values[cast("int", at)] for at in plan.saved)


def backward_of(op: Any, arguments: Sequence[Any]) -> Any:
    """The backward op of a call, which knows whose gradients are wanted.

    Raises:
        InputError: An argument that has no gradient requires grad.
    """
    plan = _plan(type(op))
    for at, argument in enumerate(arguments):
        if argument is not None and argument.requires_grad and at not in plan.gradients:
            name = names_of(op.forward)[at]
            raise InputError(
                f"{name} requires grad, and {type(op).__name__} has no gradient for it; give {name}.detach()"
            )
    wanted = [arguments[at] is not None and arguments[at].requires_grad for at in plan.gradients]
    values = [(name, getattr(op, name)) for name in plan.shared]
    values += [(name, None if arguments[at] is None else arguments[at].dtype) for name, at in plan.dtypes]
    return op_with(type(op).backward, (*values, ("need", tuple(wanted))), _target_of_backward(op))


def _target_of_backward(op: Any) -> str | None:
    """The op's target, where that has something for the backward op; else its kernel is selected."""
    if op.target is None:
        return None
    load()
    served = {(builder.op, builder.target) for builder in registry().builders()}
    return op.target if (type(op).backward.__name__, op.target) in served else None


def with_gradient(op: Any, tensors: Sequence[Any], run: Callable[..., Any], *, looks_up: bool = True) -> Any:
    """The results of a call of `op` of which a gradient is wanted.

    Args:
        op: The op.
        tensors: Its arguments.
        run: Gives its results, with grad mode off.
        looks_up: Whether the entry of the backward is looked up as well, so that a backward that nobody serves is
            refused here. It takes real tensors.
    """
    cls = type(op)
    if cls.backward is None:
        if not hasattr(op, "formula"):
            raise gradient_refusal(cls.__name__)
        return op.formula(*tensors)
    arguments = (*tensors, *[None] * (len(names_of(cls.forward)) - len(tensors)))
    backward = backward_of(op, arguments)
    if looks_up and backward.target is None and arguments[0].numel() > 0:
        backward.kernel_for(*backward.request(*[arguments[at] for at in _plan(cls).requested]))
    return _call(op, backward, run, *arguments)


def gradient_refusal(op: str) -> InputError:
    """The error of a call whose gradient is wanted, of an op that has no backward."""
    return InputError(
        f"a gradient is wanted (an argument requires grad) and {op} has no backward; call it under "
        "torch.no_grad(), or detach the arguments"
    )


class _Differentiated(torch.autograd.Function):
    """One call of an op with its backward, eager or below torch's dispatcher.

    `forward` takes the context, and `setup_context` is not used: binding its signature would cost twice the call.
    """

    @staticmethod
    def forward(ctx: Any, op: Any, backward: Any, run: Callable[..., Any], *arguments: Any) -> Any:
        results = run(*arguments)
        given = results if isinstance(results, tuple) else (results,)
        ctx.save_for_backward(*op.saved(arguments, given))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[result for result in given[1:] if result is not None])
        ctx.op, ctx.backward_op, ctx.arguments = op, backward, len(arguments)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [None] * ctx.arguments
        if grads[0] is not None:
            results = ctx.backward_op(grads[0], *ctx.saved_tensors)
            for at, result in zip(_plan(type(ctx.op)).gradients, results):
                gradients[at] = result
        return None, None, None, *gradients

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:  # noqa: ARG004 - torch calls it with them
        raise tangent_refusal(type(ctx.op).__name__)


def tangent_refusal(op: str) -> InputError:
    """The error of a call with a tangent: forward-mode differentiation."""
    return InputError(f"an argument has a tangent and {op} has no forward-mode derivative; call it with primals")


# The `apply` of C++, below the one that asks about torch.func and costs as much as a call.
_call: Final[Callable[..., Any]] = super(torch.autograd.Function, _Differentiated).apply
