"""Batch norm's backward in inference: a map, and sums over channels where they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import final

from tileops.device import at_least
from tileops.kernels.batch_norm.backward_interface import BatchNormBwdCall, BatchNormBwdInfer
from tileops.kernels.batch_norm.backward_launch import identity_facts, split_entry
from tileops.kernels.batch_norm.regions import crosses_channels, run_of
from tileops.kernels.batch_norm.split_channel_backward import channel_programs
from tileops.kernels.batch_norm.split_column_backward import column_programs
from tileops.kernels.dtypes import refusal_of_dtypes
from tileops.kernels.kernel_base import Entry


@final
class ElementwiseBatchNormBwd(BatchNormBwdInfer):
    """One read and one write, vectors along runs of a channel where those are long, else across channels."""

    supported_archs = at_least(80)

    @classmethod
    def refusal(cls, call: BatchNormBwdCall) -> str | None:
        """Every shape, in the dtypes that our programs have."""
        return refusal_of_dtypes(call.dtype, weight=call.weight_dtype, bias=call.bias_dtype)

    @classmethod
    def entry_for(cls, call: BatchNormBwdCall) -> tuple[Hashable, Callable[[], Entry]]:
        """All batch sizes share the programs."""
        across = crosses_channels(call.spatial, call.dtype, call.channels_last)
        programs = column_programs if across else channel_programs
        identity = (across, *identity_facts(call, run_of(call)))
        return identity, lambda: split_entry(call, programs(call), training=False)
