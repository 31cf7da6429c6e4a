"""What the user types, as values: `name=value`, ops, devices, facts of a call."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tileops.call_spec import CallSpec, field_hints
from tileops.catalogue import find_op, meant, op_names
from tileops.device import KNOWN_BOARDS
from tileops.kernels.kernel_base import KernelInterface
from tileops.ops.op_base import Op


class UsageError(Exception):
    """What the user typed cannot be done: one sentence with the fix. The command exits with 2."""


def op_class(name: str) -> type[Op]:
    """The op called `name`."""
    found = find_op(name)
    if found is None:
        known = op_names()
        raise UsageError(f"no op is called {name!r}; known ops: {', '.join(known)}{meant(name, known)}")
    return found


def make_op(cls: type[Op], texts: Iterable[str]) -> Op:
    """An op of class `cls` with the parameters that `texts` (`name=value`) state."""
    given = {name: literal(text) for name, text in pairs(texts).items()}
    signature = inspect.signature(cls.__init__)
    known = tuple(name for name in signature.parameters if name != "self")
    for name in given:
        if name not in known:
            raise UsageError(
                f"{cls.__name__} has no parameter {name!r}; it has: {', '.join(known)}{meant(name, known)}"
            )
    required = (name for name, p in signature.parameters.items() if name != "self" and p.default is p.empty)
    missing = [name for name in required if name not in given]
    if missing:
        raise UsageError(f"{cls.__name__} needs --param {missing[0]}=…, such as --param {missing[0]}=4096")
    return cls(**given)


def pairs(texts: Iterable[str]) -> dict[str, str]:
    """`name=value` texts as a mapping."""
    split = [text.partition("=") for text in texts]
    for name, equals, _ in split:
        if not equals or not name.isidentifier():
            raise UsageError(f"{name!r} is no name=value; write such as eps=1e-6")
    return {name: value for name, _, value in split}


def literal(text: str) -> Any:
    """The value that `text` writes: a Python literal, true, false, none; else the text itself."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def kernel_interface(cls: type[Op], name: str | None) -> str:
    """The name of the interface asked about; the only one where the op has one."""
    known = tuple(cls.interfaces)
    if name is None and len(known) == 1:
        return known[0]
    if name is None:
        raise UsageError(
            f"{cls.__name__} has several interfaces; name one: --interface {' or --interface '.join(known)}"
        )
    if name not in known:
        raise UsageError(f"{cls.__name__} has no interface {name!r}; it has: {', '.join(known)}{meant(name, known)}")
    return name


def call_on(device: str, interface: type[KernelInterface[Any]], texts: Iterable[str]) -> CallSpec:
    """The call spec that `texts` (`fact=value`) state, on a torch device or a known board."""
    board = KNOWN_BOARDS.get(device.lower())
    call = _call(interface.request, torch.device("cuda", 0) if board else _device(device), pairs(texts))
    return call if board is None else call.on(board)


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError:
        boards = ", ".join(KNOWN_BOARDS)
        raise UsageError(
            f"{text!r} is no device; give a torch device (cpu, cuda, cuda:1) or a board: {boards}"
        ) from None


def _call(request: type[CallSpec], device: torch.device, texts: Mapping[str, str]) -> CallSpec:
    fields = {field.name: field for field in dataclasses.fields(request) if field.name != "device"}
    hints = {name: _bare(hint) for name, hint in field_hints(request).items()}
    for name in texts:
        if name not in fields:
            known = tuple(fields)
            raise UsageError(f"{request.__name__} has no fact {name!r}; it has: {', '.join(known)}{meant(name, known)}")
    missing = [name for name, field in fields.items() if _is_required(field) and name not in texts]
    if missing:
        raise UsageError(
            f"{request.__name__} needs {', '.join(f'{name}=…' for name in missing)}; {_example(hints, missing)}"
        )
    return request(device=device, **{name: _fact(name, text, hints[name]) for name, text in texts.items()})


def _bare(hint: Any) -> Any:
    """A hint without what `Annotated` adds."""
    return typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _example(hints: Mapping[str, Any], names: Iterable[str]) -> str:
    shown = {torch.dtype: "float16", int: "64", float: "1e-5", bool: "true"}
    return f"such as {' '.join(f'{name}={shown.get(hints[name], 1)}' for name in names)}"


def _fact(name: str, text: str, hint: Any) -> Any:
    """The value of one fact, of the type that the spec's annotation names."""
    kinds = typing.get_args(hint) or (hint,)
    if type(None) in kinds and text.lower() == "none":
        return None
    if torch.dtype in kinds:
        return _dtype(name, text)
    value = literal(text)
    if float in kinds and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if int in kinds and isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if (bool in kinds and isinstance(value, bool)) or (str in kinds and isinstance(value, str)):
        return value
    wanted = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
    raise UsageError(f"{name}={text} is no {wanted}{' (sizes are at least 0)' if int in kinds else ''}")


def _dtype(name: str, text: str) -> torch.dtype:
    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"{name}={text} is no dtype; write such as float16, bfloat16 or float32")
    return dtype
