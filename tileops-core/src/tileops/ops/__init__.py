"""Every op, resolved on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from tileops.catalogue import IN_TREE_OPS

if TYPE_CHECKING:
    from tileops.norm import (
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
    from tileops.ops.backward_op import BackwardOp
    from tileops.ops.op_base import Op

__all__ = [
    "BackwardOp",
    "BatchNormBwdOp",
    "BatchNormFwdOp",
    "FusedAddLayerNormFwdOp",
    "FusedAddRMSNormFwdOp",
    "GroupNormBwdOp",
    "GroupNormFwdOp",
    "InstanceNormBwdOp",
    "InstanceNormFwdOp",
    "LayerNormBwdOp",
    "LayerNormFwdOp",
    "Op",
    "RMSNormBwdOp",
    "RMSNormFwdOp",
]

_BASES: Final = {"BackwardOp": "tileops.ops.backward_op", "Op": "tileops.ops.op_base"}


def __getattr__(name: str) -> object:
    module = _BASES.get(name) or IN_TREE_OPS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(__all__)}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
