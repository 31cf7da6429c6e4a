"""The hooks that a backend may implement, checked by pluggy.

A hook receives the functions it registers with, already bound to the backend, so nothing has to be imported
from tileops but `hookimpl`. pluggy refuses an unknown hook and a misspelt argument by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

PROJECT: Final = "tileops"
"""The name that pluggy puts before the attributes of its markers."""

PREFIX: Final = f"{PROJECT}_register_"
"""How the name of every hook begins."""

Hook = TypeVar("Hook", bound=Callable[..., Any])

RegisterKernelType = Callable[[str, str, type[Any]], None]
RegisterDeviceFacts = Callable[[str, Callable[[Any], Any]], None]


class RegisterDetector(Protocol):
    """What registers the detector of a target."""

    def __call__(self, target: str, detect: Callable[[Any], bool]) -> None:
        """See `tileops.backend.register_detector`."""
        ...


class RegisterKernelBuilder(Protocol):
    """What registers a builder of a target for an op."""

    def __call__(self, op: str, target: str, build_kernel: Callable[..., Any], *, per_op: bool = False) -> None:
        """See `tileops.backend.register_kernel_builder`."""
        ...


def hookimpl(function: Hook) -> Hook:
    """Mark a function of a backend as the implementation of the hook that it is named after."""
    import pluggy

    return pluggy.HookimplMarker(PROJECT)(function)


def tileops_register_kernels(register_kernel_type: RegisterKernelType) -> None:
    """Register kernels: call `register_kernel_type(op, key, cls)` for each."""
    del register_kernel_type


def tileops_register_targets(
    register_detector: RegisterDetector, register_kernel_builder: RegisterKernelBuilder
) -> None:
    """Register targets: `register_kernel_builder(op, target, build_kernel)` for each op that one takes over.

    `register_detector(target, detect)` gives it the devices that `detect` claims.
    """
    del register_detector, register_kernel_builder


def tileops_register_devices(register_device_facts: RegisterDeviceFacts) -> None:
    """Register readers of device facts: call `register_device_facts(device_type, read)` for each type."""
    del register_device_facts


SPECIFICATIONS: Final = (tileops_register_kernels, tileops_register_targets, tileops_register_devices)
"""The hooks. pluggy is imported where backends are loaded, not here: importing tileops stays cheap."""
