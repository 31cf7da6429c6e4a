"""Layer norm kernels, forward and backward: their interfaces, and ours."""

from tileops.kernels.layer_norm.backward_interface import LayerNormBwd, LayerNormBwdCall
from tileops.kernels.layer_norm.held_row import HeldRowLayerNorm
from tileops.kernels.layer_norm.interface import LayerNorm, LayerNormCall
from tileops.kernels.layer_norm.reference_backward import ReferenceLayerNormBwd
from tileops.kernels.layer_norm.streamed_row import StreamedRowLayerNorm

__all__ = [
    "HeldRowLayerNorm",
    "LayerNorm",
    "LayerNormBwd",
    "LayerNormBwdCall",
    "LayerNormCall",
    "ReferenceLayerNormBwd",
    "StreamedRowLayerNorm",
]
