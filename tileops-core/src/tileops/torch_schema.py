"""What an op class says of its torch ops, and the schemas that are read from its annotations."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Union, cast

import torch
from torch import Tensor

from tileops.errors import DeclarationError


@dataclasses.dataclass(frozen=True)
class TorchOp:
    """One torch op of an op class: what of the op it covers. The default is all of it.

    Args:
        where: Values of constructor parameters that choose this torch op. They are no arguments of it.
        omits: Constructor parameters that mean nothing here. They are no arguments of it either.
        absent: The names of tensors that calls must lack to come here. They are no arguments of it either; of several
            torch ops that cover a call, it goes to the first.
        writes: The names of the tensors that are written; None for those that a kernel interface may write.
        returns: Which of the op's `results` come back; None for all. The op returns None for the others.
        contiguous: Whether the strides of results do not depend on those of arguments. A compiler may then hand
            the arguments over contiguous.
        autocast: By device type, the dtype that autocast gives to floating-point arguments.
    """

    where: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    omits: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    writes: tuple[str, ...] | None = None
    returns: tuple[str, ...] | None = None
    contiguous: bool = False
    autocast: Mapping[str, torch.dtype] = dataclasses.field(default_factory=dict[str, torch.dtype])


class Route(NamedTuple):
    """How a call becomes a call of a torch op. Tuples of constants, so that dynamo traces it.

    `arguments` are the tensors that the torch op takes; `absent` are the places, among those that the op takes, of
    the others. `masked` says that a call may want some results only: the op's `wanted` says which, and an empty
    tensor stands for each of the others. `converts` says whether the torch op returns anything else than the op does.
    """

    name: str
    arguments: tuple[str, ...]
    absent: tuple[int, ...]
    parameters: tuple[str, ...]
    where: tuple[tuple[str, Any], ...]
    results: int
    returned: tuple[int, ...] | None
    writes: tuple[str, ...]
    masked: bool
    contiguous: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    converts: bool


def torch_op_name(module: str, qualname: str) -> str:
    """`layer_norm` for our LayerNormFwdOp, `layer_norm_backward` for our LayerNormBwdOp, `acme__RowOp` for another's.

    Nested names are joined with underscores.
    """
    package = module.partition(".")[0]
    if package != "tileops":
        return re.sub(r"\W+", "_", f"{package}__{qualname}")
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", _short(qualname))
    return re.sub(r"\W+", "_", words).lower()


def _short(qualname: str) -> str:
    return qualname.removesuffix("BwdOp") + "Backward" if qualname.endswith("BwdOp") else qualname.removesuffix("FwdOp")


def op_with(cls: Any, parameters: tuple[tuple[str, Any], ...], target: str | None) -> Any:
    """An op of a class with these parameters: remembered, but for symbolic ones."""
    if not is_symbolic([value for _, value in parameters]):
        return _built(cls, parameters, target)
    op = cls.__new__(cls)  # symbolic numbers of a trace: checked where the op was made, and unfit for a table
    vars(op).update(parameters, target=target)
    return op


@functools.lru_cache(maxsize=4096)
def _built(cls: Any, parameters: tuple[tuple[str, Any], ...], target: str | None) -> Any:
    given = dict(parameters)
    return cls(**given) if target is None else cls(**given, target=target)


def is_symbolic(parameters: Sequence[Any]) -> bool:
    """Whether a number among these, or in a tuple among these, is a trace's."""
    flat = [
        one for value in parameters for one in (cast("Sequence[Any]", value) if isinstance(value, tuple) else (value,))
    ]
    return any(isinstance(one, (torch.SymInt, torch.SymFloat)) for one in flat)


def route_of(cls: Any, suffix: str, part: TorchOp) -> Route:
    """How calls reach one entry of `cls.torch_ops`."""
    base = torch_op_name(cls.__module__, cls.__qualname__)
    left_out = {*part.where, *part.omits, "target"}
    taken = names_of(cls.forward)
    arguments = tuple(name for name in taken if name not in part.absent)
    interfaces = cls.interfaces.values()
    writes = frozenset[str]().union(*(one.writes for one in interfaces)) if part.writes is None else part.writes
    return Route(
        name=f"{base}_{suffix}" if suffix else base,
        arguments=arguments,
        absent=tuple(at for at, name in enumerate(taken) if name in part.absent),
        parameters=tuple(name for name in names_of(cls.__init__) if name not in left_out),
        where=tuple(part.where.items()),
        results=len(cls.results),
        returned=None if part.returns is None else tuple(cls.results.index(name) for name in part.returns),
        writes=tuple(name for name in arguments if name in writes),
        masked=hasattr(cls, "wanted"),
        contiguous=part.contiguous,
        autocast=tuple(part.autocast.items()),
        converts=hasattr(cls, "wanted") or part.returns is not None,
    )


def tags_of(route: Route) -> tuple[torch.Tag, ...]:
    """What compilers may do. Before torch 2.7 there is no word for contiguous arguments, and they keep theirs."""
    contiguous = getattr(torch.Tag, "needs_contiguous_strides", None)
    return (torch.Tag.pt2_compliant_tag, *([contiguous] if route.contiguous and contiguous is not None else []))


@functools.lru_cache(maxsize=1024)
def route_named(cls: Any, name: str) -> Route:
    """The route of a class to one of its torch ops."""
    return next(route for route in cls._routes if route.name == name)


def values_of(parameters: Sequence[Any]) -> tuple[Any, ...]:
    """Parameters as an op has them. Torch hands sequences over as lists."""
    return tuple([tuple(one) if one.__class__ is list else one for one in parameters])


@functools.lru_cache(maxsize=4096)
def with_values(cls: Any, name: str, values: tuple[Any, ...]) -> tuple[Route, Any]:
    """The route to a torch op and an op with these parameters. Torch leaves out last ones that have their default."""
    route = route_named(cls, name)
    target = values[len(route.parameters)] if len(values) > len(route.parameters) else None
    return route, op_with(cls, (*zip(route.parameters, values), *route.where), target)


def names_of(function: Any) -> tuple[str, ...]:
    """The parameters of a method, without self. Reads no annotation, which may name what does not exist yet."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return () if code is None else code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]


def without_absent(route: Route, tensors: Sequence[Any]) -> Sequence[Any]:
    """The arguments of the torch op, from those of the op."""
    return tuple([one for at, one in enumerate(tensors) if at not in route.absent]) if route.absent else tensors


def with_absent(route: Route, tensors: Sequence[Any]) -> Sequence[Any]:
    """The arguments of the op, from those of the torch op."""
    if not route.absent:
        return tensors
    arguments = list(tensors)
    for at in route.absent:
        arguments.insert(at, None)
    return tuple(arguments)


def to_torch(route: Route, results: Any) -> Any:
    """What the torch op returns, from what the op does."""
    if route.masked:
        some = next(result for result in results if result is not None)
        given = [some.new_empty(0) if result is None else result for result in results]
        return tuple(given) if len(given) > 1 else given[0]
    if route.returned is None:
        return results
    kept = [results[at] for at in route.returned]
    return tuple(kept) if len(kept) > 1 else kept[0]


def from_torch(route: Route, op: Any, tensors: Sequence[Any], returned: Any) -> Any:
    """What the op returns, from what the torch op does."""
    if route.masked:
        kept = (returned,) if route.results == 1 else returned
        return tuple([one if is_wanted else None for one, is_wanted in zip(kept, op.wanted(*tensors))])
    if route.returned is None:
        return returned
    kept = (returned,) if len(route.returned) == 1 else returned
    return tuple([kept[route.returned.index(at)] if at in route.returned else None for at in range(route.results)])


# ----------------------------------------------------------------------------------------------------- schemas

_SCHEMA_TYPES: Final[dict[Any, str]] = {
    Tensor: "Tensor",
    bool: "bool",
    int: "SymInt",
    float: "float",
    str: "str",
    torch.dtype: "ScalarType",
    torch.device: "Device",
}


def schema_of(cls: Any, route: Route) -> str:
    """The schema of a torch op: tensors, parameters, target.

    Raises:
        DeclarationError: An annotation is missing, names nothing, or is of a type that torch's schemas lack.
    """
    arguments = [
        f"{_written(text, at) if name in route.writes else text} {name}"
        for at, (name, text) in enumerate(_typed(cls.forward, route.arguments).items())
    ]
    arguments += [f"{text} {name}" for name, text in _typed(cls.__init__, route.parameters).items()]
    if not route.arguments or not all(one.startswith("Tensor") for one in arguments[: len(route.arguments)]):
        raise DeclarationError(f"{cls.__qualname__}.forward must take tensors, each annotated Tensor or Tensor | None")
    count = route.results if route.returned is None else len(route.returned)
    results = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    return f"{route.name}({', '.join(arguments)}, str? target=None) -> {results}"


def _written(text: str, at: int) -> str:
    return text.replace("Tensor", f"Tensor({chr(ord('a') + at)}!)")


def _typed(function: Any, names: Sequence[str]) -> dict[str, str]:
    """The types of parameters, as torch's schemas write them."""
    plain = inspect.unwrap(function)
    annotations = {name: plain.__annotations__.get(name) for name in names}
    try:
        hints = typing.get_type_hints(types.SimpleNamespace(__annotations__=annotations), plain.__globals__)
    except NameError as missing:
        raise DeclarationError(
            f"{plain.__qualname__}: {missing}; a torch op's annotations are read at run time"
        ) from None
    texts = {name: _schema_type(hints[name]) for name in names}
    for name, text in texts.items():
        if text is None:
            raise DeclarationError(
                f"{plain.__qualname__} has no annotation that torch can read for {name}; give one of: Tensor, bool, "
                "int, float, str, torch.dtype, torch.device, a tuple of one of those, or one of them | None"
            )
    return cast("dict[str, str]", texts)


def _schema_type(hint: Any) -> str | None:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        texts = {_schema_type(one) for one in arguments if one is not type(None)}
        texts -= {"SymInt"} if texts in ({"SymInt", "SymInt[]"}, {"SymInt", "float"}) else set()
        text = texts.pop() if len(texts) == 1 else None
        return f"{text}?" if text and type(None) in arguments else text
    if origin is Literal:
        texts = {_schema_type(type(one)) for one in arguments}
        return texts.pop() if len(texts) == 1 else None
    if isinstance(origin, type) and issubclass(origin, Sequence) and arguments:
        texts = {_schema_type(one) for one in arguments if one is not ...}
        text = texts.pop() if len(texts) == 1 else None
        return f"{text}[]" if text else None
    return _SCHEMA_TYPES.get(hint)
