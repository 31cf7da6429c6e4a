"""The ops of the norm family."""

from tileops.ops.norm.batch_norm import BatchNormFwdOp
from tileops.ops.norm.batch_norm_backward import BatchNormBwdOp
from tileops.ops.norm.layer_norm import LayerNormFwdOp
from tileops.ops.norm.layer_norm_backward import LayerNormBwdOp
from tileops.ops.norm.rms_norm import RMSNormFwdOp
from tileops.ops.norm.rms_norm_backward import RMSNormBwdOp

__all__ = [
    "BatchNormBwdOp",
    "BatchNormFwdOp",
    "LayerNormBwdOp",
    "LayerNormFwdOp",
    "RMSNormBwdOp",
    "RMSNormFwdOp",
]
