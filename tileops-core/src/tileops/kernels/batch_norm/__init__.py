"""Batch norm kernels: their two interfaces, and ours."""

from tileops.kernels.batch_norm.elementwise import ElementwiseBatchNorm
from tileops.kernels.batch_norm.held_channel import HeldChannelBatchNorm
from tileops.kernels.batch_norm.held_column import HeldColumnBatchNorm
from tileops.kernels.batch_norm.interface import (
    BatchNormInfer,
    BatchNormInferCall,
    BatchNormTrain,
    BatchNormTrainCall,
    statistics_dtype,
)
from tileops.kernels.batch_norm.split_channel import SplitChannelBatchNorm
from tileops.kernels.batch_norm.split_column import SplitColumnBatchNorm

__all__ = [
    "BatchNormInfer",
    "BatchNormInferCall",
    "BatchNormTrain",
    "BatchNormTrainCall",
    "ElementwiseBatchNorm",
    "HeldChannelBatchNorm",
    "HeldColumnBatchNorm",
    "SplitChannelBatchNorm",
    "SplitColumnBatchNorm",
    "statistics_dtype",
]
