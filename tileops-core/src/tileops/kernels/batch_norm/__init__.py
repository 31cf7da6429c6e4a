"""Batch norm kernels: their two interfaces, and ours."""

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
from tileops.kernels.batch_norm.split_channel import SplitChannelBatchNorm

__all__ = [
    "BatchNormInfer",
    "BatchNormInferCall",
    "BatchNormTrain",
    "BatchNormTrainCall",
    "ClusterChannelBatchNorm",
    "ColumnBatchNorm",
    "ElementwiseBatchNorm",
    "HeldChannelBatchNorm",
    "SplitChannelBatchNorm",
    "statistics_dtype",
]
