"""Group norm kernels, forward and backward: their interfaces, and ours."""

from tileops.kernels.group_norm.backward_interface import GroupNormBwd, GroupNormBwdCall
from tileops.kernels.group_norm.interface import GroupNorm, GroupNormCall
from tileops.kernels.group_norm.reference_backward import ReferenceGroupNormBwd
from tileops.kernels.group_norm.reference_forward import ReferenceGroupNorm

__all__ = [
    "GroupNorm",
    "GroupNormBwd",
    "GroupNormBwdCall",
    "GroupNormCall",
    "ReferenceGroupNorm",
    "ReferenceGroupNormBwd",
]
