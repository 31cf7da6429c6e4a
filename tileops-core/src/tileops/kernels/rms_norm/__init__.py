"""RMS norm kernels, forward and backward: their interfaces, and ours."""

from tileops.kernels.rms_norm.backward_interface import RMSNormBwd, RMSNormBwdCall
from tileops.kernels.rms_norm.held_row import HeldRowRMSNorm
from tileops.kernels.rms_norm.held_row_backward import HeldRowRMSNormBwd
from tileops.kernels.rms_norm.interface import RMSNorm, RMSNormCall
from tileops.kernels.rms_norm.streamed_row import StreamedRowRMSNorm
from tileops.kernels.rms_norm.streamed_row_backward import StreamedRowRMSNormBwd

__all__ = [
    "HeldRowRMSNorm",
    "HeldRowRMSNormBwd",
    "RMSNorm",
    "RMSNormBwd",
    "RMSNormBwdCall",
    "RMSNormCall",
    "StreamedRowRMSNorm",
    "StreamedRowRMSNormBwd",
]
