"""Budgets of a node in a compiled graph: what the host does for each layer norm of a compiled model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from hit_path import registered
from record import Budget, Record
from tileops import functional, torch_inductor
from tileops.kernels.layer_norm import LayerNorm
from timing import GROUPS, Ratio, interleaved, repeated

NODE = Budget(
    "graph node",
    "A layer norm in a compiled graph that calls its torch op, over an eager F.layer_norm of 8×64 on a CPU",
    most=2.2,
    noise=0.2,
    usual=2.1,
)
LAUNCH = Budget(
    "graph launch",
    "A layer norm in a compiled graph where inductor launches the kernel itself, over the same",
    most=1.0,
    noise=0.25,  # where memory comes from decides as much as what is called
    usual=0.95,
)
ROUNDS = 400
NODES = 17


class Allocates(LayerNorm):
    """A kernel that allocates its result and does nothing: a node that returned its input would be none."""

    devices = frozenset({"cpu"})

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """Return a tensor like x."""
        return torch.empty_like(x)

    def repeated(self, x: torch.Tensor, *affine: torch.Tensor | None) -> Callable[..., torch.Tensor]:
        """Allocate as code that torch compiled does, and as our kernels do on a GPU."""
        empty, shape, strides = torch._C._dynamo.guards._empty_strided_cpu, tuple(x.shape), x.stride()
        dtype = x.dtype
        return lambda x, weight, bias: empty(shape, strides, dtype)


def chain(layer_norm: Callable[..., torch.Tensor], nodes: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Layer norms one after the other, each of the result of the one before."""
    weight, bias = torch.nn.Parameter(torch.ones(64)), torch.nn.Parameter(torch.zeros(64))

    def normalised(x: torch.Tensor) -> torch.Tensor:
        for _ in range(nodes):
            x = layer_norm(x, (64,), weight, bias, 1e-5)
        return x

    return normalised


def nodes() -> list[Record]:
    """Time chains of one layer norm and of many, and divide the difference."""
    from torch._inductor.utils import fresh_inductor_cache

    x = torch.randn(8, 64)
    with registered("LayerNormFwdOp", Allocates), torch.no_grad(), fresh_inductor_cache():
        arms = {
            f"{backend} {count}": repeated("call(x)", {"call": _chain(backend, count, x), "x": x})
            for backend in ("eager", "aot_eager", "inductor")
            for count in (1, NODES)
        }
        taken = interleaved(arms, ROUNDS)
    launch = LAUNCH.skipped("the inductor of this torch calls the torch op")
    if torch_inductor.table() is not None:
        launch = LAUNCH.of_ratio(_of_a_node(taken, "inductor"))
    return [NODE.of_ratio(_of_a_node(taken, "aot_eager")), launch]


def _chain(backend: str, count: int, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A chain of `count` layer norms, called before: torch's own, or compiled ones of ours."""
    if backend == "eager":
        return chain(F.layer_norm, count)
    torch._dynamo.reset()
    call: Any = torch.compile(chain(functional.layer_norm, count), fullgraph=True, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # inductor's own use of what is deprecated
        for _ in range(3):
            call(x)
    return call


def _of_a_node(taken: Mapping[str, list[float]], backend: str) -> Ratio:
    """The time of one of ours over that of one `F.layer_norm`, by the fastest rounds."""

    def seconds(backend: str, rounds: slice) -> float:
        few, many = (min(taken[f"{backend} {count}"][rounds]) for count in (1, NODES))
        return (many - few) / (NODES - 1)

    def ratio(rounds: slice) -> float:
        return seconds(backend, rounds) / seconds("eager", rounds)

    each = [ratio(slice(first, None, GROUPS)) for first in range(GROUPS)]
    value = ratio(slice(None))
    fastest = {"node": seconds(backend, slice(None)), "F.layer_norm": seconds("eager", slice(None))}
    return Ratio(value, (max(each) - min(each)) / 2 / value, fastest)
