"""Batch norm kernels, forward and backward: their interfaces, and ours."""

from tileops.kernels.batch_norm.backward_interface import BatchNormBwdCall, BatchNormBwdInfer, BatchNormBwdTrain
from tileops.kernels.batch_norm.cluster_channel import ClusterChannelBatchNorm
from tileops.kernels.batch_norm.column import ColumnBatchNorm
from tileops.kernels.batch_norm.elementwise import ElementwiseBatchNorm
from tileops.kernels.batch_norm.held_channel import HeldChannelBatchNorm
from tileops.kernels.batch_norm.interface import (
    BatchNormInfer,
    BatchNormInferCall,
    BatchNormTrain,
    BatchNormTrainCall,
    statistics_dtype,
)
from tileops.kernels.batch_norm.reference_backward import ReferenceBatchNormBwdInfer, ReferenceBatchNormBwdTrain
from tileops.kernels.batch_norm.split_channel import SplitChannelBatchNorm

__all__ = [
    "BatchNormBwdCall",
    "BatchNormBwdInfer",
    "BatchNormBwdTrain",
    "BatchNormInfer",
    "BatchNormInferCall",
    "BatchNormTrain",
    "BatchNormTrainCall",
    "ClusterChannelBatchNorm",
    "ColumnBatchNorm",
    "ElementwiseBatchNorm",
    "HeldChannelBatchNorm",
    "ReferenceBatchNormBwdInfer",
    "ReferenceBatchNormBwdTrain",
    "SplitChannelBatchNorm",
    "statistics_dtype",
]
