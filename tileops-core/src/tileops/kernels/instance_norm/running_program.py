# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""What instance norm's running statistics become: a sum over the batch, in a fixed order."""

from typing import Any

import tilelang.language as T

from tileops.kernels.compiled_program import traced
from tileops.kernels.shared_program import WARP, group_sum

__all__ = ["instance_norm_running"]

ACROSS = 32
"""Channels of a block, and threads of each."""


def instance_norm_running() -> Any:
    """Mean over the batch of `statistics` (2, batch, channels), mixed into running_mean and running_var (channels).

    The program takes statistics, running_mean, running_var and momentum, the share of what is new.
    """
    batch, channels = T.dynamic("batch"), T.dynamic("channels")

    @traced(T.prim_func)
    def instance_norm_running(
        statistics: T.Tensor((2, batch, channels), "float32"),
        running_mean: T.Tensor((channels,), "float32"),
        running_var: T.Tensor((channels,), "float32"),
        momentum: T.float32,
    ):
        with T.Kernel(T.ceildiv(channels, ACROSS), 2, threads=ACROSS * WARP) as (tile, which):
            total = T.alloc_local((1,), "float32")
            slots = T.alloc_shared((WARP, ACROSS + 1), "float32")  # the odd length spreads a column over the banks
            thread = T.get_thread_binding()
            channel = tile * ACROSS + thread % ACROSS
            total[0] = 0.0
            for turn in T.serial(T.ceildiv(batch, WARP)):
                sample = turn * WARP + thread // ACROSS
                if (sample < batch) and (channel < channels):
                    total[0] = total[0] + statistics[which, sample, channel]
            slots[thread // ACROSS, thread % ACROSS] = total[0]
            T.sync_threads()
            total[0] = slots[thread % WARP, thread // WARP]
            group_sum(total, 1, WARP)
            updated = tile * ACROSS + thread // WARP
            if (thread % WARP == 0) and (updated < channels):
                mean = total[0] / T.cast(batch, "float32")
                if which == 0:
                    running_mean[updated] = running_mean[updated] * (1.0 - momentum) + mean * momentum
                else:
                    running_var[updated] = running_var[updated] * (1.0 - momentum) + mean * momentum

    return instance_norm_running
