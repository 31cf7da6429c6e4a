"""Ops on DTensors, and models that several processes train: as one process would, and what moves between them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest
from ranks import Ranks

ROW_NORMS = ["layer_norm", "rms_norm"]
NOTHING: dict[str, int] = {}


@pytest.mark.parametrize("name", ROW_NORMS)
@pytest.mark.parametrize("placement", ["S0", "S1", "R"])
@pytest.mark.parametrize("shape", [(8, 4, 6), (5, 7, 6), (1, 1, 6)], ids=str)
def test_rows_stay_where_they_are_forward_and_backward(ranks: Ranks, name: str, placement: str, shape: Any) -> None:
    for moved in ranks.run("row_norm", name, shape, placement):
        assert moved["forward"] == moved["backward"] == NOTHING
        assert moved["y"] == moved["grad"]
        assert placement == "R" or placement[1] in moved["y"]


@pytest.mark.parametrize("name", ROW_NORMS)
def test_rows_that_are_sharded_themselves_are_gathered_once(ranks: Ranks, name: str) -> None:
    for moved in ranks.run("row_norm", name, (3, 4, 8), "S2"):
        assert moved["forward"] == {"all_gather": 1}


@pytest.mark.parametrize("name", ROW_NORMS)
def test_a_pending_sum_is_carried_out_by_a_scatter_over_the_rows(ranks: Ranks, name: str) -> None:
    for moved in ranks.run("row_norm", name, (8, 4, 6), "P"):
        assert moved["forward"] == {"reduce_scatter": 1}


@pytest.mark.parametrize("name", ["FusedAddLayerNormFwdOp", "FusedAddRMSNormFwdOp"])
def test_a_residual_is_sharded_as_x_is(ranks: Ranks, name: str) -> None:
    assert ranks.run("sum_and_norm", name, "S1") == [NOTHING] * ranks.world
    assert ranks.run("sum_and_norm", name, "S2") == [{"all_gather": 2}] * ranks.world


def test_the_normalised_shape_says_which_axes_are_rows(ranks: Ranks) -> None:
    ranks.run("normalised_shapes_in_turn")


def test_calls_without_gradients_and_in_inference_mode_are_sharded_too(ranks: Ranks) -> None:
    ranks.run("row_norm_without_gradients")


@pytest.mark.parametrize(
    "placements", [("S0", "S1"), ("S0", "S0"), ("S0", "R"), ("R", "S1"), ("S1", "S2"), ("P", "S0")]
)
@pytest.mark.parametrize("name", ROW_NORMS)
def test_a_mesh_may_have_two_axes(ranks: Ranks, name: str, placements: tuple[str, str]) -> None:
    ranks.run("row_norm", name, (8, 6, 8), *placements, mesh_of=(2, ranks.world // 2))


# ------------------------------------------------------------------------------------------------------ batch norm


@pytest.mark.parametrize("shape", [(16, 4), (7, 4, 5), (2, 4, 3, 5), (2, 4)], ids=str)
def test_a_sharded_batch_has_the_statistics_of_all_of_it(ranks: Ranks, shape: Any) -> None:
    for moved in ranks.run("batch_norm", shape, "S0"):
        assert (moved["forward"], moved["backward"]) == ({"all_gather": 1}, {"all_reduce": 1})
        assert moved["y"] == moved["grad"] == "(Shard(dim=0),)"


@pytest.mark.parametrize("options", [{"mean": 1000.0}, {"channels_last": True}, {"affine": False}], ids=str)
def test_statistics_are_right_for_large_means_any_memory_order_and_no_weights(ranks: Ranks, options: Any) -> None:
    ranks.run("batch_norm", (8, 4, 3, 5), "S0", **options)


@pytest.mark.parametrize("placement", ["S1", "S2", "R", "P"])
def test_statistics_are_right_wherever_the_batch_is(ranks: Ranks, placement: str) -> None:
    ranks.run("batch_norm", (6, 4, 9), placement)


@pytest.mark.parametrize("placements", [("S0", "S2"), ("S0", "S0"), ("R", "S0"), ("S0", "S1")])
def test_statistics_are_right_on_a_mesh_with_two_axes(ranks: Ranks, placements: tuple[str, str]) -> None:
    ranks.run("batch_norm", (8, 4, 6), *placements, mesh_of=(2, ranks.world // 2))


def test_inference_moves_nothing(ranks: Ranks) -> None:
    for moved in ranks.run("batch_norm", (7, 4, 5), "S0", training=False):
        assert moved["forward"] == moved["backward"] == NOTHING


def test_an_empty_batch_leaves_the_running_statistics(ranks: Ranks) -> None:
    ranks.run("an_empty_batch")


# ------------------------------------------------------------------------------------------ group and instance norm


@pytest.mark.parametrize(("name", "running"), [("group_norm", ""), ("instance_norm", ""), ("instance_norm", "by")])
@pytest.mark.parametrize("shape", [(8, 4, 6), (5, 4, 2, 3), (1, 4, 3)], ids=str)
def test_samples_stay_where_they_are_forward_and_backward(ranks: Ranks, name: str, running: str, shape: Any) -> None:
    for moved in ranks.run("sample_norm", name, shape, "S0", running=running):
        assert moved["forward"] == moved["backward"] == NOTHING
        assert moved["y"] == moved["grad"] == "(Shard(dim=0),)"


@pytest.mark.parametrize("shape", [(8, 4, 6), (5, 4, 2, 3), (1, 4, 3)], ids=str)
def test_running_statistics_are_those_of_the_samples_of_all_processes(ranks: Ranks, shape: Any) -> None:
    for moved in ranks.run("sample_norm", "instance_norm", shape, "S0", running="moved"):
        assert (moved["forward"], moved["backward"]) == ({"all_reduce": 1}, NOTHING)


@pytest.mark.parametrize("placement", ["S1", "S2", "R", "P"])
@pytest.mark.parametrize(("name", "running"), [("group_norm", ""), ("instance_norm", "moved"), ("instance_norm", "by")])
def test_samples_are_right_wherever_they_are(ranks: Ranks, name: str, running: str, placement: str) -> None:
    ranks.run("sample_norm", name, (6, 4, 9), placement, running=running)


# ---------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("what", ["layer", "batch"])
def test_compiled_calls_on_sharded_tensors_do_what_eager_ones_do(ranks: Ranks, what: str, backend: str) -> None:
    ranks.run("compiled", backend, what)


def test_modules_with_parameters_on_every_process_train_as_on_one(ranks: Ranks) -> None:
    ranks.run("modules_that_are_distributed")


def test_a_norm_is_sharded_along_the_sequence_by_torchs_own_style(ranks: Ranks) -> None:
    ranks.run("sequence_parallel")


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_a_model_with_our_norms_trains_as_with_torchs(ranks: Ranks, how: str) -> None:
    ranks.run("training", how)


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("plain weight", "weight is a plain tensor and x a DTensor; place both on one mesh: distribute_tensor(weight"),
        ("plain x", "x is a plain tensor and weight a DTensor; place both on one mesh: distribute_tensor(x, mesh)"),
        ("another mesh", "; place both on one mesh"),
        ("sharded statistics", "running_mean is written, and placed as (Shard(dim=0),); every process must hold all"),
        ("sharded statistics of instances", "running_mean is written, and placed as (Shard(dim=0),)"),
        ("one value", "x has shape (1, 4): one value per channel, which has no variance"),
        ("another shape", "weight has shape (3,); it must have (4,)"),
    ],
)
def test_what_does_not_fit_is_refused_on_every_process(ranks: Ranks, what: str, sentence: str) -> None:
    for came in ranks.run("refused", what):
        assert sentence in came


def test_a_program_without_dtensors_does_not_import_them() -> None:
    program = """
        import sys, torch, tileops

        x = torch.randn(4, 8, requires_grad=True)
        norms = torch.nn.Sequential(tileops.nn.LayerNorm(8), tileops.nn.RMSNorm(8), tileops.nn.BatchNorm1d(8))
        norms(x).sum().backward()
        torch.ops.tileops.layer_norm(x, None, None, (8,), 1e-5).sum().backward()
        print([name for name in sys.modules if name.startswith("torch.distributed.tensor")])
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "[]\n", done.stderr
