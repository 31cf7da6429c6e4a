"""Kernels of a sum and its layer norm: their interface, and ours."""

from tileops.kernels.fused_add_layer_norm.held_row import HeldRowFusedAddLayerNorm
from tileops.kernels.fused_add_layer_norm.interface import FusedAddLayerNorm, FusedAddLayerNormCall
from tileops.kernels.fused_add_layer_norm.streamed_row import StreamedRowFusedAddLayerNorm

__all__ = ["FusedAddLayerNorm", "FusedAddLayerNormCall", "HeldRowFusedAddLayerNorm", "StreamedRowFusedAddLayerNorm"]
