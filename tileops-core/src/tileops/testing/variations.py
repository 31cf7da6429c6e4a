"""Call specs derived from others by changing fields, for any spec type: only the values in its samples are known."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from tileops.call_spec import CallSpec

DTYPES: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8)
"""Dtypes that a generated spec may hold where its samples hold one."""

SIZES: Final = (
    1, 2, 3, 7, 31, 32, 33, 127, 128, 1000, 1023, 1024, 4097, 32749, 65536, (1 << 20) + 1, (1 << 31) - 1, 1 << 31,
    (1 << 32) + 1, 1 << 40,
)  # fmt: skip
"""Sizes around which kernels change their minds: one, primes, powers of two and their neighbours, 32 bits and more."""

VALUES_PER_FIELD: Final = 2


def changed(call: CallSpec, **values: Any) -> CallSpec | None:
    """The call with other values, sizes as their classes; None where its class does not take them."""
    try:
        return dataclasses.replace(call, **values).normalised()
    except Exception:
        return None


def with_dtype(call: CallSpec, dtype: torch.dtype) -> CallSpec:
    """The call with its first floating dtype exchanged for `dtype` in every field that holds it.

    A weight that has x's dtype has it afterwards too.
    """
    values = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    old = next((v for v in values.values() if isinstance(v, torch.dtype) and v.is_floating_point), None)
    return dataclasses.replace(call, **{name: dtype for name, value in values.items() if old and value is old})


def varied(call: CallSpec, samples: Sequence[CallSpec]) -> Iterator[tuple[str, CallSpec]]:
    """The call with one field changed, and that field's name.

    A field takes values that it has in other samples; one that has the same value in all of them takes a value
    made from it.
    """
    for field in dataclasses.fields(call):
        if field.name == "device":
            continue
        own = getattr(call, field.name)
        known = [value for value in dict.fromkeys(getattr(one, field.name) for one in samples) if value != own]
        for value in known[:VALUES_PER_FIELD] if known else _others(own):
            other = changed(call, **{field.name: value})
            if other is not None and other != call:
                yield field.name, other


def _others(value: object) -> tuple[Any, ...]:
    """Values unlike the only one known: far enough away to show in results."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (2 * value, value + 1)
    if isinstance(value, float):
        return (0.5,) if 0 <= value < 0.5 else (value / 2,)
    if isinstance(value, enum.Enum):
        return tuple(member for member in type(value) if member is not value)
    return ()


def alternatives(samples: Sequence[CallSpec]) -> dict[str, tuple[Any, ...]]:
    """For each field but `device` the values that generated specs give it, from those that it has in the samples."""
    names = [field.name for field in dataclasses.fields(samples[0]) if field.name != "device"]
    return {name: _alternatives(dict.fromkeys(getattr(call, name) for call in samples)) for name in names}


def _alternatives(seen: dict[Any, None]) -> tuple[Any, ...]:
    values = [*seen]
    for value in seen:
        values += _others(value)
    if any(isinstance(value, torch.dtype) for value in seen):
        values += DTYPES
    sizes = [value for value in seen if isinstance(value, int) and not isinstance(value, bool)]
    values += [size for size in SIZES if sizes and size >= min(sizes)]
    return tuple(dict.fromkeys(values))
