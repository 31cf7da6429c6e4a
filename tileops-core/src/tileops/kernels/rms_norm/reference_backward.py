"""RMS norm's backward in plain torch."""

from __future__ import annotations

from typing import final

from tileops.kernels.by_reference import BackwardByReference
from tileops.kernels.rms_norm.backward_interface import RMSNormBwd


@final
class ReferenceRMSNormBwd(BackwardByReference, RMSNormBwd):
    """Any row length."""
