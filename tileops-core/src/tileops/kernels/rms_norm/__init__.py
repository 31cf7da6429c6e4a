"""RMS norm kernels: their interface, and ours."""

from tileops.kernels.rms_norm.held_row import HeldRowRMSNorm
from tileops.kernels.rms_norm.interface import RMSNorm, RMSNormCall
from tileops.kernels.rms_norm.streamed_row import StreamedRowRMSNorm

__all__ = ["HeldRowRMSNorm", "RMSNorm", "RMSNormCall", "StreamedRowRMSNorm"]
