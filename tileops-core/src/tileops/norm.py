"""The ops of the norm family."""

from tileops.ops.norm.batch_norm import BatchNormFwdOp
from tileops.ops.norm.batch_norm_backward import BatchNormBwdOp
from tileops.ops.norm.fused_add_layer_norm import FusedAddLayerNormFwdOp
from tileops.ops.norm.fused_add_rms_norm import FusedAddRMSNormFwdOp
from tileops.ops.norm.group_norm import GroupNormFwdOp
from tileops.ops.norm.group_norm_backward import GroupNormBwdOp
from tileops.ops.norm.instance_norm import InstanceNormFwdOp
from tileops.ops.norm.instance_norm_backward import InstanceNormBwdOp
from tileops.ops.norm.layer_norm import LayerNormFwdOp
from tileops.ops.norm.layer_norm_backward import LayerNormBwdOp
from tileops.ops.norm.rms_norm import RMSNormFwdOp
from tileops.ops.norm.rms_norm_backward import RMSNormBwdOp

__all__ = [
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
    "RMSNormBwdOp",
    "RMSNormFwdOp",
]
