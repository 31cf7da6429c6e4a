"""What the declarations of a kernel class must be, checked when it is registered."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable
from typing import Any, Final, cast

from tileops.device import ArchRange
from tileops.errors import DeclarationError
from tileops.kernels.kernel_base import Kernel, KernelInterface, listed
from tileops.verdict import IN_TREE

_KEY: Final = re.compile(r"[a-z][a-z0-9_]*")
_REFERENCE: Final = re.compile(r"([a-z0-9][a-z0-9._-]*:)?[a-z][a-z0-9_]*")


def check_kernel_class(key: object, cls: object, interfaces: Iterable[type[KernelInterface[Any]]]) -> None:
    """Raise a `DeclarationError` for what the class alone shows: fits no interface, wrong `forward`, and so on.

    Args:
        key: The key it is registered under.
        cls: The class.
        interfaces: The interfaces of the op it is registered for.
    """
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise DeclarationError(
            f"{key!r} is no key: write letters, digits and underscores in lower case, such as 'short_rows'; "
            "a backend's name is put before it by the library"
        )
    if not inspect.isclass(cls):
        raise DeclarationError(f"{key!r} is registered with {cls!r}, which is not a class; give the class itself")
    kernel = cast("type[Kernel[Any]]", cls)
    served = [interface for interface in interfaces if issubclass(kernel, interface)]
    if not served:
        known = ", ".join(_name(interface) for interface in interfaces)
        raise DeclarationError(
            f"{_name(kernel)} (key {key!r}) implements no interface of this op; subclass one of: {known}"
        )
    _check_declarations(kernel)
    for interface in served:
        _check_forward(kernel, interface)


def _check_declarations(cls: type[Kernel[Any]]) -> None:
    declared = cast("Any", cls)
    devices = cast("frozenset[Any]", declared.devices)
    for method in ("refusal", "entry_for", "configurations"):
        if not isinstance(inspect.getattr_static(cls, method), classmethod):
            raise DeclarationError(f"{_name(cls)}.{method} must be a classmethod: it is asked before anything is built")
    if not isinstance(declared.devices, frozenset) or not devices or not all(isinstance(d, str) for d in devices):
        raise DeclarationError(f"{_name(cls)}.devices must be a frozenset of device types, not {devices!r}")
    if cls.supported_archs is not None and len(cls.devices) != 1:
        raise DeclarationError(
            f"{_name(cls)} states supported_archs and runs on {listed(cls.devices)}; architecture numbers mean "
            "something on one device type only: state one, or no supported_archs"
        )
    if not _are_archs(cls.supported_archs):
        raise DeclarationError(f"{_name(cls)}.supported_archs must be a set or at_least(…): {cls.supported_archs!r}")
    _check_preferences(cls)


def _are_archs(stated: object) -> bool:
    """Whether `supported_archs` is None, an open range, or a collection of numbers."""
    if stated is None or isinstance(stated, ArchRange):
        return True
    if isinstance(stated, str) or not isinstance(stated, Collection):
        return False
    return all(isinstance(arch, int) for arch in cast("Collection[object]", stated))


def _check_preferences(cls: type[Kernel[Any]]) -> None:
    stated = cast("Any", cls.preferred_over)
    if not isinstance(stated, frozenset):
        raise DeclarationError(f"{_name(cls)}.preferred_over must be a frozenset of keys, not {stated!r}")
    for key in cast("frozenset[Any]", stated):
        if key != IN_TREE and not (isinstance(key, str) and _REFERENCE.fullmatch(key)):
            raise DeclarationError(f"{_name(cls)}.preferred_over holds {key!r}, which is no key")
    if cls.general and cls.preferred_over - {IN_TREE}:
        raise DeclarationError(
            f"{_name(cls)} is general, hence below everything that is not; it may state no preferred_over "
            f"but IN_TREE, and states {listed(cls.preferred_over)}"
        )


def _check_forward(cls: type[Kernel[Any]], interface: type[KernelInterface[Any]]) -> None:
    """Raise unless `cls.forward` can be called with the interface's arguments, in its order."""
    if cls.forward is interface.forward:
        if cast("Any", cls.entry_for).__func__ is not cast("Any", Kernel.entry_for).__func__:
            return  # its factory gives an Entry, whose run has the contract
        raise DeclarationError(f"{_name(cls)} has no forward of its own; {interface.__qualname__} states its contract")
    wanted = list(inspect.signature(interface.forward).parameters.values())
    try:
        inspect.signature(cls.forward).bind(*[object() for _ in wanted])
    except TypeError as mismatch:
        arguments = ", ".join(parameter.name for parameter in wanted[1:])
        raise DeclarationError(
            f"{_name(cls)}.forward does not take the arguments of {interface.__qualname__} ({arguments}): {mismatch}"
        ) from None


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
