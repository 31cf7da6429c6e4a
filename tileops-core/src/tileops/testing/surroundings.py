"""Surroundings in which a pure function is asked: torch and the devices are out of reach, and much is different."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from typing import Any, Final, NoReturn
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_DEVICE_QUERIES: Final = {
    torch.cuda: (
        "current_device", "current_stream", "device_count", "get_arch_list", "get_device_capability",
        "get_device_name", "get_device_properties", "is_available", "mem_get_info", "synchronize",
    ),
    torch.accelerator: ("current_accelerator", "current_device_index", "device_count", "is_available", "synchronize"),
}  # fmt: skip


class OutOfReach(Exception):  # noqa: N818 - it says what was reached for
    """A pure function reached for a tensor or a device."""


class _NoTensors(TorchDispatchMode):
    def __init__(self, reached: list[str]) -> None:
        super().__init__()
        self._reached = reached

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        self._reached.append(f"it ran torch's {func}")
        raise OutOfReach(self._reached[-1])


@contextlib.contextmanager
def out_of_reach() -> Generator[list[str]]:
    """Make tensors and questions to devices raise; what was reached for is also in the list, if that was caught."""
    reached = list[str]()
    known = [(module, name, getattr(module, name, None)) for module, names in _DEVICE_QUERIES.items() for name in names]
    queries = [query for query in known if query[2] is not None]
    try:
        for module, name, _ in queries:
            setattr(module, name, _forbidden(module, name, reached))
        with _NoTensors(reached):
            yield reached
    finally:
        for module, name, query in queries:
            setattr(module, name, query)


def _forbidden(module: Any, name: str, reached: list[str]) -> Callable[..., NoReturn]:
    def query(*args: object, **kwargs: object) -> NoReturn:
        del args, kwargs
        reached.append(f"it asked a device: {module.__name__}.{name}()")
        raise OutOfReach(reached[-1])

    return query


@contextlib.contextmanager
def elsewhere() -> Generator[None]:
    """Other global state, for as long as the context lasts: no environment, another default dtype, no gradients."""
    dtype = torch.get_default_dtype()
    with mock.patch.dict(os.environ, clear=True), torch.no_grad():
        torch.set_default_dtype(torch.bfloat16 if dtype is not torch.bfloat16 else torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
