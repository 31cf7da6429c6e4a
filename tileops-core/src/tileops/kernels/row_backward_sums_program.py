# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""What blocks left of the sums over rows, added up in a fixed order."""

from typing import Any

import tilelang.language as T
import torch

from tileops.kernels.compiled_program import traced
from tileops.kernels.shared_program import WARP, group_sum, tilelang_dtype

__all__ = ["sums_of_parts"]

ACROSS = 32
"""Columns of a block, and threads of each."""

IN_FLIGHT = 4
"""Parts that a thread loads together."""


def sums_of_parts(
    n: int, weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None, *, launched_early: bool
) -> Any:
    """The sum of partials (sums, parts, n) over the parts: into grad_weight (n), grad_bias (n), as far as wanted.

    The program takes partials, and the results or None. Thirty-two threads share a column, and the order in which
    they add is fixed. A program that is launched early waits on the device for what leaves the partials: its launch then
    takes place while that runs (architectures from 90 on).
    """
    has_weight, has_bias = weight_dtype is not None, bias_dtype is not None
    weight_type = tilelang_dtype(weight_dtype or torch.float32)
    bias_type = tilelang_dtype(bias_dtype or torch.float32)
    count = has_weight + has_bias
    parts = T.dynamic("parts")

    @traced(T.prim_func)
    def sums_of_parts(
        partials: T.Tensor((count, parts, n), "float32"),
        grad_weight: T.Tensor((n,), weight_type),
        grad_bias: T.Tensor((n,), bias_type),
    ):
        with T.Kernel(T.ceildiv(n, ACROSS), count, threads=ACROSS * WARP) as (tile, which):
            total = T.alloc_local((1,), "float32")
            slots = T.alloc_shared((WARP, ACROSS + 1), "float32")  # the odd length spreads a column over the banks
            thread = T.get_thread_binding()
            column = tile * ACROSS + thread % ACROSS
            if launched_early:
                T.pdl_sync()
            total[0] = 0.0
            for turn in T.serial(T.ceildiv(parts, WARP * IN_FLIGHT)):
                for at in T.unroll(IN_FLIGHT):
                    part = (turn * IN_FLIGHT + at) * WARP + thread // ACROSS
                    if (part < parts) and (column < n):
                        total[0] = total[0] + partials[which, part, column]
            slots[thread // ACROSS, thread % ACROSS] = total[0]
            T.sync_threads()
            total[0] = slots[thread % WARP, thread // WARP]
            group_sum(total, 1, WARP)
            summed = tile * ACROSS + thread // WARP
            if (thread % WARP == 0) and (summed < n):
                if has_weight and has_bias:
                    if which == 0:
                        grad_weight[summed] = T.cast(total[0], weight_type)
                    else:
                        grad_bias[summed] = T.cast(total[0], bias_type)
                elif has_weight:
                    grad_weight[summed] = T.cast(total[0], weight_type)
                else:
                    grad_bias[summed] = T.cast(total[0], bias_type)

    return sums_of_parts
