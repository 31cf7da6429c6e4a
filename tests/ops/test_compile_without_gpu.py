"""The CUDA kernels compile for the boards that they are declared for, also where no GPU is."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
from tileops.kernels.batch_norm import BatchNormBwdCall, BatchNormInferCall, BatchNormTrainCall
from tileops.kernels.fused_add_layer_norm import FusedAddLayerNormCall
from tileops.kernels.fused_add_rms_norm import FusedAddRMSNormCall
from tileops.kernels.group_norm import GroupNormBwdCall, GroupNormCall
from tileops.kernels.instance_norm import InstanceNormTrainCall
from tileops.kernels.kernel_base import kernels_of
from tileops.kernels.layer_norm import LayerNormBwdCall, LayerNormCall
from tileops.kernels.rms_norm import RMSNormBwdCall, RMSNormCall
from tileops.norm import (
    BatchNormBwdOp,
    BatchNormFwdOp,
    FusedAddLayerNormFwdOp,
    FusedAddRMSNormFwdOp,
    GroupNormBwdOp,
    GroupNormFwdOp,
    InstanceNormFwdOp,
    LayerNormBwdOp,
    LayerNormFwdOp,
    RMSNormBwdOp,
    RMSNormFwdOp,
)

CUDA = torch.device("cuda", 0)
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def has_compiler() -> bool:
    if shutil.which("nvcc") or os.environ.get("CUDA_HOME"):
        return True
    try:
        return bool(version("nvidia-cuda-nvcc"))
    except PackageNotFoundError:
        return False


pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="TileLang compiles CUDA on Linux"),
    pytest.mark.skipif(not has_compiler(), reason="no CUDA compiler: pip install -r requirements-nvcc.txt"),
]

# One call for every implementation: an entry builds all programs that it may launch.
CALLS = [
    (LayerNormFwdOp, "layer_norm", "held_row", LayerNormCall(CUDA, 4096, BRAIN, weight_dtype=BRAIN, bias_dtype=None)),
    (LayerNormFwdOp, "layer_norm", "streamed_row", LayerNormCall(CUDA, 50_001, SINGLE)),
    (LayerNormBwdOp, "layer_norm_bwd", "held_row", LayerNormBwdCall(CUDA, 4096, BRAIN, bias_dtype=BRAIN)),
    (LayerNormBwdOp, "layer_norm_bwd", "streamed_row", LayerNormBwdCall(CUDA, 50_001, SINGLE)),
    (RMSNormFwdOp, "rms_norm", "held_row", RMSNormCall(CUDA, 128, HALF, 1e-6)),
    (RMSNormFwdOp, "rms_norm", "streamed_row", RMSNormCall(CUDA, 1 << 18, SINGLE, 1e-6)),
    (RMSNormBwdOp, "rms_norm_bwd", "held_row", RMSNormBwdCall(CUDA, 128, HALF, 1e-6, need=(True, False))),
    (RMSNormBwdOp, "rms_norm_bwd", "held_row", RMSNormBwdCall(CUDA, 3000, SINGLE, 1e-6)),
    (RMSNormBwdOp, "rms_norm_bwd", "streamed_row", RMSNormBwdCall(CUDA, 1 << 16, BRAIN, 1e-6, need=(True, False))),
    (FusedAddLayerNormFwdOp, "fused_add_layer_norm", "held_row", FusedAddLayerNormCall(CUDA, 4096, BRAIN, 1e-6, BRAIN)),
    (FusedAddLayerNormFwdOp, "fused_add_layer_norm", "streamed_row", FusedAddLayerNormCall(CUDA, 200_003, HALF)),
    (FusedAddRMSNormFwdOp, "fused_add_rms_norm", "held_row", FusedAddRMSNormCall(CUDA, 4096, BRAIN, 1e-6, BRAIN)),
    (FusedAddRMSNormFwdOp, "fused_add_rms_norm", "streamed_row", FusedAddRMSNormCall(CUDA, 1 << 16, SINGLE)),
    (
        BatchNormFwdOp,
        "batch_norm_fwd_train",
        "held_column",
        BatchNormTrainCall(CUDA, 8, 6, 49, SINGLE, channels_last=True),
    ),
    (BatchNormFwdOp, "batch_norm_fwd_train", "split_column", BatchNormTrainCall(CUDA, 8192, 1024, 1, HALF)),
    (BatchNormFwdOp, "batch_norm_fwd_train", "held_channel", BatchNormTrainCall(CUDA, 32, 64, 12544, HALF)),
    (BatchNormFwdOp, "batch_norm_fwd_train", "split_channel", BatchNormTrainCall(CUDA, 4, 128, 1 << 20, HALF)),
    (BatchNormFwdOp, "batch_norm_fwd_infer", "elementwise", BatchNormInferCall(CUDA, 64, 49, BRAIN)),
    (BatchNormFwdOp, "batch_norm_fwd_infer", "elementwise", BatchNormInferCall(CUDA, 64, 49, HALF, channels_last=True)),
    (BatchNormBwdOp, "batch_norm_bwd_train", "held_column", BatchNormBwdCall(CUDA, 8, 6, 49, SINGLE, True)),
    (BatchNormBwdOp, "batch_norm_bwd_train", "split_column", BatchNormBwdCall(CUDA, 8192, 1024, 1, HALF)),
    (BatchNormBwdOp, "batch_norm_bwd_train", "held_channel", BatchNormBwdCall(CUDA, 32, 256, 3136, BRAIN)),
    (BatchNormBwdOp, "batch_norm_bwd_train", "split_channel", BatchNormBwdCall(CUDA, 4, 128, 1 << 20, HALF)),
    (BatchNormBwdOp, "batch_norm_bwd_infer", "elementwise", BatchNormBwdCall(CUDA, 8, 64, 196, BRAIN)),
    (
        BatchNormBwdOp,
        "batch_norm_bwd_infer",
        "elementwise",
        BatchNormBwdCall(CUDA, 8, 64, 49, HALF, True, need=(True, False, False), bias_dtype=None),
    ),
    (GroupNormFwdOp, "group_norm", "held_row", GroupNormCall(CUDA, 2048, 32, 1, HALF, weight_dtype=HALF)),
    (GroupNormFwdOp, "group_norm", "cluster_row", GroupNormCall(CUDA, 512, 4, 16384, HALF)),
    (GroupNormFwdOp, "group_norm", "split_row", GroupNormCall(CUDA, 32, 16, 65536, SINGLE, bias_dtype=None)),
    (
        InstanceNormFwdOp,
        "instance_norm_train",
        "held_row_train",
        InstanceNormTrainCall(CUDA, 2048, 3136, HALF, weight_dtype=None),
    ),
    (InstanceNormFwdOp, "instance_norm_train", "cluster_row_train", InstanceNormTrainCall(CUDA, 64, 262144, HALF)),
    (
        InstanceNormFwdOp,
        "instance_norm_train",
        "split_row_train",
        InstanceNormTrainCall(CUDA, 256, 1 << 20, SINGLE, weight_dtype=None, bias_dtype=None),
    ),
    (GroupNormBwdOp, "group_norm_bwd", "short_row", GroupNormBwdCall(CUDA, 2048, 32, 1, HALF)),
    (GroupNormBwdOp, "group_norm_bwd", "held_row", GroupNormBwdCall(CUDA, 1024, 8, 3136, HALF)),
    (GroupNormBwdOp, "group_norm_bwd", "split_row", GroupNormBwdCall(CUDA, 32, 16, 65536, BRAIN)),
]


@pytest.mark.parametrize(("op", "interface", "key", "call"), CALLS, ids=lambda value: str(value)[:60])
def test_a_kernel_for_an_h200_is_selected_and_compiles(op, interface, key, call):
    stated = call.on("h200").normalised()
    selection = op.selection(interface, stated)
    assert selection.key == key
    _, factory = op.kernel_types[key].entry_for(stated)
    assert kernels_of(factory())


def test_every_in_tree_kernel_has_a_call_here():
    compiled = {op.kernel_types[key] for op, _, key, _ in CALLS}
    forward = (LayerNormFwdOp, RMSNormFwdOp, FusedAddLayerNormFwdOp, FusedAddRMSNormFwdOp, BatchNormFwdOp)
    ops = (*forward, GroupNormFwdOp, InstanceNormFwdOp, LayerNormBwdOp, RMSNormBwdOp, BatchNormBwdOp, GroupNormBwdOp)
    declared = {kernel for op in ops for kernel in op.kernel_types.values()}
    assert compiled == declared


OTHER_BOARDS = [
    (LayerNormFwdOp, "layer_norm", LayerNormCall(CUDA, 1024, HALF)),
    (LayerNormBwdOp, "layer_norm_bwd", LayerNormBwdCall(CUDA, 1024, HALF)),
    (FusedAddLayerNormFwdOp, "fused_add_layer_norm", FusedAddLayerNormCall(CUDA, 1024, HALF)),
    (GroupNormFwdOp, "group_norm", GroupNormCall(CUDA, 512, 4, 16384, HALF)),
]


@pytest.mark.parametrize("board", ["a100", "rtx5090"])
@pytest.mark.parametrize(
    ("op", "interface", "call"),
    OTHER_BOARDS,
    ids=["layer_norm", "layer_norm_bwd", "fused_add_layer_norm", "group_norm"],
)
def test_kernels_for_other_boards_compile(op, interface, call, board):
    stated = call.on(board)
    _, factory = op.kernel_types[op.selection(interface, stated).key].entry_for(stated)
    assert kernels_of(factory())


def test_threads_trace_programs_one_at_a_time():
    from tileops.kernels.compiled_program import traced

    inside = 0
    seen = list[int]()

    def trace(function):
        nonlocal inside
        inside += 1
        time.sleep(0.001)
        seen.append(inside)
        inside -= 1
        return function

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: traced(trace)(len), range(32)))
    assert seen == [1] * 32


# Implementations whose programs take their numbers as arguments, each with a call.
TAKES_NUMBERS = [
    *[one for one in CALLS if one[0] is not BatchNormFwdOp][::4],
    *[(BatchNormFwdOp, "batch_norm_fwd_train", key, call) for key, call in [
        ("held_column", BatchNormTrainCall(CUDA, 8, 6, 49, SINGLE, channels_last=True)),
        ("held_channel", BatchNormTrainCall(CUDA, 32, 64, 12544, HALF)),
        ("split_column", BatchNormTrainCall(CUDA, 8192, 1024, 1, HALF)),
        ("split_channel", BatchNormTrainCall(CUDA, 4, 128, 1 << 20, HALF)),
    ]],
    (BatchNormFwdOp, "batch_norm_fwd_infer", "elementwise", BatchNormInferCall(CUDA, 64, 49, BRAIN)),
]  # fmt: skip


@pytest.mark.parametrize(("op", "interface", "key", "call"), TAKES_NUMBERS, ids=lambda value: str(value)[:60])
def test_another_eps_or_momentum_is_an_entry_of_its_own_without_compiling(op, interface, key, call, monkeypatch):
    from tileops.kernels import compiled_program

    kernel = op.kernel_types[key]
    stated = call.on("h200").normalised()
    identity, factory = kernel.entry_for(stated)
    factory()
    monkeypatch.setattr(compiled_program.tilelang, "compile", lambda *_, **__: pytest.fail("it compiles"))
    numbers = {name: number for name, number in {"eps": 0.25, "momentum": 0.5}.items() if hasattr(call, name)}
    for name, number in numbers.items():
        other_identity, other_factory = kernel.entry_for(dataclasses.replace(stated, **{name: number}))
        assert other_identity != identity
        assert kernels_of(other_factory())


def test_the_text_of_a_macro_is_parsed_once_when_a_program_first_uses_it(monkeypatch):
    from tileops.kernels import compiled_program

    parsed = []
    monkeypatch.setattr(compiled_program.T, "macro", lambda function: parsed.append(function) or function)

    @compiled_program.macro
    def doubled(value):
        return 2 * value

    assert parsed == []
    assert [doubled(value) for value in (2, 3)] == [4, 6]
    assert parsed == [doubled.__wrapped__]
