"""Layer norm kernels: their interface, and ours."""

from tileops.kernels.layer_norm.held_row import HeldRowLayerNorm
from tileops.kernels.layer_norm.interface import LayerNorm, LayerNormCall
from tileops.kernels.layer_norm.streamed_row import StreamedRowLayerNorm

__all__ = ["HeldRowLayerNorm", "LayerNorm", "LayerNormCall", "StreamedRowLayerNorm"]
