"""Every op, resolved on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tileops.catalogue import IN_TREE_OPS

if TYPE_CHECKING:
    from tileops.norm import (
        BatchNormFwdOp,
        FusedAddLayerNormFwdOp,
        FusedAddRMSNormFwdOp,
        LayerNormFwdOp,
        RMSNormFwdOp,
    )
    from tileops.ops.op_base import Op

__all__ = ["BatchNormFwdOp", "FusedAddLayerNormFwdOp", "FusedAddRMSNormFwdOp", "LayerNormFwdOp", "Op", "RMSNormFwdOp"]


def __getattr__(name: str) -> object:
    module = "tileops.ops.op_base" if name == "Op" else IN_TREE_OPS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(__all__)}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
