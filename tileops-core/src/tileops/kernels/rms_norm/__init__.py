"""RMS norm kernels, forward and backward: their interfaces, and ours."""

from tileops.kernels.rms_norm.backward_interface import RMSNormBwd, RMSNormBwdCall
from tileops.kernels.rms_norm.held_row import HeldRowRMSNorm
from tileops.kernels.rms_norm.interface import RMSNorm, RMSNormCall
from tileops.kernels.rms_norm.reference_backward import ReferenceRMSNormBwd
from tileops.kernels.rms_norm.streamed_row import StreamedRowRMSNorm

__all__ = [
    "HeldRowRMSNorm",
    "RMSNorm",
    "RMSNormBwd",
    "RMSNormBwdCall",
    "RMSNormCall",
    "ReferenceRMSNormBwd",
    "StreamedRowRMSNorm",
]
