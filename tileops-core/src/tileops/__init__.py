"""Tensor operators for PyTorch in which one op can have many kernels and each call finds the right one.

    from tileops.norm import LayerNormFwdOp

    y = LayerNormFwdOp((4096,))(x, weight, bias)

Names are resolved on first use: `import tileops` imports neither an op nor a compiler, and loads no backend. It
makes `torch.ops.tileops` known to torch, so that a program which another process exported can be loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

import tileops.torch_namespace  # noqa: F401 - for what it does  # pyright: ignore[reportUnusedImport]

if TYPE_CHECKING:
    from tileops import functional, nn
    from tileops.backend import register_kernel_builder, register_kernel_type, unregister_kernel_type
    from tileops.call_spec import CallSpec, SizeClass
    from tileops.device import DeviceFacts, at_least
    from tileops.errors import (
        AmbiguousDispatchError,
        AmbiguousTargetError,
        BackendError,
        BackendLoadWarning,
        BuildError,
        CaptureError,
        DeclarationError,
        InputError,
        KernelFaultWarning,
        OpNotAvailableError,
        RegistrationError,
        ScopeError,
        TargetDeclinedError,
        TileopsError,
        UnknownTargetError,
    )
    from tileops.kernels.kernel_base import Entry, Kernel, KernelInterface
    from tileops.ops import (
        BackwardOp,
        BatchNormBwdOp,
        BatchNormFwdOp,
        FusedAddLayerNormFwdOp,
        FusedAddRMSNormFwdOp,
        GroupNormBwdOp,
        GroupNormFwdOp,
        InstanceNormBwdOp,
        InstanceNormFwdOp,
        LayerNormBwdOp,
        LayerNormFwdOp,
        RMSNormBwdOp,
        RMSNormFwdOp,
    )
    from tileops.ops.op_base import Op, clear
    from tileops.ops.trials import Tuning
    from tileops.scopes import checkpoint_contexts, selection, set_default_selection
    from tileops.torch_schema import TorchOp
    from tileops.verdict import IN_TREE, Selection, Verdict

_HOME: Final = {
    "IN_TREE": "verdict",
    "AmbiguousDispatchError": "errors",
    "AmbiguousTargetError": "errors",
    "BackendError": "errors",
    "BackendLoadWarning": "errors",
    "BackwardOp": "ops",
    "BatchNormBwdOp": "ops",
    "BatchNormFwdOp": "ops",
    "BuildError": "errors",
    "CaptureError": "errors",
    "CallSpec": "call_spec",
    "DeclarationError": "errors",
    "DeviceFacts": "device",
    "Entry": "kernels.kernel_base",
    "FusedAddLayerNormFwdOp": "ops",
    "FusedAddRMSNormFwdOp": "ops",
    "GroupNormBwdOp": "ops",
    "GroupNormFwdOp": "ops",
    "InputError": "errors",
    "InstanceNormBwdOp": "ops",
    "InstanceNormFwdOp": "ops",
    "Kernel": "kernels.kernel_base",
    "KernelFaultWarning": "errors",
    "KernelInterface": "kernels.kernel_base",
    "LayerNormBwdOp": "ops",
    "LayerNormFwdOp": "ops",
    "Op": "ops.op_base",
    "OpNotAvailableError": "errors",
    "RMSNormBwdOp": "ops",
    "RMSNormFwdOp": "ops",
    "RegistrationError": "errors",
    "ScopeError": "errors",
    "Selection": "verdict",
    "SizeClass": "call_spec",
    "TargetDeclinedError": "errors",
    "TileopsError": "errors",
    "TorchOp": "torch_schema",
    "Tuning": "ops.trials",
    "UnknownTargetError": "errors",
    "Verdict": "verdict",
    "at_least": "device",
    "checkpoint_contexts": "scopes",
    "clear": "ops.op_base",
    "functional": "functional",
    "nn": "nn",
    "register_kernel_builder": "backend",
    "register_kernel_type": "backend",
    "selection": "scopes",
    "set_default_selection": "scopes",
    "unregister_kernel_type": "backend",
}

__all__ = [
    "IN_TREE",
    "AmbiguousDispatchError",
    "AmbiguousTargetError",
    "BackendError",
    "BackendLoadWarning",
    "BackwardOp",
    "BatchNormBwdOp",
    "BatchNormFwdOp",
    "BuildError",
    "CallSpec",
    "CaptureError",
    "DeclarationError",
    "DeviceFacts",
    "Entry",
    "FusedAddLayerNormFwdOp",
    "FusedAddRMSNormFwdOp",
    "GroupNormBwdOp",
    "GroupNormFwdOp",
    "InputError",
    "InstanceNormBwdOp",
    "InstanceNormFwdOp",
    "Kernel",
    "KernelFaultWarning",
    "KernelInterface",
    "LayerNormBwdOp",
    "LayerNormFwdOp",
    "Op",
    "OpNotAvailableError",
    "RMSNormBwdOp",
    "RMSNormFwdOp",
    "RegistrationError",
    "ScopeError",
    "Selection",
    "SizeClass",
    "TargetDeclinedError",
    "TileopsError",
    "TorchOp",
    "Tuning",
    "UnknownTargetError",
    "Verdict",
    "at_least",
    "checkpoint_contexts",
    "clear",
    "functional",
    "nn",
    "register_kernel_builder",
    "register_kernel_type",
    "selection",
    "set_default_selection",
    "unregister_kernel_type",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("tileops-core")
    if name not in _HOME:
        raise AttributeError(f"module 'tileops' has no attribute {name!r}; it has: {', '.join(_HOME)}")
    module = importlib.import_module(f"tileops.{_HOME[name]}")
    return module if name == _HOME[name] else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
