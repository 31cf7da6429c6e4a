"""What authors of backends import: registration, hooks, targets, and what became of installed backends.

A backend is a distribution with an entry point in the group `tileops.backends`:

    [project.entry-points."tileops.backends"]
    acme = "tileops_backend_acme"

The value is a module, an object with hooks, or a function. It registers at import by calling the functions
below, or implements the hooks that `hookimpl` marks. Users install it and change no code.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from tileops.backend.hooks import (
    RegisterDetector,
    RegisterDeviceFacts,
    RegisterKernelBuilder,
    RegisterKernelType,
    hookimpl,
)
from tileops.device import DeviceFacts, at_least
from tileops.errors import (
    AmbiguousDispatchError,
    AmbiguousTargetError,
    BackendError,
    BackendLoadError,
    BackendLoadWarning,
    BuildError,
    DeclarationError,
    Declined,
    KernelFaultWarning,
    OpNotAvailableError,
    RegistrationError,
    TargetDeclinedError,
    UnknownTargetError,
)
from tileops.kernels.kernel_base import Entry, Kernel, KernelInterface
from tileops.verdict import IN_TREE

if TYPE_CHECKING:
    from tileops.backend.loading import STRICT_VARIABLE, load
    from tileops.backend.policy import POLICY_VARIABLE
    from tileops.backend.recording import Recorder
    from tileops.backend.records import BackendRecord, State
    from tileops.backend.targets import TensorSpec, default_target, registered_targets, set_default_target
    from tileops.backend.units import BUILTIN, DeviceClaim

_ON_FIRST_USE: Final = {
    "BUILTIN": "units",
    "POLICY_VARIABLE": "policy",
    "STRICT_VARIABLE": "loading",
    "BackendRecord": "records",
    "State": "records",
    "TensorSpec": "targets",
    "default_target": "targets",
    "load": "loading",
    "registered_targets": "targets",
    "set_default_target": "targets",
}
"""Where the names are that need the tables of backends: importing this package does not need those."""

__all__ = [
    "BUILTIN",
    "IN_TREE",
    "POLICY_VARIABLE",
    "STRICT_VARIABLE",
    "AmbiguousDispatchError",
    "AmbiguousTargetError",
    "BackendError",
    "BackendLoadError",
    "BackendLoadWarning",
    "BackendRecord",
    "BuildError",
    "DeclarationError",
    "Declined",
    "DeviceFacts",
    "Entry",
    "Kernel",
    "KernelFaultWarning",
    "KernelInterface",
    "OpNotAvailableError",
    "RegisterDetector",
    "RegisterDeviceFacts",
    "RegisterKernelBuilder",
    "RegisterKernelType",
    "RegistrationError",
    "State",
    "TargetDeclinedError",
    "TensorSpec",
    "UnknownTargetError",
    "at_least",
    "default_target",
    "hookimpl",
    "load",
    "load_failures",
    "note",
    "register_detector",
    "register_device_facts",
    "register_kernel_builder",
    "register_kernel_type",
    "registered_targets",
    "set_default_target",
    "status",
    "unregister_kernel_type",
]


def __getattr__(name: str) -> object:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module 'tileops.backend' has no attribute {name!r}; it has: {', '.join(__all__)}")
    return getattr(importlib.import_module(f"tileops.backend.{_ON_FIRST_USE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def register_kernel_type(op: str, key: str, cls: type[Kernel[Any]]) -> None:
    """Add an implementation to an op. It takes effect at the next call of every instance of the op.

    Args:
        op: The op class's name, "LayerNormFwdOp". An op that this release does not have is kept and noted, and
            served when it appears.
        key: A name of yours for the implementation, in lower case: "short_rows". Tables and messages show it
            behind the backend's name, `acme:short_rows`, or `local:short_rows` where a program registers.
        cls: A subclass of one or more of the op's kernel interfaces.

    Raises:
        DeclarationError: The class fits no interface of the op, or declares what cannot hold.
        RegistrationError: The key is taken by another class. The same class again is no error.
    """
    _recorder_of_caller().register_kernel_type(op, key, cls)


def unregister_kernel_type(op: str, key: str) -> None:
    """Take back what the program registered under `key` (with or without `local:`) for the op called `op`.

    Raises:
        RegistrationError: Nothing of the program is registered there; it lists what is.
    """
    from tileops.backend.registration import commit, registry
    from tileops.backend.units import LOCAL

    bare = key.removeprefix(f"{LOCAL.name}:")
    unit = registry().units.get(LOCAL.name)
    kernels = () if unit is None else unit.kernels
    kept = tuple(item for item in kernels if (item[0], item[1].key) != (op, bare))
    if unit is None or kept == kernels:
        known = ", ".join(f"{name} {implementation.key!r}" for name, implementation in kernels) or "nothing"
        raise RegistrationError(f"the program has registered no {bare!r} for {op}; it has registered: {known}")
    if not commit(dataclasses.replace(unit, kernels=kept), after=unit):
        unregister_kernel_type(op, key)  # another thread registered something meanwhile


def register_detector(target: str, detect: DeviceClaim) -> None:
    """Let a target take ops over on the devices that it claims, for whoever names no target.

    Args:
        target: The target's name.
        detect: Called `detect(device)` with a `torch.device`; whether the target is for it. Asked once for each
            device, and again when something is registered. One that raises claims nothing and is warned about.

    Raises:
        RegistrationError: The target has another detector, or this one is not callable.
    """
    _recorder_of_caller().register_detector(target, detect)


def register_kernel_builder(op: str, target: str, build_kernel: Callable[..., Any], *, per_op: bool = False) -> None:
    """Let a target take over a whole op.

    Args:
        op: The op class's name. An op that this release does not have is kept and noted, and served when it
            appears.
        target: The target's name, which users pass as `target=`.
        build_kernel: Called `build_kernel(*TensorSpec | None in signature order, **params)` with the op's
            constructor parameters; returns a callable that takes the op's tensors and returns its result. Asked
            once for equal specs and parameters. It raises `Declined` for a call that it leaves to others.
        per_op: Whether each op object gets a kernel of its own, which dies with it, instead of one for all equal
            ops. For kernels that keep something between calls.

    Raises:
        RegistrationError: Somebody has a builder for that op and target, or this one is not callable.
    """
    _recorder_of_caller().register_kernel_builder(op, target, build_kernel, per_op=per_op)


def register_device_facts(device_type: str, read: Callable[[Any], DeviceFacts]) -> None:
    """Tell the facts of devices of a type that tileops does not know.

    Args:
        device_type: The `torch.device` type, such as "npu". "cuda" and "cpu" are read by tileops.
        read: Called `read(device)`, once for each device; returns `DeviceFacts`.
    """
    _recorder_of_caller().register_device_facts(device_type, read)


def note(reason: str) -> None:
    """Add a line to the record of the backend that calls, shown by `status()` and in later errors.

    For what a backend leaves out on this machine, and why: "no C++ compiler; torch kernels only".
    """
    _recorder_of_caller().note(reason)


def status() -> tuple[BackendRecord, ...]:
    """What became of each installed backend, and what the program registered itself, in order of name.

    Notes on names that this release does not have are as they are now: one goes when the op or the key appears.
    """
    from tileops.backend.loading import load
    from tileops.backend.registration import registry

    load()
    return registry().told()


def load_failures() -> list[str]:
    """The installed backends that could not be loaded, a line each: which, and why. `status()` has the tracebacks."""
    from tileops.backend.records import State

    failed = (record for record in status() if record.state in (State.FAILED, State.INCOMPATIBLE))
    return [f"{record.name} ({', '.join(record.entry_points)}): {record.reason}" for record in failed]


def _recorder_of_caller() -> Recorder:
    """What registers for whoever called the function that calls this one."""
    from tileops.backend.recording import recorder_of_caller

    return recorder_of_caller(3)
