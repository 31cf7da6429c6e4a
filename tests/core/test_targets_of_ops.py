"""Targets that take our own ops over: repeated calls, graphs, results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tileops import BackendError
from tileops.backend import (
    BUILTIN,
    Declined,
    register_detector,
    register_kernel_builder,
    register_kernel_type,
    set_default_target,
)
from tileops.kernels.layer_norm import LayerNorm
from tileops.norm import BatchNormFwdOp, LayerNormFwdOp

X = torch.ones(4)


def on_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


class Mine(LayerNorm):
    devices = frozenset({"cpu"})

    def forward(self, x: Any, weight: Any, bias: Any) -> Any:
        return x + 1


def twice(*specs: Any, **params: Any) -> Any:
    """A builder for layer norm whose results are told apart from anybody else's."""
    return lambda x, *rest: x * 2


def calling(op: Any) -> Callable[..., Any]:
    def call(x: torch.Tensor) -> Any:
        return op(x)

    return call


def graphs_of(function: Callable[..., Any], *arguments: Any) -> tuple[Any, list[Any]]:
    """What a compiled function returns, and its graphs."""
    torch._dynamo.reset()
    graphs = list[Any]()

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return torch.compile(function, backend=keep, fullgraph=True)(*arguments), graphs


def test_a_repeated_call_still_goes_to_the_target(no_backends: None) -> None:
    register_kernel_type("LayerNormFwdOp", "mine", Mine)
    register_kernel_builder("LayerNormFwdOp", "acme", twice)
    plain, named = LayerNormFwdOp(4), LayerNormFwdOp(4, target="acme")
    for _ in range(3):
        assert torch.equal(plain(X), X + 1)
        assert torch.equal(named(X), X * 2)
    register_detector("acme", on_cpu)
    for _ in range(3):
        assert torch.equal(plain(X), X * 2)
        assert torch.equal(LayerNormFwdOp(4, target=BUILTIN)(X), X + 1)


def test_a_shape_that_the_target_takes_over_is_no_repeat_of_one_that_it_declined(no_backends: None) -> None:
    def build(x: Any, *others: Any, **params: Any) -> Any:
        if x.shape[0] != 3:
            raise Declined("three rows only")
        return twice()

    register_kernel_type("LayerNormFwdOp", "mine", Mine)
    register_detector("acme", on_cpu)
    register_kernel_builder("LayerNormFwdOp", "acme", build)
    op = LayerNormFwdOp(4)
    for rows in (1, 1, 1, 3, 1, 3):
        x = torch.ones(rows, 4)
        assert torch.equal(op(x), x * 2 if rows == 3 else x + 1)


def test_a_graph_is_the_same_whoever_serves_it_and_a_target_is_chosen_when_it_runs(no_backends: None) -> None:
    register_kernel_type("LayerNormFwdOp", "mine", Mine)
    op = LayerNormFwdOp(4)
    result, [graph] = graphs_of(calling(op), X)
    assert torch.equal(result, X + 1)
    register_detector("acme", on_cpu)
    register_kernel_builder("LayerNormFwdOp", "acme", twice)
    compiled = torch.compile(calling(op), backend="eager", fullgraph=True)
    assert torch.equal(graph(X)[0], X * 2)
    assert torch.equal(compiled(X), op(X))
    assert torch.equal(compiled(X), X * 2)
    set_default_target(BUILTIN)
    assert torch.equal(graph(X)[0], X + 1)
    assert torch.equal(compiled(X), op(X))
    [node] = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert node.args[-1] != "acme"


def test_a_named_target_and_builtin_are_in_the_graph(no_backends: None) -> None:
    register_kernel_type("LayerNormFwdOp", "mine", Mine)
    register_detector("acme", on_cpu)
    register_kernel_builder("LayerNormFwdOp", "acme", twice)
    for target, expected in (("acme", X * 2), (BUILTIN, X + 1)):
        op = LayerNormFwdOp(4, target=target)
        result, [graph] = graphs_of(calling(op), X)
        assert torch.equal(result, expected)
        [node] = [node for node in graph.graph.nodes if node.op == "call_function"]
        assert target in node.args


def test_batch_norm_in_inference_may_return_its_output_alone(no_backends: None) -> None:
    register_kernel_builder("BatchNormFwdOp", "acme", lambda *specs, **params: lambda x, *rest: x * 2)
    statistics = torch.zeros(3), torch.ones(3)
    x = torch.randn(2, 3)
    op = BatchNormFwdOp(target="acme")
    for _ in range(2):
        y, mean, invstd = op(x, *statistics)
        assert torch.equal(y, x * 2)
        assert (mean, invstd) == (None, None)
    with pytest.raises(BackendError, match="returned a tensor; it must return output, save_mean, save_invstd"):
        BatchNormFwdOp(True, target="acme")(x)
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert op(x, *statistics)[0].is_contiguous(memory_format=torch.channels_last)
