"""The budget of defining an op as a torch op, beside what torch gives authors of ops for that."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from record import Budget, Record
from tileops.norm import LayerNormFwdOp
from timing import interleaved, ratio_of
from torch import Tensor

DEFINITION = Budget(
    "definition",
    "Defining a layer norm as a torch op, over torch.library.custom_op with a fake, a gradient and a vmap rule",
    most=1.0,
    noise=0.2,
    usual=0.65,
)
ROUNDS = 60

numbers = itertools.count()


def ours() -> float:
    """Seconds from a class that exists to an op that can be called: two torch ops, each with a rule for vmap."""
    number = next(numbers)
    type(f"Defined{number}", (LayerNormFwdOp,), {"__module__": __name__})
    begin = time.perf_counter()
    assert getattr(torch.ops.tileops, f"{__name__}__Defined{number}").default
    return time.perf_counter() - begin


def theirs() -> float:
    """Seconds to define an op of the same arguments in torch's own way, with as much registered."""
    name = f"tileops_benchmark::layer_norm{next(numbers)}"
    begin = time.perf_counter()
    op: Any = torch.library.custom_op(name, _layer_norm, mutates_args=())
    op.register_fake(_layer_norm)
    op.register_autograd(_backward)
    op.register_vmap(_each)
    return time.perf_counter() - begin


def _layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, normalized_shape: list[int], eps: float, target: str | None
) -> Tensor:
    del weight, bias, normalized_shape, eps, target
    return torch.empty_like(x)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    del ctx
    return (gradient, None, None, None, None, None)


def _each(info: Any, dims: Any, x: Tensor, *rest: Any) -> tuple[Tensor, int]:
    del info, dims, rest
    return x, 0


def definition() -> list[Record]:
    """Time both in turns, each time for a new name."""
    return [
        DEFINITION.of_ratio(ratio_of(interleaved({"ours": ours, "custom_op": theirs}, ROUNDS), "ours", "custom_op"))
    ]
