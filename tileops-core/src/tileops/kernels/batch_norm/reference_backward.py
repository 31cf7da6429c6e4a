"""Batch norm's backward in plain torch, in training and in inference."""

from __future__ import annotations

from typing import final

from tileops.kernels.batch_norm.backward_interface import BatchNormBwdInfer, BatchNormBwdTrain
from tileops.kernels.by_reference import BackwardByReference


@final
class ReferenceBatchNormBwdTrain(BackwardByReference, BatchNormBwdTrain):
    """Any shape."""


@final
class ReferenceBatchNormBwdInfer(BackwardByReference, BatchNormBwdInfer):
    """Any shape."""
