"""Norms as modules, and `replace`, which puts ours into a model that exists.

from tileops import nn

norm = nn.LayerNorm(4096)           # torch.nn.LayerNorm in everything but what runs
print(nn.replace(model))            # the norms of a model that exists, in place; nn.restore(model) undoes it
"""

from tileops.nn.norm import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    RMSNorm,
)
from tileops.nn.replacing import NORMS, ModuleReport, ReplaceReport, replace, restore

__all__ = [
    "NORMS",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "ModuleReport",
    "RMSNorm",
    "ReplaceReport",
    "replace",
    "restore",
]
