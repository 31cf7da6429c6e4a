"""Frozen dataclasses that carry what keys a table, made cheap to build.

A frozen dataclass stores each field by a call of `object.__setattr__` and hashes itself in Python. `quicken`
gives one an `__init__` that stores a single tuple, its class and its values: the key. Fields are read from the key.
All else is as the decorator made it: equality, hash, repr, frozenness.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Final, cast


class Record:
    """The base of dataclasses that `quicken` can make cheap."""

    __slots__ = ("_table_key",)

    _table_key: tuple[Any, ...]
    """The class and the values that decide equality. Keys are equal exactly where records are."""

    _own_init: ClassVar[bool] = False
    _quickened: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Note what the author wrote before the decorator adds its own."""
        super().__init_subclass__(**kwargs)
        cls._own_init = "__init__" in vars(cls)
        cls._quickened = False

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: the values by name, so that a key is never out of date."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(cast("Any", self))}
        return {**self.__dict__, **values}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _take_key(self)


_set_key: Final[Callable[[Record, tuple[Any, ...]], None]] = vars(Record)["_table_key"].__set__


def key_of(record: Any) -> tuple[Any, ...]:
    """The key of a record, also of one whose class is not quickened. It need not have a hash."""
    try:
        return record._table_key
    except AttributeError:
        _take_key(record)
        return record._table_key


def _take_key(record: Any) -> None:
    """Set the key from the values as they are. From now on the record holds them itself."""
    fields = dataclasses.fields(record)
    values = {field.name: getattr(record, field.name) for field in fields}
    record.__dict__.update(values)
    _set_key(record, (cast("Any", type(record)), *(values[field.name] for field in fields if field.compare)))


def quicken(cls: type[Any]) -> None:
    """Let every record of the decorated class `cls` carry its key from its construction on.

    A plain class gets an `__init__` that stores the key and nothing else. A class with a `__post_init__`, an
    `__init__` of its own, default factories, `InitVar`s or fields outside the comparison keeps its `__init__`, and
    the key is read off afterwards. Once per class; twice does no harm, nor does another thread that builds records.
    """
    if not issubclass(cls, Record) or cls._quickened or "__dataclass_params__" not in vars(cls):
        return
    _quicken(cls)


def _quicken(cls: type[Any]) -> None:
    plain = _plain_names(cls)
    if plain is None:
        initialise = _keyed_afterwards(cls)
    else:
        initialise = _key_alone(cls.__init__, plain)
        fields = cls.__dataclass_fields__
        for place, name in enumerate(plain, 1):
            setattr(cls, name, _Value(name, place, fields[name].default))
    cls.__init__ = initialise  # last: until here records hold their values themselves
    cls._quickened = True


class _Value:
    """Reads a field from the key. A record that holds its values itself is read without it."""

    def __init__(self, name: str, place: int, default: Any) -> None:
        self._name = name
        self._place = place
        self._default = default

    def __get__(self, record: Any, owner: type[Any]) -> Any:
        if record is not None:
            return record._table_key[self._place]
        if self._default is dataclasses.MISSING:
            raise AttributeError(f"type object {owner.__name__!r} has no attribute {self._name!r}")
        return self._default


def _plain_names(cls: type[Any]) -> tuple[str, ...] | None:
    """The parameters of `__init__`, where the decorator wrote it and it does nothing but store each in its field."""
    fields = dataclasses.fields(cls)
    generated = "__init__" in vars(cls) and not cls._own_init
    if not generated or hasattr(cls, "__post_init__") or cls.__new__ is not object.__new__:
        return None
    if any(field.default_factory is not dataclasses.MISSING or not field.compare for field in fields):
        return None
    code = cls.__init__.__code__
    names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    return names if set(names) == {field.name for field in fields} else None


def _key_alone(init: Any, names: tuple[str, ...]) -> Any:
    """An `__init__` with the signature of `init` that stores the key. Only names of fields enter the source."""
    positional = init.__code__.co_argcount - 1
    star = ["*"] if positional < len(names) else []
    itself = init.__code__.co_varnames[0]
    parameters = ", ".join([itself, *names[:positional], *star, *names[positional:]])
    values = "".join(f"{name}, " for name in names)
    source = f"def __init__({parameters}): __set_key__({itself}, (__type__({itself}), {values}))"
    made: dict[str, Any] = {"__set_key__": _set_key, "__type__": type, "__name__": init.__module__}
    exec(source, made)  # noqa: S102 - as dataclasses does; decision 8 has the cost of doing without
    quick = made["__init__"]
    quick.__defaults__, quick.__kwdefaults__ = init.__defaults__, init.__kwdefaults__
    quick.__annotations__, quick.__qualname__ = init.__annotations__, init.__qualname__
    return quick


def _keyed_afterwards(cls: type[Any]) -> Any:
    """The `__init__` of `cls`, and then the key; a subclass that calls it is not complete yet."""
    init = cls.__init__

    @functools.wraps(init)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if type(self) is cls:
            _take_key(self)

    return initialise
