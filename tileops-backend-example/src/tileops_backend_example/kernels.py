"""The kernels of this backend: the op each is for, its key, its class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tileops.backend import note

from tileops_backend_example.tilelang_row import TileLangRowLayerNorm, toolchain_missing
from tileops_backend_example.torch_batch_norm import (
    TorchBatchNormBwdInfer,
    TorchBatchNormBwdTrain,
    TorchBatchNormInfer,
    TorchBatchNormTrain,
)
from tileops_backend_example.torch_fused_add_layer_norm import TorchFusedAddLayerNorm
from tileops_backend_example.torch_fused_add_rms_norm import TorchFusedAddRMSNorm
from tileops_backend_example.torch_group_norm import TorchGroupNorm, TorchGroupNormBwd
from tileops_backend_example.torch_instance_norm import TorchInstanceNormTrain
from tileops_backend_example.torch_layer_norm import TorchLayerNorm, TorchLayerNormBwd
from tileops_backend_example.torch_rms_norm import TorchRMSNorm, TorchRMSNormBwd


def buildable() -> Iterator[tuple[str, str, type[Any]]]:
    """Every kernel that can be built here; what is left out, and why, is noted in the backend's record."""
    yield "LayerNormFwdOp", "torch", TorchLayerNorm
    yield "RMSNormFwdOp", "torch", TorchRMSNorm
    yield "FusedAddLayerNormFwdOp", "torch", TorchFusedAddLayerNorm
    yield "FusedAddRMSNormFwdOp", "torch", TorchFusedAddRMSNorm
    yield "BatchNormFwdOp", "torch_train", TorchBatchNormTrain
    yield "BatchNormFwdOp", "torch_infer", TorchBatchNormInfer
    yield "GroupNormFwdOp", "torch", TorchGroupNorm
    yield "InstanceNormFwdOp", "torch", TorchGroupNorm
    yield "InstanceNormFwdOp", "torch_train", TorchInstanceNormTrain
    yield "InstanceNormFwdOp", "torch_infer", TorchBatchNormInfer
    yield "LayerNormBwdOp", "torch", TorchLayerNormBwd
    yield "RMSNormBwdOp", "torch", TorchRMSNormBwd
    yield "BatchNormBwdOp", "torch_train", TorchBatchNormBwdTrain
    yield "BatchNormBwdOp", "torch_infer", TorchBatchNormBwdInfer
    yield "GroupNormBwdOp", "torch", TorchGroupNormBwd
    yield "InstanceNormBwdOp", "torch", TorchGroupNormBwd
    yield "InstanceNormBwdOp", "torch_infer", TorchBatchNormBwdInfer
    if missing := toolchain_missing():
        note(f"layer norm in TileLang is left out: {missing}")
    else:
        yield "LayerNormFwdOp", "row", TileLangRowLayerNorm
