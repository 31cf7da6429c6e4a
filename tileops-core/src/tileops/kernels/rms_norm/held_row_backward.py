"""RMS norm's backward, of rows that fit in registers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import final

from torch import Tensor

from tileops.device import at_least
from tileops.kernels.dtypes import refusal_of_dtypes
from tileops.kernels.rms_norm.backward_interface import RMSNormBwd, RMSNormBwdCall
from tileops.kernels.row_backward import RowBackward, build_held


@final
class HeldRowRMSNormBwd(RMSNormBwd):
    """Reads x and the gradient once; blocks walk over the rows and keep their sums in registers or shared memory."""

    supported_archs = at_least(80)

    @classmethod
    def refusal(cls, call: RMSNormBwdCall) -> str | None:
        """Rows of a served dtype that 512 threads can hold beside their sums."""
        unserved = refusal_of_dtypes(call.dtype, weight=call.weight_dtype)
        return unserved or facts_of(call).refusal_to_hold(call.smem_budget)

    @classmethod
    def entry_for(cls, call: RMSNormBwdCall) -> tuple[Hashable, Callable[[], HeldRowRMSNormBwd]]:
        """One build serves every row count."""
        return (call.device, facts_of(call)), lambda: cls(call)

    def __init__(self, call: RMSNormBwdCall) -> None:
        super().__init__(call)
        self._gradients = build_held(facts_of(call), call.arch, call.sm_count, call.smem_budget)

    def forward(self, grad: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor | None, ...]:
        """Launch the programs on rows."""
        return self._gradients(grad, x, weight)[:2]


def facts_of(call: RMSNormBwdCall) -> RowBackward:
    """What the programs are built from."""
    return RowBackward(call.n, call.dtype, call.eps, call.weight_dtype, None, (*call.need, False), centred=False)
