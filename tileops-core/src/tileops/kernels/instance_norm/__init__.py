"""Kernels of instance norm that updates running statistics: their interface, and ours."""

from tileops.kernels.instance_norm.interface import InstanceNormTrain, InstanceNormTrainCall
from tileops.kernels.instance_norm.reference_forward import ReferenceInstanceNormTrain

__all__ = ["InstanceNormTrain", "InstanceNormTrainCall", "ReferenceInstanceNormTrain"]
