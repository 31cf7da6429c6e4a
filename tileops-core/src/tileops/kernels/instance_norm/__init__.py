"""Kernels of instance norm that updates running statistics: their interface, and ours."""

from tileops.kernels.instance_norm.cluster_row import ClusterRowInstanceNormTrain
from tileops.kernels.instance_norm.held_row import HeldRowInstanceNormTrain
from tileops.kernels.instance_norm.interface import InstanceNormTrain, InstanceNormTrainCall
from tileops.kernels.instance_norm.split_row import SplitRowInstanceNormTrain

__all__ = [
    "ClusterRowInstanceNormTrain",
    "HeldRowInstanceNormTrain",
    "InstanceNormTrain",
    "InstanceNormTrainCall",
    "SplitRowInstanceNormTrain",
]
