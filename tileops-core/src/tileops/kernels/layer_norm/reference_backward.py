"""Layer norm's backward in plain torch."""

from __future__ import annotations

from typing import final

from tileops.kernels.by_reference import BackwardByReference
from tileops.kernels.layer_norm.backward_interface import LayerNormBwd


@final
class ReferenceLayerNormBwd(BackwardByReference, LayerNormBwd):
    """Any row length."""
