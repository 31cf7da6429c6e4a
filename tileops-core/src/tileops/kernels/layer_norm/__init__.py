"""Layer norm kernels, forward and backward: their interfaces, and ours."""

from tileops.kernels.layer_norm.backward_interface import LayerNormBwd, LayerNormBwdCall
from tileops.kernels.layer_norm.held_row import HeldRowLayerNorm
from tileops.kernels.layer_norm.held_row_backward import HeldRowLayerNormBwd
from tileops.kernels.layer_norm.interface import LayerNorm, LayerNormCall
from tileops.kernels.layer_norm.streamed_row import StreamedRowLayerNorm
from tileops.kernels.layer_norm.streamed_row_backward import StreamedRowLayerNormBwd

__all__ = [
    "HeldRowLayerNorm",
    "HeldRowLayerNormBwd",
    "LayerNorm",
    "LayerNormBwd",
    "LayerNormBwdCall",
    "LayerNormCall",
    "StreamedRowLayerNorm",
    "StreamedRowLayerNormBwd",
]
