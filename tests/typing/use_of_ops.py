"""What a type checker must accept, checked by pyright in strict mode; nothing here is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import final

import tileops
import torch
from tileops.backend import (
    BUILTIN,
    Declined,
    RegisterDetector,
    RegisterKernelBuilder,
    TensorSpec,
    at_least,
    hookimpl,
    register_kernel_type,
    registered_targets,
    set_default_target,
)
from tileops.kernels.layer_norm import LayerNorm, LayerNormCall
from tileops.norm import LayerNormFwdOp
from torch import Tensor
from typing_extensions import assert_type


@dataclasses.dataclass(frozen=True)
class ScaleCall(tileops.CallSpec):
    n: int
    dtype: torch.dtype
    factor: float = 2.0


@final
class ShortRows(LayerNorm):
    supported_archs = at_least(90)
    preferred_over = frozenset({tileops.IN_TREE})

    @classmethod
    def refusal(cls, call: LayerNormCall) -> str | None:
        return None if call.n <= 256 else f"row of {call.n} elements; serves at most 256"

    @classmethod
    def entry_for(cls, call: LayerNormCall) -> tuple[Hashable, Callable[[], ShortRows]]:
        return call.n, lambda: cls(call)

    @classmethod
    def configurations(cls, call: LayerNormCall) -> list[dict[str, int]]:
        return [{"threads": 128}, {"threads": 256}]

    def __init__(self, call: LayerNormCall) -> None:
        super().__init__(call)
        self.threads: int = self.configuration["threads"]

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias)


register_kernel_type("LayerNormFwdOp", "short_rows", ShortRows)


def build_rms_norm(
    x: TensorSpec, weight: TensorSpec | None, *, normalized_shape: tuple[int, ...], eps: float | None
) -> Callable[[Tensor, Tensor | None], Tensor]:
    device, dtype, _ = x
    if weight is not None and weight.dtype != dtype:
        raise Declined(f"weight on {device} is {weight.dtype}")
    return lambda x, weight: torch.nn.functional.rms_norm(x, normalized_shape, weight, eps)


@hookimpl
def tileops_register_targets(
    register_detector: RegisterDetector, register_kernel_builder: RegisterKernelBuilder
) -> None:
    register_detector(target="acme", detect=lambda device: device.type == "cpu")
    register_kernel_builder(op="RMSNormFwdOp", target="acme", build_kernel=build_rms_norm, per_op=True)


set_default_target(BUILTIN)
assert_type(registered_targets("RMSNormFwdOp"), list[str])


@tileops.selection(prefer=["acme", tileops.IN_TREE], op="LayerNormFwdOp")
def decorated(n: int) -> str:
    with tileops.selection(exclude="acme:row", require=("acme", "local")):
        return str(n)


assert_type(decorated(1), str)
tileops.set_default_selection(prefer="acme")

call = ScaleCall(device=torch.device("cpu"), n=4, dtype=torch.float32)
assert_type(call.n, int)
assert_type(call.arch, int)
assert_type(dataclasses.replace(call, n=5), ScaleCall)
assert_type(call.on("h200"), ScaleCall)

op = LayerNormFwdOp((4,), eps=1e-6)
assert_type(op.normalized_shape, tuple[int, ...])
assert_type(op.explain(torch.ones(2, 4), on="h200"), tileops.Selection)
assert_type(op.tune(torch.ones(2, 4), None), tileops.Tuning)
assert_type(op.key_for("layer_norm", LayerNormCall(torch.device("cpu"), 4, torch.float32)), str)

# ------------------------------------------------------------------------------------------------ front doors

assert_type(tileops.functional.layer_norm(torch.ones(2, 4), (4,)), Tensor)
assert_type(tileops.functional.rms_norm(torch.ones(2, 4), [4], eps=None), Tensor)
assert_type(tileops.functional.group_norm(torch.ones(2, 4), 2), Tensor)
assert_type(tileops.functional.instance_norm(torch.ones(2, 4, 3), use_input_stats=True), Tensor)
assert_type(tileops.nn.GroupNorm(2, 4).forward(torch.ones(2, 4, 3)), Tensor)
assert_type(tileops.nn.BatchNorm2d(4, momentum=None).forward(torch.ones(2, 4, 3, 3)), Tensor)
assert_type(tileops.nn.replace(torch.nn.Linear(4, 4)).left, tuple[tileops.nn.ModuleReport, ...])
