"""The configurations of kernels that hold a row in registers: what they list is fit to be built, for any row."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tileops import LayerNormFwdOp, RMSNormFwdOp
from tileops.kernels.layer_norm import LayerNormCall
from tileops.kernels.rms_norm import RMSNormCall
from tileops.kernels.row_plan import (
    HELD_BY_FUSED_RMS_NORM,
    HELD_BY_LAYER_NORM,
    HELD_BY_RMS_NORM,
    MOST_HELD,
    HeldLimits,
    held_row_configurations,
    held_row_plan,
    longest_held_row,
)

CUDA = torch.device("cuda", 0)
LIMITS = st.sampled_from([HELD_BY_LAYER_NORM, HELD_BY_RMS_NORM, HELD_BY_FUSED_RMS_NORM])
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])


@given(n=st.integers(1, 1 << 17) | st.integers(1, 1 << 14).map(lambda n: 8 * n), dtype=DTYPES, limits=LIMITS)
def test_every_configuration_is_a_plan_that_threads_can_hold(n: int, dtype: torch.dtype, limits: HeldLimits) -> None:
    plan, listed = held_row_plan(n, dtype, limits), held_row_configurations(n, dtype, limits)
    if plan is None:
        assert listed == []
        return
    plans = [dataclasses.replace(plan, **one) for one in listed]
    assert plans[0] == plan, "the default comes first"
    assert len(set(plans)) == len(plans)
    for one in plans:
        assert one.rows_per_block >= 1
        assert one.threads <= limits[-1][0]
        assert one.held_registers <= MOST_HELD
        assert one.lanes & (one.lanes - 1) == 0
        assert one.lanes <= 32 or (one.rows_per_block == 1 and one.lanes - 32 < one.vectors), "a warp without a vector"


def test_rows_that_no_threads_hold_have_none() -> None:
    longest = longest_held_row(4096, torch.float16, HELD_BY_RMS_NORM)
    assert held_row_configurations(2 * longest, torch.float16, HELD_BY_RMS_NORM) == []


@pytest.mark.parametrize(
    ("op", "call", "limits"),
    [
        (LayerNormFwdOp, LayerNormCall(CUDA, 4096, torch.bfloat16), HELD_BY_LAYER_NORM),
        (RMSNormFwdOp, RMSNormCall(CUDA, 4096, torch.bfloat16, 1e-6), HELD_BY_RMS_NORM),
    ],
)
def test_norms_of_held_rows_list_them(op: type[LayerNormFwdOp], call: LayerNormCall, limits: HeldLimits) -> None:
    listed = held_row_configurations(4096, torch.bfloat16, limits)
    assert op.kernel_types["held_row"].configurations(call) == listed
    assert len(listed) > 2
