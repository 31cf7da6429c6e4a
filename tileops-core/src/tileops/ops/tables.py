"""Tables of the process: bounded, and filled once for each key however many threads ask."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

from tileops.errors import BuildError

Value = TypeVar("Value")

_building: dict[tuple[int, Hashable], tuple[int, Future[Any]]] = {}
_lock = threading.Lock()


def _after_fork_in_child() -> None:
    """Builds that other threads had begun die with them; the child begins them again."""
    global _lock  # noqa: PLW0603 - nobody in the child can release the parent's lock
    _lock = threading.Lock()
    _building.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def remember(table: dict[Any, Any], key: Hashable, value: object, most: int | None) -> None:
    """Store a value. A table of `most` loses its oldest eighth at once, so that eviction costs next to nothing."""
    if most is not None and len(table) >= most:
        for old in list(table)[: most // 8]:
            table.pop(old, None)
    table[key] = value


def build_once(
    table: dict[Any, Value], key: Hashable, build: Callable[[], Value], what: str, *, most: int | None = None
) -> Value:
    """The value of `key`: in the table, or built by one thread while the others that ask wait for it.

    Args:
        table: Where values are kept.
        key: The value's key.
        build: Builds it. Where it raises, nothing is stored, every waiting thread gets the error, and the next
            call tries again.
        what: What is built, for the error of a build that asks for itself.
        most: The table's bound; None where it has none.
    """
    with _lock:
        if key in table:
            return table[key]
        builder, promise = _building.get((id(table), key), (0, Future[Any]()))
        if builder == 0:
            _building[id(table), key] = (threading.get_ident(), promise)
    if builder == threading.get_ident():
        raise BuildError(f"{what} asks for itself while it is being built")
    if builder != 0:
        return promise.result()
    try:
        value = build()
    except BaseException as error:
        with _lock:
            _building.pop((id(table), key), None)
        promise.set_exception(error)
        raise
    with _lock:
        remember(table, key, value, most)
        _building.pop((id(table), key), None)
    promise.set_result(value)
    return value
