"""Group norm kernels, forward and backward: their interfaces, and ours."""

from tileops.kernels.group_norm.backward_interface import GroupNormBwd, GroupNormBwdCall
from tileops.kernels.group_norm.cluster_row import ClusterRowGroupNorm
from tileops.kernels.group_norm.held_backward import HeldRowGroupNormBwd
from tileops.kernels.group_norm.held_row import HeldRowGroupNorm
from tileops.kernels.group_norm.interface import GroupNorm, GroupNormCall
from tileops.kernels.group_norm.short_backward import ShortRowGroupNormBwd
from tileops.kernels.group_norm.split_backward import SplitRowGroupNormBwd
from tileops.kernels.group_norm.split_row import SplitRowGroupNorm

__all__ = [
    "ClusterRowGroupNorm",
    "GroupNorm",
    "GroupNormBwd",
    "GroupNormBwdCall",
    "GroupNormCall",
    "HeldRowGroupNorm",
    "HeldRowGroupNormBwd",
    "ShortRowGroupNormBwd",
    "SplitRowGroupNorm",
    "SplitRowGroupNormBwd",
]
