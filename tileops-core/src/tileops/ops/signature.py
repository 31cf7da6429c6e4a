"""What an op's constructor and `forward` take, read from their signatures."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch.compiler import is_dynamo_compiling

from tileops.call_spec import CallSpec
from tileops.errors import DeclarationError, InputError

if TYPE_CHECKING:
    from typing_extensions import Never

OpClass = type[Any]
"""An op class: its signatures are read here. `Op` itself lies above this module."""


@functools.lru_cache(maxsize=1024)
def parameter_names(cls: OpClass) -> tuple[str, ...]:
    """The names of the constructor's parameters, without `target`."""
    return tuple(name for name in inspect.signature(cls.__init__).parameters if name not in ("self", "target"))


def _read_signature(cls: OpClass) -> inspect.Signature:
    return inspect.Signature(list(inspect.signature(cls.forward).parameters.values())[1:])


def _read_defaults(cls: OpClass) -> dict[str, Any]:
    """The arguments of `forward` with their defaults; `inspect.Parameter.empty` for those without."""
    return {name: parameter.default for name, parameter in _read_signature(cls).parameters.items()}


# dynamo warns where it traces a cache: while it traces, the signatures are read anew.
_forward_signature = functools.lru_cache(maxsize=1024)(_read_signature)
_argument_defaults = functools.lru_cache(maxsize=1024)(_read_defaults)


def argument_names(cls: OpClass) -> tuple[str, ...]:
    """The names of the tensors that `forward` takes, in order."""
    return tuple(_argument_defaults(cls))


def arguments_in_order(cls: OpClass, tensors: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments in the order of `forward`, absent ones as their defaults."""
    defaults = (_read_defaults if is_dynamo_compiling() else _argument_defaults)(cls)
    given = dict(zip(defaults, tensors))
    if len(tensors) <= len(defaults) and named.keys() <= defaults.keys() - given.keys():
        arguments = tuple({**defaults, **given, **named}.values())
        for argument in arguments:
            if argument is inspect.Parameter.empty:
                break
        else:
            return arguments
    try:
        bound = (_read_signature if is_dynamo_compiling() else _forward_signature)(cls).bind(*tensors, **named)
    except TypeError as mismatch:
        raise InputError(f"{cls.__name__} takes {', '.join(defaults)}: {mismatch}") from None
    bound.apply_defaults()
    return bound.args


def asked_for(op: Any, tensors: Sequence[Any]) -> tuple[str, CallSpec]:
    """The interface and the spec that a call of `op` with these tensors asks for. Nothing is run."""
    arguments = arguments_in_order(cast("OpClass", type(op)), tuple(tensors), {})
    op.check(*arguments)
    asked = _stopped(op, arguments, _stop_at)
    return asked.interface, asked.call


def kernel_arguments(op: Any, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """What `forward` with these tensors calls its kernel with. They are checked and laid out; no kernel is run."""

    def kernel_for(interface: str, call: CallSpec) -> Callable[..., Any]:
        def stop(*arguments: Any) -> Never:
            raise _Asked(interface, call, arguments)

        return stop

    return _stopped(op, tensors, kernel_for).arguments


class _Asked(Exception):  # noqa: N818 - no error: it carries a question out of `forward`
    def __init__(self, interface: str, call: CallSpec, arguments: tuple[Any, ...] = ()) -> None:
        super().__init__(interface)
        self.interface = interface
        self.call = call
        self.arguments = arguments


def _stop_at(interface: str, call: CallSpec) -> Never:
    raise _Asked(interface, call)


def _stopped(op: Any, tensors: Sequence[Any], kernel_for: Callable[[str, CallSpec], Any]) -> _Asked:
    """Where `forward` gets to with a `kernel_for` that stops it."""
    probe = copy.copy(op)
    probe.kernel_for = kernel_for
    try:
        probe.forward(*tensors)
    except _Asked as asked:
        return asked.with_traceback(None)  # its frames hold the tensors, and it would hold them in a cycle
    raise DeclarationError(f"{type(op).__name__}.forward asks for no kernel with these tensors")
