"""`tileops.functional`: torch's signatures, torch's results, one op for each set of parameters."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from tileops import InputError, functional
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

pytestmark = pytest.mark.usefixtures("backends")

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("name", functional.__all__)
def test_a_function_has_the_parameters_and_defaults_of_torchs(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(module, name)).parameters.values() for module in (functional, F))
    assert [(one.name, one.kind, one.default) for one in ours] == [(one.name, one.kind, one.default) for one in theirs]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64,), [64], torch.Size([64]), [3, 64]], ids=repr)
def test_layer_norm_agrees_with_torch(dtype: torch.dtype, shape: Any) -> None:
    x, weight, bias = drawn(5, 3, 64, dtype=dtype), drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype)
    torch.testing.assert_close(
        functional.layer_norm(x, shape, weight, bias, 1e-3), F.layer_norm(x, shape, weight, bias, 1e-3)
    )
    torch.testing.assert_close(functional.layer_norm(x, shape, bias=bias), F.layer_norm(x, shape, bias=bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eps", [None, 0.0, 1e-3])
def test_rms_norm_agrees_with_torch_with_its_default_eps_too(dtype: torch.dtype, eps: float | None) -> None:
    x, weight = drawn(5, 64, dtype=dtype) * 1e-3, drawn(64, dtype=dtype)
    torch.testing.assert_close(functional.rms_norm(x, [64], weight, eps), F.rms_norm(x, [64], weight, eps))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 5), (2, 4, 3, 5)], ids=str)
def test_batch_norm_agrees_with_torch_and_writes_the_same_statistics(shape: Any, training: bool) -> None:
    results = []
    for module in (functional, F):
        mean, variance = drawn(4), drawn(4).abs() + 0.5
        y = module.batch_norm(drawn(*shape), mean, variance, drawn(4), drawn(4), training, 0.25, 1e-3)
        results.append((y, mean, variance))
    torch.testing.assert_close(*results)


def test_batch_norm_takes_the_batchs_statistics_where_there_are_no_running_ones() -> None:
    x = drawn(6, 4)
    torch.testing.assert_close(
        functional.batch_norm(x, None, None, training=True), F.batch_norm(x, None, None, training=True)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_group_norm_agrees_with_torch(dtype: torch.dtype) -> None:
    x, weight, bias = drawn(6, 4, 5, dtype=dtype), drawn(4, dtype=dtype), drawn(4, dtype=dtype)
    torch.testing.assert_close(functional.group_norm(x, 2, weight, bias, 1e-3), F.group_norm(x, 2, weight, bias, 1e-3))
    torch.testing.assert_close(functional.group_norm(x, 4, bias=bias), F.group_norm(x, 4, bias=bias))


@pytest.mark.parametrize("by_input", [False, True])
@pytest.mark.parametrize("shape", [(6, 4, 5), (2, 4, 3, 5)], ids=str)
def test_instance_norm_agrees_with_torch_and_writes_the_same_statistics(shape: Any, by_input: bool) -> None:
    results = []
    for module in (functional, F):
        mean, variance = drawn(4), drawn(4).abs() + 0.5
        y = module.instance_norm(drawn(*shape), mean, variance, drawn(4), drawn(4), by_input, 0.25, 1e-3)
        results.append((y, mean, variance))
    torch.testing.assert_close(*results)
    torch.testing.assert_close(functional.instance_norm(drawn(*shape)), F.instance_norm(drawn(*shape)))


X = torch.ones(6, 4)
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("layer_norm", {"normalized_shape": (5,)}, r"x has shape \(6, 4\); its trailing axes must be \(5,\)"),
    ("layer_norm", {"normalized_shape": ()}, r"normalized_shape is \(\); it must be one or more sizes"),
    ("layer_norm", {"normalized_shape": "4"}, r"normalized_shape is '4'; it must be one or more sizes"),
    ("layer_norm", {"normalized_shape": None}, r"normalized_shape is None; it must be one or more sizes"),
    ("layer_norm", {"normalized_shape": [4], "eps": None}, r"eps is None; it must be a number"),
    ("layer_norm", {"normalized_shape": [4], "weight": X}, r"weight has shape \(6, 4\); it must have \(4,\)"),
    ("rms_norm", {"normalized_shape": [6, 5]}, r"x has shape \(6, 4\); its trailing axes must be \(6, 5\)"),
    ("batch_norm", {"running_mean": None, "running_var": None}, r"in inference both are needed"),
    ("batch_norm", {"running_mean": X[0], "running_var": None}, r"running_mean is given without running_var"),
    ("batch_norm", {"running_mean": X[0], "running_var": X[0], "momentum": None}, r"momentum is None"),
    ("group_norm", {"num_groups": 3}, r"x has 4 channels; they must divide evenly into num_groups, which is 3"),
    ("group_norm", {"num_groups": -1}, r"num_groups is -1; it must be a number of groups"),
    ("group_norm", {"num_groups": 2, "weight": X}, r"weight has shape \(6, 4\); it must have \(4,\)"),
    ("instance_norm", {}, r"x has shape \(6, 4\): one element of space, which has no variance"),
    ("instance_norm", {"use_input_stats": False}, r"without input statistics both are needed"),
]


@pytest.mark.parametrize(("name", "arguments", "sentence"), BAD)
def test_what_torch_refuses_is_refused_with_a_sentence(name: str, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        getattr(F, name)(X, **arguments)
    with pytest.raises(InputError, match=sentence):
        getattr(functional, name)(X, **arguments)


def test_calls_with_equal_parameters_share_one_op() -> None:
    functional._layer_norm.cache_clear()
    for shape in ((4,), [4], (4,)):
        functional.layer_norm(X, shape)
    functional.rms_norm(X, (4,), eps=1e-5)
    functional.layer_norm(X, (4,), eps=1e-3)
    assert functional._layer_norm.cache_info().currsize == 2


def test_what_is_no_size_is_refused_after_a_call_with_an_equal_number_too() -> None:
    functional.layer_norm(X, 4)
    functional.layer_norm(X[:, :1], 1)
    for number in (4.0, True):
        with pytest.raises(InputError, match=f"normalized_shape is {number}"):
            functional.layer_norm(X, number)


def test_the_ops_that_are_kept_have_a_bound() -> None:
    for n in range(functional.MOST_OPS + 10):
        functional._layer_norm((4,), n / 1e6)
    assert functional._layer_norm.cache_info().currsize == functional.MOST_OPS


def test_nothing_keeps_the_tensors_of_a_call() -> None:
    x, weight = drawn(6, 4), drawn(4)
    kept = [weakref.ref(x), weakref.ref(weight)]
    functional.layer_norm(x, (4,), weight)
    del x, weight
    assert [one() for one in kept] == [None, None]


def all_of_them(x: Tensor) -> Tensor:
    y = functional.layer_norm(x, [64]) + functional.rms_norm(x, x.shape[-1:]) + functional.group_norm(x, 4)
    y = y + functional.instance_norm(x.t()[None])[0].t()
    return y + functional.batch_norm(x, None, None, training=True)


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")  # inductor's own use of it
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_functions_compile_into_one_graph_for_every_batch_size(backend: str) -> None:
    compiled: Callable[[Tensor], Tensor] = torch.compile(all_of_them, fullgraph=True, dynamic=True, backend=backend)
    for rows in (*range(2, 12), 50, 51):
        torch.testing.assert_close(compiled(drawn(rows, 64)), all_of_them(drawn(rows, 64)))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_function_is_one_node_of_its_graph() -> None:
    graphs: list[Any] = []

    def record(module: Any, inputs: Any) -> Any:
        graphs.append(module.graph)
        return module

    torch.compile(all_of_them, fullgraph=True, backend=record)(drawn(6, 64))
    (graph,) = graphs
    nodes = [str(node.target) for node in graph.nodes if "tileops" in str(node.target)]
    names = ("layer_norm", "rms_norm", "group_norm", "instance_norm", "batch_norm_train")
    assert nodes == [f"tileops.{name}.default" for name in names]


def test_a_traced_function_takes_symbolic_sizes() -> None:
    traced = make_fx(lambda x: functional.layer_norm(x, x.shape[-1:]), tracing_mode="symbolic")(drawn(3, 8))
    torch.testing.assert_close(traced(drawn(5, 6)), functional.layer_norm(drawn(5, 6), (6,)))
