"""What host_time.py compares: for each peer, how a call of each op looks.

An arm is made from the tensors of a call and returns a function without arguments that makes the call. Weights
are parameters of x's dtype, where the peer takes that.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

Call = Callable[[], Any]
Make = Callable[[torch.Tensor, torch.nn.Parameter, torch.nn.Parameter], Call]

EPS = 1e-5


def _ours(x: torch.Tensor, op: str, *affine: torch.Tensor) -> tuple[Any, tuple[torch.Tensor, ...]]:
    from tileops.norm import LayerNormFwdOp, RMSNormFwdOp

    cls = {"layer_norm": LayerNormFwdOp, "rms_norm": RMSNormFwdOp}[op]
    return cls((x.shape[-1],), eps=EPS), (x, *affine)


def tileops_layer_norm(x: torch.Tensor, weight: torch.nn.Parameter, bias: torch.nn.Parameter) -> Call:
    """An eager call of the op. TileOPs 0.1.0 has the same names."""
    op, _ = _ours(x, "layer_norm", weight, bias)
    return lambda: op(x, weight, bias)


def tileops_rms_norm(x: torch.Tensor, weight: torch.nn.Parameter, bias: torch.nn.Parameter) -> Call:
    """An eager call of the op."""
    op, _ = _ours(x, "rms_norm", weight)
    return lambda: op(x, weight)


def floor_layer_norm(x: torch.Tensor, weight: torch.nn.Parameter, bias: torch.nn.Parameter) -> Call:
    """The output's allocation and the compiled launch: what no call can do without."""
    return _floor(*_ours(x, "layer_norm", weight, bias))


def floor_rms_norm(x: torch.Tensor, weight: torch.nn.Parameter, bias: torch.nn.Parameter) -> Call:
    """Likewise."""
    return _floor(*_ours(x, "rms_norm", weight))


def _floor(op: Any, tensors: tuple[torch.Tensor, ...]) -> Call:
    op(*tensors)
    selection = op.explain(*tensors)
    entry = op.kernel_for(selection.interface, selection.call)
    if not tensors[0].is_cuda:
        raise LookupError("no bare executable takes tensors on this device")
    floor = _launching(entry._launch, op.eps, *tensors)
    torch.testing.assert_close(floor(), op(*tensors))
    return floor


def _launching(
    launch: Callable[..., Any], eps: float, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Call:
    """The two written out: unpacking a tuple would cost the floor what no launch needs."""
    empty_like = torch.empty_like

    def with_bias() -> torch.Tensor:
        y = empty_like(x)
        launch(x, weight, bias, y, eps)
        return y

    def without_bias() -> torch.Tensor:
        y = empty_like(x)
        launch(x, weight, y, eps)
        return y

    return without_bias if bias is None else with_bias


def torch_layer_norm(x: torch.Tensor, weight: torch.nn.Parameter, bias: torch.nn.Parameter) -> Call:
    """Torch, eager."""
    shape = (x.shape[-1],)
    return lambda: F.layer_norm(x, shape, weight, bias, EPS)


def torch_rms_norm(x: torch.Tensor, weight: torch.nn.Parameter, bias: torch.nn.Parameter) -> Call:
    """Torch, eager."""
    shape = (x.shape[-1],)
    return lambda: F.rms_norm(x, shape, weight, EPS)


def compile_layer_norm(x: torch.Tensor, weight: torch.nn.Parameter, bias: torch.nn.Parameter) -> Call:
    """Torch, compiled."""
    shape = (x.shape[-1],)
    compiled = torch.compile(lambda x, weight, bias: F.layer_norm(x, shape, weight, bias, EPS))
    return functools.partial(compiled, x, weight, bias)


def compile_rms_norm(x: torch.Tensor, weight: torch.nn.Parameter, bias: torch.nn.Parameter) -> Call:
    """Torch, compiled."""
    shape = (x.shape[-1],)
    return functools.partial(torch.compile(lambda x, weight: F.rms_norm(x, shape, weight, EPS)), x, weight)


def liger_layer_norm(x: torch.Tensor, weight: torch.nn.Parameter, bias: torch.nn.Parameter) -> Call:
    """Liger's autograd function, which its modules call."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return functools.partial(LigerLayerNormFunction.apply, x, weight, bias, EPS)


def liger_rms_norm(x: torch.Tensor, weight: torch.nn.Parameter, bias: torch.nn.Parameter) -> Call:
    """Likewise."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return functools.partial(LigerRMSNormFunction.apply, x, weight, EPS)


def quack_layer_norm(x: torch.Tensor, weight: torch.nn.Parameter, bias: torch.nn.Parameter) -> Call:
    """Quack's forward, which takes float32 weights alone."""
    from quack.rmsnorm import layernorm_fwd

    wide = [torch.nn.Parameter(tensor.float()) for tensor in (weight, bias)]
    return functools.partial(layernorm_fwd, x, *wide, eps=EPS)


def quack_rms_norm(x: torch.Tensor, weight: torch.nn.Parameter, bias: torch.nn.Parameter) -> Call:
    """Quack's function with autograd."""
    from quack.rmsnorm import rmsnorm

    return functools.partial(rmsnorm, x, weight, eps=EPS)


ARMS: dict[str, dict[str, Make]] = {
    "tileops": {"layer_norm": tileops_layer_norm, "rms_norm": tileops_rms_norm},
    "floor": {"layer_norm": floor_layer_norm, "rms_norm": floor_rms_norm},
    "torch": {"layer_norm": torch_layer_norm, "rms_norm": torch_rms_norm},
    "compile": {"layer_norm": compile_layer_norm, "rms_norm": compile_rms_norm},
    "tileops0.1.0": {"layer_norm": tileops_layer_norm, "rms_norm": tileops_rms_norm},
    "liger": {"layer_norm": liger_layer_norm, "rms_norm": liger_rms_norm},
    "quack": {"layer_norm": quack_layer_norm, "rms_norm": quack_rms_norm},
}


def arm(name: str, op: str) -> Make:
    """How `name` calls `op`. Of another peer, its folder has a module `host_peer` with a function for each op."""
    if name in ARMS:
        return ARMS[name][op]
    return getattr(importlib.import_module("host_peer"), op)
