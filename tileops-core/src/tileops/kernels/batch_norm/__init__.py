"""Batch norm kernels, forward and backward: their interfaces, and ours."""

from tileops.kernels.batch_norm.backward_interface import BatchNormBwdCall, BatchNormBwdInfer, BatchNormBwdTrain
from tileops.kernels.batch_norm.elementwise import ElementwiseBatchNorm
from tileops.kernels.batch_norm.elementwise_backward import ElementwiseBatchNormBwd
from tileops.kernels.batch_norm.held_channel import HeldChannelBatchNorm
from tileops.kernels.batch_norm.held_channel_backward import HeldChannelBatchNormBwd
from tileops.kernels.batch_norm.held_column import HeldColumnBatchNorm
from tileops.kernels.batch_norm.held_column_backward import HeldColumnBatchNormBwd
from tileops.kernels.batch_norm.interface import (
    BatchNormInfer,
    BatchNormInferCall,
    BatchNormTrain,
    BatchNormTrainCall,
    statistics_dtype,
)
from tileops.kernels.batch_norm.split_channel import SplitChannelBatchNorm
from tileops.kernels.batch_norm.split_channel_backward import SplitChannelBatchNormBwd
from tileops.kernels.batch_norm.split_column import SplitColumnBatchNorm
from tileops.kernels.batch_norm.split_column_backward import SplitColumnBatchNormBwd

__all__ = [
    "BatchNormBwdCall",
    "BatchNormBwdInfer",
    "BatchNormBwdTrain",
    "BatchNormInfer",
    "BatchNormInferCall",
    "BatchNormTrain",
    "BatchNormTrainCall",
    "ElementwiseBatchNorm",
    "ElementwiseBatchNormBwd",
    "HeldChannelBatchNorm",
    "HeldChannelBatchNormBwd",
    "HeldColumnBatchNorm",
    "HeldColumnBatchNormBwd",
    "SplitChannelBatchNorm",
    "SplitChannelBatchNormBwd",
    "SplitColumnBatchNorm",
    "SplitColumnBatchNormBwd",
    "statistics_dtype",
]
