"""How the kernels of group norm share out groups: arithmetic, without a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tileops.kernels.group_norm import GroupNormBwdCall, GroupNormCall
from tileops.kernels.group_norm.cluster_plan import cluster_plan
from tileops.kernels.group_norm.held_backward_plan import held_backward_plan
from tileops.kernels.group_norm.short_backward_plan import parts_of_samples, short_backward_plan
from tileops.kernels.group_norm.split_plan import piece_plan, split_plan
from tileops.norm import GroupNormBwdOp, GroupNormFwdOp

CUDA = torch.device("cuda", 0)
DTYPES = st.sampled_from([torch.float16, torch.float32])
BOARDS = [(80, 108, 166_912), (90, 132, 232_448), (120, 170, 101_376)]


@given(n=st.integers(1, 1 << 24), rows=st.integers(1, 4096), dtype=DTYPES)
def test_the_parts_of_a_row_cover_it_and_none_is_empty(n: int, rows: int, dtype: torch.dtype) -> None:
    plan = split_plan(n, dtype)
    part_vectors, parts = plan.cut(rows, 132)
    assert (parts - 1) * part_vectors < plan.vectors <= parts * part_vectors
    assert part_vectors % plan.threads == 0


@given(spatial=st.integers(1, 1 << 24), dtype=DTYPES)
def test_the_pieces_of_a_channel_cover_it_and_none_is_empty(spatial: int, dtype: torch.dtype) -> None:
    plan = piece_plan(spatial, dtype)
    assert (plan.pieces - 1) * plan.piece_vectors < plan.vectors <= plan.pieces * plan.piece_vectors
    assert plan.threads <= 256


@pytest.mark.parametrize(("arch", "sm_count", "smem_budget"), BOARDS)
@given(n=st.integers(1, 1 << 21), dtype=DTYPES)
def test_a_cluster_holds_the_row_that_it_takes_and_no_block_goes_without(
    arch: int, sm_count: int, smem_budget: int, n: int, dtype: torch.dtype
) -> None:
    plan = cluster_plan(n, dtype, arch, smem_budget)
    if plan is not None:
        assert arch >= 90
        assert plan.block_vectors <= plan.warps * 32 * (plan.held_steps + plan.parked_steps)
        assert plan.block_vectors * (plan.blocks - 1) < plan.vectors
        parked = plan.parked_steps * plan.warps * 32 * plan.vector * dtype.itemsize
        assert parked < smem_budget // 2


@pytest.mark.parametrize(("arch", "sm_count", "smem_budget"), BOARDS)
@given(channels=st.integers(1, 128), spatial=st.integers(1, 1 << 16), rows=st.integers(1, 1 << 12), dtype=DTYPES)
def test_warps_hold_every_channel_of_a_group_and_its_gradient(
    arch: int, sm_count: int, smem_budget: int, channels: int, spatial: int, rows: int, dtype: torch.dtype
) -> None:
    plan = held_backward_plan(channels, spatial, dtype, rows, arch, sm_count)
    if plan is not None:
        assert plan.steps * plan.warps_per_channel * 32 >= plan.vectors
        warps = plan.warps * plan.blocks
        assert warps * plan.channels_per_warp >= channels * plan.warps_per_channel
        assert plan.threads <= 1024
        assert plan.threads * plan.registers <= 1 << 16
        assert plan.held_registers < plan.registers


@given(n=st.integers(1, 1024), samples=st.integers(1, 1 << 16), groups=st.integers(1, 1 << 12), dtype=DTYPES)
def test_samples_are_cut_into_parts_that_have_some_and_blocks_that_fit_a_device(
    n: int, samples: int, groups: int, dtype: torch.dtype
) -> None:
    plan = short_backward_plan(n, dtype)
    if plan is not None:
        parts = parts_of_samples(plan, samples, groups, 132)
        assert parts == 1 or (parts <= samples and parts * groups <= 2 * 132)
        assert plan.elements * plan.lanes >= n


@pytest.mark.parametrize(("channels", "spatial"), [(32, 1), (8, 49), (8, 3136), (10, 4096), (16, 65536), (1, 784)])
def test_all_batch_sizes_and_numbers_of_groups_are_one_build_and_two_of_the_backward(
    channels: int, spatial: int
) -> None:
    identities, backward = set(), set()
    for rows in (1, 31, 64, 500, 4096, 1 << 20):
        call = GroupNormCall(CUDA, rows, channels, spatial, torch.float16).on("h200").normalised()
        identities.add(GroupNormFwdOp.kernel_types[GroupNormFwdOp(1).key_for("group_norm", call)].entry_for(call)[0])
        call = GroupNormBwdCall(CUDA, rows, channels, spatial, torch.float16).on("h200").normalised()
        key = GroupNormBwdOp.selection("group_norm_bwd", call).key
        assert key is not None
        backward.add(GroupNormBwdOp.kernel_types[key].entry_for(call)[0])
    assert len(identities) == 1
    assert len(backward) <= 2
