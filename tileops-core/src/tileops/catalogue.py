"""Which ops there are, by name, known without importing one.

Registrations name an op by a string, so that a backend may register for an op that this release does not have;
the catalogue says what is known and which names are near.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

IN_TREE_OPS: Final[dict[str, str]] = {
    "BatchNormBwdOp": "tileops.ops.norm.batch_norm_backward",
    "BatchNormFwdOp": "tileops.ops.norm.batch_norm",
    "FusedAddLayerNormFwdOp": "tileops.ops.norm.fused_add_layer_norm",
    "FusedAddRMSNormFwdOp": "tileops.ops.norm.fused_add_rms_norm",
    "GroupNormBwdOp": "tileops.ops.norm.group_norm_backward",
    "GroupNormFwdOp": "tileops.ops.norm.group_norm",
    "InstanceNormBwdOp": "tileops.ops.norm.instance_norm_backward",
    "InstanceNormFwdOp": "tileops.ops.norm.instance_norm",
    "LayerNormBwdOp": "tileops.ops.norm.layer_norm_backward",
    "LayerNormFwdOp": "tileops.ops.norm.layer_norm",
    "RMSNormBwdOp": "tileops.ops.norm.rms_norm_backward",
    "RMSNormFwdOp": "tileops.ops.norm.rms_norm",
}
"""The ops of this release: class name → the module that defines it."""

_classes: dict[str, type[Any]] = {}


def add_op(cls: type[Any]) -> None:
    """Enter an op class, when it is created. Of two classes with one name, a look-up finds the later."""
    _classes[cls.__name__] = cls


def op_names() -> tuple[str, ...]:
    """The names of every op that is known, sorted."""
    return tuple(sorted({*IN_TREE_OPS, *_classes}))


def find_op(name: str) -> type[Any] | None:
    """The op class called `name`, imported if it is one of ours; None where this release has no such op."""
    module = IN_TREE_OPS.get(name)
    if module is not None:
        return getattr(importlib.import_module(module), name)
    return _classes.get(name)


_NEAR: Final = 0.7
"""How like two names are, of 1, where one may be meant by the other. Names of ops share their ends."""


def nearest(name: str, known: tuple[str, ...]) -> str | None:
    """The known name that `name` was probably meant to be, or None."""
    import difflib

    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)), None)


def meant(name: str, known: tuple[str, ...]) -> str:
    """`; did you mean 'X'?`, or nothing: the end of a sentence about an unknown name."""
    near = nearest(name, known)
    return "" if near is None else f"; did you mean {near!r}?"
