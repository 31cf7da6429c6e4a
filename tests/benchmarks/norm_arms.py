"""How each peer makes the calls that norms.py times.

An arm is made from the tensors of a call and returns a function without arguments that makes the call. The
backwards of torch, torch.compile, Liger and Quack are those that autograd runs for their forwards.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

EPS = 1e-5
GROUPS = 32
"""Groups of group norm."""

Call = Callable[[], Any]


@dataclasses.dataclass
class Tensors:
    """The arguments of one call. Those of x's size differ from call to call, the others are shared."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    mean: Tensor
    variance: Tensor
    residual: Tensor | None = None
    grad: Tensor | None = None

    @property
    def n(self) -> int:
        """The length of a row."""
        return self.x.shape[-1]


Forward = Callable[..., Any]
"""A function of x, the weight, the bias, and of what else `Tensors` holds by name."""


# ------------------------------------------------------------------------------------------------------------ torch


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Layer norm of the last axis."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, EPS)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm of the last axis."""
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def fused_add_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Layer norm of the sum, and the sum."""
    summed = x + residual
    return layer_norm(summed, weight, bias), summed


def fused_add_rms_norm(x: Tensor, weight: Tensor, *, residual: Tensor) -> tuple[Tensor, Tensor]:
    """RMS norm of the sum, and the sum."""
    summed = x + residual
    return rms_norm(summed, weight), summed


def batch_norm_train(x: Tensor, weight: Tensor, bias: Tensor, *, mean: Tensor, variance: Tensor) -> Tensor:
    """Batch norm that updates running statistics."""
    return F.batch_norm(x, mean, variance, weight, bias, training=True, eps=EPS)


def batch_norm_infer(x: Tensor, weight: Tensor, bias: Tensor, *, mean: Tensor, variance: Tensor) -> Tensor:
    """Batch norm by running statistics."""
    return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=EPS)


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Batch norm in training, without running statistics."""
    return F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Group norm."""
    return F.group_norm(x, GROUPS, weight, bias, EPS)


def instance_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Instance norm, without running statistics."""
    return F.instance_norm(x, None, None, weight, bias, use_input_stats=True, eps=EPS)


BESIDE = {
    "fused_add_layer_norm": ("residual",),
    "fused_add_rms_norm": ("residual",),
    "batch_norm_train": ("mean", "variance"),
    "batch_norm_infer": ("mean", "variance"),
}
"""What a forward takes besides x, weight and bias."""

WITHOUT_BIAS = ("rms_norm", "fused_add_rms_norm")

OF_TORCH: dict[str, Forward] = {
    forward.__name__: forward
    for forward in (
        layer_norm, rms_norm, fused_add_layer_norm, fused_add_rms_norm, batch_norm_train, batch_norm_infer,
        batch_norm, group_norm, instance_norm,
    )
}  # fmt: skip


def made(forward: Forward, op: str, tensors: Tensors) -> Call:
    """The call of a forward; of its backward where `op` is one."""
    norm = op.removesuffix("_bwd")
    inputs = [tensors.x, tensors.weight] if norm in WITHOUT_BIAS else [tensors.x, tensors.weight, tensors.bias]
    if norm == op:
        beside = {name: getattr(tensors, name) for name in BESIDE.get(op, ())}
        return functools.partial(forward, *inputs, **beside)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        output = forward(*leaves)
    return functools.partial(torch.autograd.grad, output, leaves, tensors.grad, retain_graph=True)


def torch_arm(op: str, tensors: Tensors) -> Call:
    """Torch, eager."""
    return made(OF_TORCH[op.removesuffix("_bwd")], op, tensors)


def compile_arm(op: str, tensors: Tensors) -> Call:
    """Torch, compiled for this one shape."""
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1 << 20
    torch._functorch.config.donated_buffer = False  # a backward that runs again needs its graph
    return made(torch.compile(OF_TORCH[op.removesuffix("_bwd")], dynamic=False), op, tensors)


# ------------------------------------------------------------------------------------------------------------- ours


def tileops_arm(op: str, tensors: Tensors) -> Call:
    """An eager call of our op."""
    call, arguments = ours(op, tensors)
    return functools.partial(call, *arguments)


def ours(op: str, tensors: Tensors) -> tuple[Any, Sequence[Tensor | None]]:
    """Our op, and what it is called with. TileOPs 0.1.0 has the same forwards."""
    from tileops import norm

    x, weight, bias, grad = tensors.x, tensors.weight, tensors.bias, tensors.grad
    statistics = (tensors.mean, tensors.variance)
    made_by: dict[str, Callable[[], tuple[Any, Sequence[Tensor | None]]]] = {
        "layer_norm": lambda: (norm.LayerNormFwdOp((tensors.n,), eps=EPS), (x, weight, bias)),
        "layer_norm_bwd": lambda: (norm.LayerNormBwdOp((tensors.n,), eps=EPS), (grad, x, weight)),
        "rms_norm": lambda: (norm.RMSNormFwdOp((tensors.n,), eps=EPS), (x, weight)),
        "rms_norm_bwd": lambda: (norm.RMSNormBwdOp((tensors.n,), eps=EPS), (grad, x, weight)),
        "fused_add_layer_norm": lambda: (norm.FusedAddLayerNormFwdOp(eps=EPS), (x, tensors.residual, weight, bias)),
        "fused_add_rms_norm": lambda: (norm.FusedAddRMSNormFwdOp(eps=EPS), (x, tensors.residual, weight)),
        "batch_norm_train": lambda: (norm.BatchNormFwdOp(training=True, eps=EPS), (x, *statistics, weight, bias)),
        "batch_norm_infer": lambda: (norm.BatchNormFwdOp(training=False, eps=EPS), (x, *statistics, weight, bias)),
        "batch_norm_bwd": lambda: (norm.BatchNormBwdOp(training=True), (grad, x, *saved(x), weight)),
        "group_norm": lambda: (norm.GroupNormFwdOp(GROUPS, eps=EPS), (x, weight, bias)),
        "group_norm_bwd": lambda: (norm.GroupNormBwdOp(GROUPS, eps=EPS), (grad, x, weight)),
        "instance_norm": lambda: (norm.InstanceNormFwdOp(eps=EPS), (x, None, None, weight, bias)),
        "instance_norm_bwd": lambda: (norm.InstanceNormBwdOp(eps=EPS), (grad, x, None, None, weight)),
    }
    return made_by[op]()


def saved(x: Tensor) -> tuple[Tensor, Tensor]:
    """The statistics that a batch norm in training saves for its backward."""
    axes = [0, *range(2, x.dim())]
    variance, mean = torch.var_mean(x.float(), dim=axes, correction=0)
    return mean, torch.rsqrt(variance + EPS)


# ----------------------------------------------------------------------------------------------------------- others


def liger_arm(op: str, tensors: Tensors) -> Call:
    """Liger's autograd functions, which its modules call; a gradient is new memory, as everybody's here."""
    from liger_kernel.ops import fused_add_rms_norm, group_norm, layer_norm, rms_norm

    def of_groups(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return group_norm.LigerGroupNormFunction.apply(x, weight, bias, x.shape[1], GROUPS, EPS)

    forwards: dict[str, Forward] = {
        "layer_norm": lambda x, weight, bias: layer_norm.LigerLayerNormFunction.apply(x, weight, bias, EPS),
        "rms_norm": lambda x, weight: rms_norm.LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False),
        "fused_add_rms_norm": lambda x, weight, residual: fused_add_rms_norm.LigerFusedAddRMSNormFunction.apply(
            x, residual, weight, EPS
        ),
        "group_norm": of_groups,
    }
    return made(_among(forwards, op), op, tensors)


def quack_arm(op: str, tensors: Tensors) -> Call:
    """Quack's forward of layer norm, which takes float32 weights alone; its autograd function of RMS norm."""
    from quack import rmsnorm as quack

    forwards: dict[str, Forward] = {
        "layer_norm": lambda x, weight, bias: quack.layernorm_fwd(x, weight, bias, eps=EPS),
        "rms_norm": lambda x, weight: quack.rmsnorm(x, weight, eps=EPS),
        "fused_add_rms_norm": lambda x, weight, residual: quack.rmsnorm(
            x, weight, None, residual, eps=EPS, prenorm=True
        ),
    }
    if op == "layer_norm":
        tensors = dataclasses.replace(tensors, weight=tensors.weight.float(), bias=tensors.bias.float())
    if op == "layer_norm_bwd":
        raise LookupError("no backward of layer norm with autograd")
    return made(_among(forwards, op), op, tensors)


def _among(forwards: dict[str, Forward], op: str) -> Forward:
    norm = op.removesuffix("_bwd")
    if norm not in forwards:
        raise LookupError(f"it has no {norm}")
    return forwards[norm]


ARMS: dict[str, Callable[[str, Tensors], Call]] = {
    "tileops": tileops_arm,
    "torch": torch_arm,
    "compile": compile_arm,
    "tileops0.1.0": tileops_arm,
    "liger": liger_arm,
    "quack": quack_arm,
}


def arm(name: str) -> Callable[[str, Tensors], Call]:
    """How `name` makes calls. Of another peer, its folder has a module `norm_peer` with such a function `arm`."""
    return ARMS[name] if name in ARMS else importlib.import_module("norm_peer").arm
