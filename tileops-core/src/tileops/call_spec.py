"""The call spec: the facts of one call that selection and building read."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import typing
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch

from tileops.device import Board, DeviceFacts, device_facts, known_board, with_index
from tileops.record import Record

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclasses.dataclass(frozen=True)
class SizeClass:
    """Marks a field of a call spec that holds a size class instead of a size.

    A size enters a spec only as finely as some implementation needs it: rounded up to a power of two, and
    capped where selection stops caring. A batch size that changes from call to call is then a hit. An
    implementation serves the whole class or refuses it; exact sizes reach its program as arguments.

    Write the field as `rows: Annotated[int, SizeClass(cap=1 << 16)]`, and build it with `size_class`.
    """

    cap: int

    def of(self, size: int) -> int:
        """The class of `size`: the next power of two, at most `cap`. 5 gives 8."""
        return size_class(size, self.cap)


def size_class(size: int, cap: int) -> int:
    """`size` rounded up to a power of two and capped; sizes below 1 give 1."""
    return min(1 << (max(size, 1) - 1).bit_length(), cap)


@dataclasses.dataclass(frozen=True)
class CallSpec(Record):
    """The immutable facts of one call that affect which kernel serves it or how that kernel is built.

    An author writes a frozen dataclass with annotated fields:

        @dataclass(frozen=True)
        class LayerNormCall(CallSpec):
            n: int
            dtype: torch.dtype
            eps: float = 1e-5

    Its own fields and `device` decide equality, and so does its class. A field holds what can key a table:
    None, bool, int, float, str, `torch.dtype`, `torch.device`, an enum member, a frozen dataclass, or a tuple
    or frozenset of those; never a tensor, never anything that a tensor's contents decide.

    The facts of the device (`arch`, `sm_count`, `smem_budget`, `calibration`) are read when a miss first asks
    for them, and take no part in equality.

    Args:
        device: The device that the call's tensors are on.
    """

    stated_on: ClassVar[str | None] = None
    """What `on` stated, as a reader wrote it; None for a spec of a real call."""

    device: torch.device

    @property
    def facts(self) -> DeviceFacts:
        """The facts of the call's device, or those that `on` stated."""
        return device_facts(self.device)

    @property
    def arch(self) -> int:
        """Architecture number of the device: major * 10 + minor on CUDA, −1 where there is none."""
        return self.facts.arch

    @property
    def sm_count(self) -> int:
        """Streaming multiprocessors of the device; 0 where there are none."""
        return self.facts.sm_count

    @property
    def smem_budget(self) -> int:
        """Bytes of shared memory that one block may opt in to; 0 where there is none."""
        return self.facts.smem_budget

    @property
    def calibration(self) -> str | None:
        """The calibrated board that the device belongs to, or None."""
        return self.facts.calibration

    def on(self, board: str | Board | DeviceFacts) -> Self:
        """The same call with stated device facts, to ask about a device that is not there.

        Args:
            board: The name of a known board ("h200"), a `Board`, or `DeviceFacts` of your own.

        Returns:
            A spec of another class, which never equals a plain one: `key_for` and `explain` take it,
            `kernel_for` refuses it. Its device becomes `cuda:0` unless it is on a device already.
        """
        if isinstance(board, str):
            board = known_board(board)
        facts = board if isinstance(board, DeviceFacts) else board.facts
        stated = repr(board) if isinstance(board, DeviceFacts) else board.name
        device = torch.device("cuda", 0) if self.device.type in ("cpu", "meta") else self.device
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return _stated_class(plain_class(type(self)), facts, stated)(**{**values, "device": device})

    def normalised(self) -> Self:
        """The spec as tables hold it: sizes as their size classes, the device with its index."""
        changed: dict[str, Any] = {
            name: marker.of(getattr(self, name))
            for name, marker in size_classes(type(self)).items()
            if marker.of(getattr(self, name)) != getattr(self, name)
        }
        if self.stated_on is None:
            device = with_index(self.device)
            if device != self.device:
                changed["device"] = device
        return dataclasses.replace(self, **changed) if changed else self

    def __str__(self) -> str:
        """As a reader writes it: `LayerNormCall(device=cuda:0, n=64, dtype=float16, …) on h200`."""
        shown = ", ".join(
            f"{field.name}={shown_value(getattr(self, field.name))}" for field in dataclasses.fields(self)
        )
        stated = "" if self.stated_on is None else f" on {self.stated_on}"
        return f"{plain_class(type(self)).__name__}({shown}){stated}"


def as_code(call: CallSpec) -> str:
    """A spec as the Python that builds it, with `torch` imported."""
    fields = (f"{field.name}={_value_as_code(getattr(call, field.name))}" for field in dataclasses.fields(call))
    return f"{plain_class(type(call)).__name__}({', '.join(fields)})"


def _value_as_code(value: object) -> str:
    return f"torch.device({str(value)!r})" if isinstance(value, torch.device) else repr(value)


def shown_value(value: object) -> str:
    """A field's value as messages show it: dtypes and devices without their module."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value) if isinstance(value, torch.device) else repr(value)


def plain_class(spec: type[CallSpec]) -> type[Any]:
    """The class as its author wrote it, also of a spec that `on` stated facts for."""
    return spec.__bases__[0] if spec.stated_on is not None else spec


@functools.lru_cache(maxsize=256)
def _stated_class(plain: type[Any], facts: DeviceFacts, stated: str) -> type[Any]:
    """The class of specs of `plain` with stated facts: a subclass, hence never equal to a plain spec."""
    members = {"facts": facts, "stated_on": stated, "__module__": plain.__module__, "__reduce__": _reduce_stated}
    return type(plain.__name__, (plain,), members)


def _reduce_stated(call: CallSpec) -> tuple[Any, ...]:
    """Pickle a stated spec as what it was made of: its class is made anew where it is loaded."""
    values = tuple(getattr(call, field.name) for field in dataclasses.fields(call))
    return _stated, (plain_class(type(call)), call.facts, call.stated_on, values)


def _stated(plain: type[Any], facts: DeviceFacts, stated: str, values: tuple[Any, ...]) -> CallSpec:
    return _stated_class(plain, facts, stated)(*values)


@functools.lru_cache(maxsize=1024)
def size_classes(spec: type[CallSpec]) -> dict[str, SizeClass]:
    """The fields of `spec` that hold size classes, with their markers."""
    return {
        name: marker
        for name, hint in field_hints(spec).items()
        for marker in getattr(hint, "__metadata__", ())
        if isinstance(marker, SizeClass)
    }


def field_hints(spec: type[CallSpec]) -> dict[str, Any]:
    """What the annotations of `spec` mean; Any where only a type checker can read one."""
    hints: dict[str, Any] = {}
    for owner in reversed(plain_class(spec).__mro__):
        for name, annotation in vars(owner).get("__annotations__", {}).items():
            hints[name] = _hint(owner, name, annotation)
    return hints


def _hint(owner: type[Any], name: str, annotation: object) -> Any:
    alone = type(owner.__name__, (), {"__annotations__": {name: annotation}, "__module__": owner.__module__})
    try:
        return typing.get_type_hints(alone, include_extras=True)[name]
    except NameError:
        return Any


_KEYABLE: Final = (type(None), bool, int, str, torch.dtype, torch.device, enum.Enum)


def unkeyable_field(call: CallSpec) -> str | None:
    """The name of a field that cannot key a table, with what it holds; None where every field can."""
    for field in dataclasses.fields(call):
        value = getattr(call, field.name)
        if not _keyable(value):
            return f"{field.name}={type(value).__qualname__}"
    return None


def _keyable(value: object) -> bool:
    if isinstance(value, float):
        return not math.isnan(value)  # NaN equals nothing, so every call would be a miss
    if isinstance(value, (tuple, frozenset)):
        return all(_keyable(part) for part in cast("tuple[object, ...]", value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        frozen = bool(cast("Any", type(value)).__dataclass_params__.frozen)
        return frozen and all(_keyable(getattr(value, f.name)) for f in dataclasses.fields(value))
    return isinstance(value, _KEYABLE)
