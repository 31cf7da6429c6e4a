"""Kernels of instance norm that updates running statistics: their interface, and ours."""

from tileops.kernels.instance_norm.held_row import HeldRowInstanceNormTrain
from tileops.kernels.instance_norm.interface import InstanceNormTrain, InstanceNormTrainCall
from tileops.kernels.instance_norm.split_row import SplitRowInstanceNormTrain

__all__ = ["HeldRowInstanceNormTrain", "InstanceNormTrain", "InstanceNormTrainCall", "SplitRowInstanceNormTrain"]
