"""What is tried: a backend's implementations, each at one interface of one op."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

from tileops.backend.loading import load
from tileops.backend.registration import registry
from tileops.backend.units import Builder, Implementation
from tileops.catalogue import IN_TREE_OPS, find_op, op_names
from tileops.errors import BackendLoadWarning
from tileops.kernels.kernel_base import Kernel, KernelInterface
from tileops.ops.implementations import implementations
from tileops.verdict import IN_TREE


@dataclasses.dataclass(frozen=True)
class Subject:
    """An implementation at one interface of one op.

    Args:
        op: The op class.
        interface_name: The interface's name in the op.
        implementation: The implementation.
    """

    op: type[Any]
    interface_name: str
    implementation: Implementation

    @property
    def interface(self) -> type[KernelInterface[Any]]:
        """The interface."""
        return self.op.interfaces[self.interface_name]

    @property
    def cls(self) -> type[Kernel[Any]]:
        """The kernel class."""
        return self.implementation.cls

    def __str__(self) -> str:
        """As the name of a test shows it."""
        return f"{self.op.__name__}.{self.interface_name}-{self.implementation.full_key}"


def load_quietly() -> None:
    """Load the installed backends. What cannot be loaded is in its record, which the rules read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BackendLoadWarning)
        load()


def subjects_of(backend: str) -> tuple[Subject, ...]:
    """The implementations of the backend called `backend` (`IN_TREE` for our own), wherever an op has them."""
    load_quietly()
    names = IN_TREE_OPS if backend == IN_TREE else op_names()
    return tuple(subject for name in names for subject in _of_op(name, backend))


def _of_op(name: str, backend: str) -> Iterator[Subject]:
    op = find_op(name)
    if op is None or (backend != IN_TREE and not registry().implementations(name)):
        return
    for interface in op.interfaces:
        for implementation in implementations(op, interface):
            if implementation.owner.name == backend:
                yield Subject(op, interface, implementation)


def builders_of(backend: str) -> tuple[Builder, ...]:
    """The builders of the backend's targets, for ops that this release has."""
    load_quietly()
    return tuple(one for one in registry().builders() if one.owner.name == backend and find_op(one.op) is not None)
