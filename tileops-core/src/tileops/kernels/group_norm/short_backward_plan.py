"""Which short groups a part of a warp takes, beside the sums over the batch of all their elements."""

from __future__ import annotations

from typing import Final

import torch

from tileops.kernels.row_plan import RowPlan, ceil_div, power_of_two_from, vector_elements, vector_words

WARP: Final = 32

THREADS: Final = 256
"""Threads of a block, which takes as many rows at a time as fit."""

MOST_HELD: Final = 8
"""Registers with which a lane holds its part of x: 16 of 16-bit values, whose sums take 32 more."""

BLOCKS_PER_SM: Final = 2
"""Blocks for which samples are cut into parts: about what runs at a time."""


def short_backward_plan(n: int, dtype: torch.dtype) -> RowPlan | None:
    """The fewest lanes that hold a row of `n`; None where a warp does not."""
    vector = vector_elements(n, dtype)
    words = vector_words(vector, dtype)
    lanes = power_of_two_from(ceil_div(n // vector, MOST_HELD // words))
    return RowPlan(n, vector, words, lanes, THREADS // lanes) if lanes <= WARP else None


def parts_of_samples(plan: RowPlan, samples: int, groups: int, sm_count: int) -> int:
    """Into how many parts the samples are cut: one, unless blocks would be few and walk far."""
    return max(1, min(ceil_div(samples, plan.rows_per_block), BLOCKS_PER_SM * sm_count // groups))
