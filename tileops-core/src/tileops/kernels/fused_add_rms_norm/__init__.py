"""Kernels of a sum and its RMS norm: their interface, and ours."""

from tileops.kernels.fused_add_rms_norm.held_row import HeldRowFusedAddRMSNorm
from tileops.kernels.fused_add_rms_norm.interface import FusedAddRMSNorm, FusedAddRMSNormCall
from tileops.kernels.fused_add_rms_norm.streamed_row import StreamedRowFusedAddRMSNorm

__all__ = ["FusedAddRMSNorm", "FusedAddRMSNormCall", "HeldRowFusedAddRMSNorm", "StreamedRowFusedAddRMSNorm"]
