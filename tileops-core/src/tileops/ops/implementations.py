"""Which implementations an op has: its in-tree ones, and what is registered for it or for a base of it."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping
from typing import Any, Final

from tileops.backend.precedence import check_precedence
from tileops.backend.registration import registry, when_registry_changes
from tileops.backend.units import LOCAL, Implementation
from tileops.device import warn_user
from tileops.errors import BackendLoadWarning, DeclarationError
from tileops.kernels.declarations import check_kernel_class
from tileops.kernels.kernel_base import Kernel
from tileops.verdict import IN_TREE, Owner

OpClass = type[Any]
"""An op class: its `interfaces` and `kernel_types` are asked for here. `Op` itself lies above this module."""


def implementations(cls: OpClass, interface: str) -> list[Implementation]:
    """Every implementation of an interface of an op class: a key belongs to every interface its class subclasses.

    Raises:
        DeclarationError: What the program itself registered contradicts itself: two generals, a cycle.
    """
    wanted = cls.interfaces[interface]
    serving = [one for one in _all(cls) if issubclass(one.cls, wanted)]
    in_tree = [one for one in serving if one.owner.name == IN_TREE]
    check_precedence(wanted, [one for one in serving if one.owner == LOCAL], in_tree)
    return serving


def in_tree_implementations(kernel_types: Mapping[str, type[Kernel[Any]]]) -> list[Implementation]:
    """The op's own kernels as implementations. Those of a module that is not ours are not our distribution's."""
    ours, others = Owner(IN_TREE, core_distribution()), Owner(IN_TREE)
    return [
        Implementation(key, kernel, ours if kernel.__module__.startswith("tileops.") else others)
        for key, kernel in kernel_types.items()
    ]


def check_kernel_types(cls: OpClass) -> None:
    """Raise a `DeclarationError` for what an op's own table of kernels shows."""
    for key, kernel in cls.kernel_types.items():
        check_kernel_class(key, kernel, cls.interfaces.values())
        unknown = sorted(name for name in kernel.preferred_over - {IN_TREE, *cls.kernel_types} if ":" not in name)
        if unknown:
            raise DeclarationError(
                f"{cls.__name__}: {key!r} is preferred over {', '.join(unknown)}, and the op has no such key; it has: "
                f"{', '.join(cls.kernel_types)}"
            )
    for interface in cls.interfaces.values():
        check_precedence(interface, in_tree_implementations(cls.kernel_types), ())


@functools.lru_cache(maxsize=1024)
def _all(cls: OpClass) -> tuple[Implementation, ...]:
    names = [base.__name__ for base in cls.__mro__ if hasattr(base, "kernel_types")]
    registered = dict.fromkeys(one for name in names for one in registry().implementations(name))
    return (*in_tree_implementations(cls.kernel_types), *(one for one in registered if _fits(cls, one)))


when_registry_changes(_all.cache_clear)


_unfit: Final[set[tuple[OpClass, Implementation]]] = set()


def _fits(cls: OpClass, implementation: Implementation) -> bool:
    """Whether a class that may have been registered before its op existed fits the op; warns where not."""
    try:
        check_kernel_class(implementation.key, implementation.cls, cls.interfaces.values())
    except DeclarationError as error:
        shipped = implementation.owner.distribution or implementation.owner.name
        if (cls, implementation) not in _unfit:
            _unfit.add((cls, implementation))
            warn_user(f"{cls.__name__} goes without {implementation.full_key} ({shipped}): {error}", BackendLoadWarning)
        return False
    return True


@functools.lru_cache(maxsize=1)
def core_distribution() -> str:
    """Our distribution and its version, as pip shows them."""
    try:
        return f"tileops-core {importlib.metadata.version('tileops-core')}"
    except importlib.metadata.PackageNotFoundError:
        return "tileops-core"
