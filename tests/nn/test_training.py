"""Modules and functions with gradients: what torch's give, eager and compiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tileops.nn
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from tileops import functional
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.testing import assert_close

pytestmark = pytest.mark.usefixtures("backends")

SHAPES = {"BatchNorm1d": (6, 4, 5), "BatchNorm2d": (6, 4, 3, 5), "BatchNorm3d": (6, 4, 2, 3, 2)}
NAMES = ["LayerNorm", "RMSNorm", *SHAPES]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5).to(dtype)


class Net(nn.Module):
    """Norms of every kind that a vector of channels meets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.SiLU(),
            nn.Linear(8, 8), nn.LayerNorm(8), nn.SiLU(),
            nn.Linear(8, 8), nn.RMSNorm(8), nn.BatchNorm1d(8, momentum=None, affine=False), nn.Linear(8, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def trained(model: nn.Module, run: Any, steps: int = 10) -> list[float]:
    """Losses of some steps on changing batches."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    losses: list[float] = []
    for step in range(steps):
        x = drawn(10 + step % 3, 4, seed=step)
        loss = (run(x) - x.prod(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def states_are_close(one: nn.Module, other: nn.Module) -> None:
    for own, theirs in zip(one.state_dict().values(), other.state_dict().values()):
        assert_close(own, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_a_module_are_torchs(name: str, training: bool, dtype: torch.dtype) -> None:
    gradients = []
    for module in (tileops.nn, nn):
        norm = getattr(module, name)(4).to(dtype).train(training)
        for seed, parameter in enumerate(norm.parameters()):
            parameter.data.copy_(drawn(4, seed=seed))
        x = drawn(*SHAPES.get(name, (6, 5, 4)), dtype=dtype).requires_grad_()
        norm(x).backward(drawn(*x.shape, seed=9, dtype=dtype))
        gradients.append([x.grad, *(parameter.grad for parameter in norm.parameters())])
    assert_close(*gradients)


@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
@pytest.mark.parametrize("name", ["LayerNorm", "BatchNorm1d"])
def test_frozen_parameters_get_no_gradient(name: str, frozen: str) -> None:
    norm = getattr(tileops.nn, name)(4)
    for parameter_name in ("weight", "bias") if frozen == "both" else (frozen,):
        getattr(norm, parameter_name).requires_grad_(False)
    x = drawn(6, 4, dtype=torch.float32).requires_grad_()
    norm(x).square().sum().backward()
    assert x.grad is not None
    for parameter in norm.parameters():
        assert (parameter.grad is not None) == parameter.requires_grad


def test_gradients_of_a_function_are_torchs_for_absent_weights() -> None:
    gradients = []
    for module in (functional, F):
        x = drawn(6, 4).requires_grad_()
        y = module.layer_norm(x, [4]) * module.rms_norm(x, [4]) * module.batch_norm(x, None, None, training=True)
        y.backward(drawn(6, 4, seed=9))
        gradients.append(x.grad)
    assert_close(*gradients)


def test_a_replaced_model_trains_as_before() -> None:
    theirs = net()
    ours = copy.deepcopy(theirs)
    assert len(tileops.nn.replace(ours).replaced) == 4
    assert_close(trained(ours, ours), trained(theirs, theirs), rtol=1e-10, atol=1e-10)
    states_are_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")  # inductor's own use of it
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_trains_as_an_eager_one_in_one_graph(backend: str) -> None:
    eager = net()
    tileops.nn.replace(eager)
    traced = copy.deepcopy(eager)
    compiled = torch.compile(traced, fullgraph=True, dynamic=True, backend=backend)
    assert_close(trained(traced, compiled), trained(eager, eager), rtol=1e-10, atol=1e-10)
    states_are_close(traced, eager)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_model_may_be_replaced_and_restored_between_steps() -> None:
    theirs = net()
    ours = copy.deepcopy(theirs)

    def alternating(x: Tensor) -> Tensor:
        if not tileops.nn.replace(ours).replaced:
            tileops.nn.restore(ours)
        return ours(x)

    assert_close(trained(ours, alternating), trained(theirs, theirs), rtol=1e-10, atol=1e-10)
    states_are_close(ours, theirs)
