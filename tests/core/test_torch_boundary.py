"""Where calls meet PyTorch: what stays out of its dispatcher, what goes through, and what the torch ops say."""

from __future__ import annotations

import importlib
import threading
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
import tileops
import torch
import torch.nn.functional as F  # noqa: N812
from tileops import (
    BatchNormFwdOp,
    InputError,
    LayerNormFwdOp,
    OpNotAvailableError,
    RMSNormFwdOp,
    TorchOp,
    torch_guards,
)
from tileops.catalogue import IN_TREE_OPS, find_op
from tileops.errors import DeclarationError
from tileops.ops import op_base
from tileops.ops.op_base import Op
from tileops.torch_schema import torch_op_name
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("backends")

NORM, RMS = LayerNormFwdOp(64), RMSNormFwdOp(64)
TRAIN, INFER = BatchNormFwdOp(training=True), BatchNormFwdOp()


def tensors(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*(shape or (8, 64)), generator=generator)
    return x, torch.randn(64, generator=generator), torch.randn(64, generator=generator)


def statistics() -> tuple[Tensor, Tensor]:
    return torch.zeros(64), torch.ones(64)


@pytest.fixture
def through(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The op classes whose calls went through torch's dispatcher."""
    log: list[str] = []
    call = op_base.call_through

    def logged(op: Any, given: Any) -> Any:
        log.append(type(op).__name__)
        return call(op, given)

    monkeypatch.setattr(op_base, "call_through", logged)
    return log


# --------------------------------------------------------------------------------- what stays out of the dispatcher


def test_plain_tensors_and_parameters_stay_out_of_the_dispatcher(through: list[str]) -> None:
    x, w, b = tensors()
    with torch.no_grad():
        NORM(x, nn.Parameter(w), nn.Parameter(b))
        NORM(x, weight=nn.Parameter(w), bias=b)
        RMS(nn.Parameter(x), None)
    with torch.inference_mode():
        NORM(torch.ones(2, 64), nn.Parameter(w), b)
    NORM(x.bfloat16(), w, b)
    TRAIN(x, *statistics(), w, b)
    NORM(x[:, :64], w[:], b)
    assert through == []


def test_a_call_whose_gradient_is_wanted_stays_out_of_the_dispatcher(through: list[str]) -> None:
    x, w, b = tensors()
    NORM(x, nn.Parameter(w), b).sum().backward()
    assert through == []


def test_a_meta_tensor_meets_selection_like_any_device(through: list[str]) -> None:
    with pytest.raises(OpNotAvailableError, match="in-tree kernels do not run on meta"):
        NORM(torch.ones(2, 64, device="meta"))
    assert through == []


# --------------------------------------------------------------------------------------------- one guard, one test


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own use of it
def test_a_forward_mode_tangent_is_refused_and_primals_are_served(through: list[str]) -> None:
    x, w, b = tensors()
    with forward_ad.dual_level():
        torch.testing.assert_close(NORM(x, w, b), F.layer_norm(x, (64,), w, b))
        for dual in ((forward_ad.make_dual(x, x), w, b), (x, forward_ad.make_dual(w, w), b)):
            with pytest.raises(InputError, match="an argument has a tangent and LayerNormFwdOp has no forward-mode"):
                NORM(*dual)
    with pytest.raises(InputError, match="an argument has a tangent"):
        torch.func.jvp(lambda x: NORM(x, w, b), (x,), (x,))
    assert through == ["LayerNormFwdOp"] * 4


@pytest.mark.parametrize("n", [1, 64])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_negative_bit_views_have_their_signs(n: int, dtype: torch.dtype) -> None:
    z = torch.randn(3, n, dtype=dtype, generator=torch.Generator().manual_seed(1))
    for x in (z.conj().imag, *z.conj().imag.unsqueeze(1)):
        assert x.is_neg()
        w = z[0].conj().imag
        torch.testing.assert_close(RMSNormFwdOp(n)(x, w), F.rms_norm(x.clone(), (n,), w.clone()))
        torch.testing.assert_close(LayerNormFwdOp(n)(x, w, w), F.layer_norm(x.clone(), (n,), w.clone(), w.clone()))


def test_running_statistics_that_are_negative_bit_views_are_written_with_their_signs() -> None:
    x, *_ = tensors()
    z = torch.zeros(64, dtype=torch.complex64)
    mean, variance = z.conj().imag, torch.ones(64)
    expected = statistics()
    TRAIN(x, mean, variance)
    F.batch_norm(x, *expected, training=True)
    torch.testing.assert_close(mean.clone(), expected[0])


def test_conjugate_views_are_refused_as_what_they_are() -> None:
    with pytest.raises(InputError, match="x is complex64; it must be a floating-point tensor"):
        NORM(torch.ones(2, 64, dtype=torch.complex64).conj())


@pytest.mark.parametrize("dims", [(0, None, None), (1, None, None), (0, 0, None), (None, 0, 0), (0, 0, 0)])
def test_vmap_agrees_with_torch(dims: Any, through: list[str]) -> None:
    sizes = {0: (3, 8, 64), 1: (8, 3, 64), None: (8, 64)}
    x = tensors(*sizes[dims[0]])[0]
    w, b = (torch.randn(64) if dim is None else torch.randn(3, 64) for dim in dims[1:])
    ours = torch.vmap(NORM, in_dims=dims)(x, w, b)
    theirs = torch.vmap(lambda x, w, b: F.layer_norm(x, (64,), w, b), in_dims=dims)(x, w, b)
    torch.testing.assert_close(ours, theirs)
    assert through == ["LayerNormFwdOp"]


def test_a_vmap_of_a_vmap_agrees_with_torch() -> None:
    x = tensors(2, 3, 8, 64)[0]
    torch.testing.assert_close(torch.vmap(torch.vmap(NORM), in_dims=1, out_dims=1)(x), F.layer_norm(x, (64,)))


def test_vmap_over_training_needs_statistics_of_each_sample() -> None:
    x = tensors(3, 8, 64)[0]
    with pytest.raises(InputError, match="running_mean is written, once for each sample of a vmap"):
        torch.vmap(lambda x: TRAIN(x, *statistics()))(x)
    mean, variance = torch.zeros(3, 64), torch.ones(3, 64)
    ours = torch.vmap(TRAIN)(x, mean, variance)[0]
    for i in range(3):
        expected = statistics()
        torch.testing.assert_close(ours[i], F.batch_norm(x[i], *expected, training=True))
        torch.testing.assert_close((mean[i], variance[i]), expected)


def test_functionalize_agrees_with_torch(through: list[str]) -> None:
    x, w, b = tensors()

    def scaled(norm: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: norm(x.clone().mul_(2), w, b).add_(1)

    ours = torch.func.functionalize(scaled(NORM))(x)
    torch.testing.assert_close(ours, scaled(lambda x, w, b: F.layer_norm(x, (64,), w, b))(x))
    assert through == ["LayerNormFwdOp"]


def test_sparse_nested_and_quantised_tensors_get_one_sentence() -> None:
    x, w, b = tensors()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls these prototypes
        parts = [x, x[:2]]
        nested = [torch.nested.nested_tensor(parts), torch.nested.nested_tensor(parts, layout=torch.jagged)]
        quantised = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
        blocks = x.to_sparse_csr()
    with pytest.raises(InputError, match="x has layout torch.sparse_coo; give a strided tensor"):
        NORM(x.to_sparse(), w, b)
    with pytest.raises(InputError, match="x has layout torch.sparse_csr"):
        NORM(blocks, w, b)
    with pytest.raises(InputError, match="weight has layout torch.sparse_coo"):
        NORM(x, w.to_sparse(), b)
    with pytest.raises(InputError, match="x is qint8; it must be a floating-point tensor"):
        NORM(quantised, w, b)
    for value in nested:
        with pytest.raises(InputError, match=r"x is a nested tensor; give each of its parts by itself: x.unbind\(\)"):
            NORM(value, w, b)
        with pytest.raises(InputError, match="weight is a nested tensor"):
            NORM(x, value, b)


def test_no_tensor_at_all_gets_the_sentence_of_the_check() -> None:
    with pytest.raises(InputError, match="weight is list; give a torch.Tensor"):
        NORM(tensors()[0], [1.0])


class Marked(Tensor):
    pass


class MarkedParameter(nn.Parameter):
    pass


def test_tensor_subclasses_go_through_and_keep_their_class(through: list[str]) -> None:
    x, w, b = tensors()
    y = NORM(x.as_subclass(Marked), w, b)
    assert type(y) is Marked
    torch.testing.assert_close(y.as_subclass(Tensor), F.layer_norm(x, (64,), w, b))
    with torch.no_grad():
        NORM(x, MarkedParameter(w), b)
    assert through == ["LayerNormFwdOp"] * 2


class SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class SeenOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_function_mode_sees_one_op_of_ours() -> None:
    given = tensors()
    with SeenFunctions() as mode:
        NORM(*given)
    assert [one for one in mode.seen if isinstance(one, torch._ops.OpOverload)] == [
        torch.ops.tileops.layer_norm.default
    ]


@pytest.mark.parametrize("inference", [False, True])
def test_a_dispatch_mode_sees_one_op_of_ours(inference: bool) -> None:
    given, kept = tensors(), statistics()
    with torch.inference_mode(inference), SeenOps() as mode:
        y = NORM(*given)
        INFER(given[0], *kept)
        TRAIN(given[0], *kept)
    names = ("layer_norm", "batch_norm_infer", "batch_norm_train")
    inner = "" if inference else "_"  # in inference mode no autograd stands before the public op
    assert mode.seen == [f"tileops.{inner}{name}.default" for name in names]
    torch.testing.assert_close(y, F.layer_norm(given[0], (64,), *given[1:]))


def test_a_default_device_takes_calls_through_the_op(through: list[str]) -> None:
    with torch.device("meta"):
        assert NORM(torch.empty(2, 64)).device.type == "meta"
    assert through == ["LayerNormFwdOp"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_takes_calls_through_the_op(dtype: torch.dtype, through: list[str]) -> None:
    x, w, b = (one.to(dtype) for one in tensors())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(NORM(x, w, b), F.layer_norm(x, (64,), w, b))
    assert through == ["LayerNormFwdOp"]


def test_make_fx_records_one_node_that_reruns_on_other_values() -> None:
    x, w, b = tensors()
    graph = make_fx(NORM)(x, w, b)
    (node,) = (node for node in graph.graph.nodes if node.op == "call_function")
    assert node.target is torch.ops.tileops._layer_norm.default
    assert node.args[3:] == ([64], 1e-5)
    torch.testing.assert_close(graph(2 * x, w, b), F.layer_norm(2 * x, (64,), w, b))


def test_symbolic_tracing_records_one_node() -> None:
    graph = torch.fx.symbolic_trace(Block())
    assert [str(node.target) for node in graph.graph.nodes if node.op == "call_function"] == [
        "tileops.layer_norm.default"
    ]


class Block(nn.Module):
    def __init__(self, op: Op = NORM) -> None:
        super().__init__()
        self.op = op
        self.register_buffer("weight", tensors()[1])

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return self.op(x, self.weight if weight is None else weight)


def channels_last(*shape: int) -> Tensor:
    return torch.randn(*shape).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("x", [torch.randn(4, 64, 2, 3), channels_last(4, 64, 2, 3), torch.randn(64, 4, 5, 3).transpose(0, 1),
                               torch.randn(4, 64), torch.randn(64, 4).t(), torch.empty(0, 64)])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_tensors_have_the_shapes_dtypes_and_strides_of_real_results(x: Tensor, dtype: torch.dtype) -> None:
    x = x.to(dtype)
    layer = LayerNormFwdOp(x.shape[-1])
    training = [] if x.numel() == 0 else [TRAIN]
    for call in (lambda x, m, v: layer(x), INFER, *training):
        real = call(x, *statistics())
        with FakeTensorMode() as mode:
            fake = call(*(mode.from_tensor(one) for one in (x, *statistics())))
        real, fake = ((one,) if isinstance(one, Tensor) else one for one in (real, fake))
        facts = [[one is None or (one.shape, one.dtype, one.stride()) for one in results] for results in (real, fake)]
        assert facts[0] == facts[1]


def test_fake_tensors_meet_the_checks_of_the_eager_call() -> None:
    with FakeTensorMode(), pytest.raises(InputError, match=r"weight has shape \(3,\); it must have \(64,\)"):
        NORM(torch.empty(2, 64), torch.empty(3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_module_computes_anew() -> None:
    x, w, _ = tensors()
    traced = torch.jit.trace(Block(), (x,), check_trace=False)
    assert "tileops::layer_norm" in str(traced.graph)
    torch.testing.assert_close(traced(x + 3), F.layer_norm(x + 3, (64,), w))


# ------------------------------------------------------------------------------------------------- the torch ops

SCHEMAS = """\
batch_norm_backward(Tensor grad, Tensor x, Tensor mean, Tensor invstd, Tensor? weight, bool training, bool[] need, \
ScalarType? bias_dtype, str? target=None) -> (Tensor, Tensor, Tensor)
batch_norm_infer(Tensor x, Tensor? running_mean, Tensor? running_var, Tensor? weight, Tensor? bias, float eps, str? \
target=None) -> Tensor
batch_norm_train(Tensor x, Tensor(b!)? running_mean, Tensor(c!)? running_var, Tensor? weight, Tensor? bias, float \
momentum, float eps, str? target=None) -> (Tensor, Tensor, Tensor)
fused_add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, str? target=None) -> \
(Tensor, Tensor)
fused_add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, str? target=None) -> (Tensor, Tensor)
group_norm(Tensor x, Tensor? weight, Tensor? bias, SymInt num_groups, float eps, str? target=None) -> Tensor
group_norm_backward(Tensor grad, Tensor x, Tensor? weight, SymInt num_groups, float eps, bool[] need, ScalarType? \
bias_dtype, str? target=None) -> (Tensor, Tensor, Tensor)
instance_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, str? target=None) -> Tensor
instance_norm_backward(Tensor grad, Tensor x, Tensor? mean, Tensor? invstd, Tensor? weight, bool use_input_stats, \
float eps, bool[] need, ScalarType? bias_dtype, str? target=None) -> (Tensor, Tensor, Tensor)
instance_norm_infer(Tensor x, Tensor? running_mean, Tensor? running_var, Tensor? weight, Tensor? bias, float eps, str? \
target=None) -> Tensor
instance_norm_train(Tensor x, Tensor(b!)? running_mean, Tensor(c!)? running_var, Tensor? weight, Tensor? bias, float \
momentum, float eps, str? target=None) -> Tensor
layer_norm(Tensor x, Tensor? weight, Tensor? bias, SymInt[] normalized_shape, float eps, str? target=None) -> Tensor
layer_norm_backward(Tensor grad, Tensor x, Tensor? weight, SymInt[] normalized_shape, float eps, bool[] need, \
ScalarType? bias_dtype, str? target=None) -> (Tensor, Tensor, Tensor)
rms_norm(Tensor x, Tensor? weight, SymInt[] normalized_shape, float? eps, str? target=None) -> Tensor
rms_norm_backward(Tensor grad, Tensor x, Tensor? weight, SymInt[] normalized_shape, float? eps, bool[] need, str? \
target=None) -> (Tensor, Tensor)
"""


def test_the_names_and_schemas_of_our_torch_ops_stay_for_ever() -> None:
    routes = [route for name in IN_TREE_OPS for route in find_op(name)._routes]
    for prefix in ("", "_"):  # the public op, and the inner one that compiled graphs hold
        names = sorted(f"{prefix}{route.name}" for route in routes)
        schemas = [str(getattr(torch.ops.tileops, name).default._schema) for name in names]
        found = [schema.removeprefix(f"tileops::{prefix}") for schema in schemas]
        assert found == SCHEMAS.splitlines()


def wanted(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


X, W, B = tensors()
CHECKED: list[tuple[str, tuple[Any, ...]]] = [
    ("fused_add_layer_norm", (X, X.flip(0), W, B, 1e-6)),
    ("fused_add_layer_norm", (X.t().contiguous().t(), X, None, B, 1e-6)),
    ("fused_add_rms_norm", (X.bfloat16(), X.bfloat16(), W, 1e-6)),
    ("layer_norm", (X, W, B, [64], 1e-5)),
    ("layer_norm", (X.bfloat16(), None, None, [64], 1e-5)),
    ("layer_norm", (X.t().contiguous().t(), W, None, [8, 64], 1e-5)),
    ("rms_norm", (X, W, [64], None)),
    ("rms_norm", (X, None, [64], 1e-6, "example-double")),
    ("batch_norm_infer", (X, *statistics(), W, B, 1e-5)),
    ("batch_norm_infer", (channels_last(2, 64, 3, 4), *statistics(), None, None, 1e-5)),
    ("batch_norm_train", (X, *statistics(), W, B, 0.1, 1e-5)),
    ("batch_norm_train", (X, None, None, None, None, 0.1, 1e-5)),
    ("batch_norm_train", (X, torch.zeros(128)[::2], torch.ones(128)[::2], W, B, 0.1, 1e-5)),
    ("group_norm", (wanted(channels_last(2, 64, 3, 4)), wanted(W), B, 8, 1e-5)),
    ("group_norm", (X.bfloat16().t().contiguous().t(), None, B, 64, 1e-5)),
    ("instance_norm", (wanted(channels_last(2, 64, 3, 4)), wanted(W), None, 1e-5)),
    ("instance_norm", (X[..., None].expand(-1, -1, 3), None, B, 1e-5)),
    ("instance_norm_train", (wanted(channels_last(2, 64, 3, 4)), *statistics(), wanted(W), wanted(B), 0.1, 1e-5)),
    ("instance_norm_infer", (wanted(X), *statistics(), W, wanted(B), 1e-5)),
    ("_layer_norm", (X, W, B, [64], 1e-5)),
    ("_batch_norm_train", (X, *statistics(), W, B, 0.1, 1e-5)),
    ("layer_norm", (wanted(X), wanted(W), wanted(B), [64], 1e-5)),
    ("layer_norm", (wanted(X.bfloat16().t().contiguous().t()), W, wanted(B), [64], 1e-5)),
    ("rms_norm", (wanted(X), None, [64], None)),
    ("batch_norm_infer", (wanted(X), *statistics(), W, wanted(B), 1e-5)),
    ("batch_norm_train", (wanted(X), *statistics(), wanted(W), B, 0.1, 1e-5)),
    ("batch_norm_train", (wanted(channels_last(2, 64, 3, 4)), None, None, None, None, 0.1, 1e-5)),
    ("layer_norm_backward", (X, X, W, [64], 1e-5, [True, False, True], torch.float32)),
    ("layer_norm_backward", (X, wanted(X), W, [64], 1e-5, [False, True, False], None)),
    ("_rms_norm_backward", (X, X, None, [64], 1e-6, [True, True])),
    ("group_norm_backward", (torch.randn(2, 64, 3, 4), channels_last(2, 64, 3, 4), W, 8, 1e-5, [True] * 3, None)),
    ("instance_norm_backward", (X, wanted(X), W, B.exp(), W, False, 1e-5, [True, False, True], None)),
    ("batch_norm_backward", (X, X, W, B.exp(), W, True, [True, True, True], None)),
    (
        "batch_norm_backward",
        (channels_last(2, 64, 3, 4), torch.randn(2, 64, 3, 4), W, B.exp(), None, False, [True] * 3, None),
    ),
]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("name", "arguments"), CHECKED)
def test_opcheck_finds_nothing(name: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if "example-double" in arguments:
        tileops.register_kernel_builder("RMSNormFwdOp", "example-double", lambda *_, **params: lambda x, w: x * 2)
    if arguments[0].dim() == 2 and [8, 64] in arguments:
        arguments = (arguments[0], torch.ones(8, 64), *arguments[2:])
    torch.library.opcheck(getattr(torch.ops.tileops, name).default, arguments)


def test_a_call_goes_to_the_torch_op_that_takes_its_tensors() -> None:
    x, mean, variance = X.reshape(2, 64, -1), *statistics()
    with SeenOps() as mode:
        y = tileops.InstanceNormFwdOp()(x, None, None, W, B)
        tileops.InstanceNormFwdOp()(x, mean, variance, W)
        tileops.InstanceNormFwdOp(use_input_stats=False)(x, mean, variance)
    assert mode.seen == [f"tileops._instance_norm{suffix}.default" for suffix in ("", "_train", "_infer")]
    torch.testing.assert_close(y, F.instance_norm(x, weight=W, bias=B))
    assert min(mean._version, variance._version) > 0


def test_training_bumps_the_versions_of_what_it_writes_on_both_paths() -> None:
    x, *_ = tensors()
    for modes in ([], [SeenOps()]):
        mean, variance = statistics()
        for mode in modes:
            with mode:
                TRAIN(x, mean, variance)
        if not modes:
            TRAIN(x, mean, variance)
        assert mean._version > 0
        assert variance._version > 0


def test_a_target_that_writes_by_pointer_bumps_versions_too() -> None:
    def build(*specs: Any, **params: Any) -> Callable[..., Any]:
        def kernel(x: Tensor, mean: Tensor, variance: Tensor, *_: Any) -> Any:
            mean.numpy()[:] = 7
            return x.clone(), mean.clone(), mean.clone()

        return kernel

    tileops.register_kernel_builder("BatchNormFwdOp", "pointers", build)
    mean, variance = statistics()
    BatchNormFwdOp(True, target="pointers")(tensors()[0], mean, variance)
    assert (mean[0], mean._version, variance._version) == (7, 1, 1)


def test_a_target_in_inference_bumps_no_version() -> None:
    tileops.register_kernel_builder(
        "BatchNormFwdOp", "copies", lambda *_, **params: lambda x, *rest: (x + 1, None, None)
    )
    mean, variance = statistics()
    BatchNormFwdOp(target="copies")(tensors()[0], mean, variance)
    assert (mean._version, variance._version) == (0, 0)


def test_a_target_goes_through_by_name() -> None:
    tileops.register_kernel_builder("RMSNormFwdOp", "double", lambda *_, **params: lambda x, w: x * 2)
    x, *_ = tensors()
    with SeenOps() as mode:
        y = RMSNormFwdOp(64, target="double")(x)
    assert mode.seen == ["tileops._rms_norm.default"]
    assert torch.equal(y, x * 2)


def test_a_parameter_out_of_range_is_refused_by_the_torch_op() -> None:
    with pytest.raises(InputError, match="eps is -1.0; it must be at least 0"):
        torch.ops.tileops.layer_norm(*tensors(), [64], -1.0)


@pytest.mark.parametrize(
    "name",
    ["_len_torch_dispatch_stack", "_is_torch_function_mode_enabled", "_are_functorch_transforms_active", "_is_tracing",
     "_is_any_autocast_enabled", "_AutoDispatchBelowAutograd", "_after_autograd_keyset"],
)  # fmt: skip
def test_this_torch_has_the_private_name(name: str) -> None:
    assert hasattr(torch._C, name)


def test_this_torch_has_the_private_names_outside_its_c_module() -> None:
    assert forward_ad._current_level == -1
    assert isinstance(torch.ops.tileops, torch._ops._OpNamespace)
    assert callable(torch.ops.aten.relu.default.redispatch)


# ------------------------------------------------------------------------------------------------- names and classes


@pytest.mark.parametrize(
    ("module", "qualname", "name"),
    [
        ("tileops.ops.norm.layer_norm", "LayerNormFwdOp", "layer_norm"),
        ("tileops.ops.norm.rms_norm", "RMSNormFwdOp", "rms_norm"),
        ("tileops.ops.norm.fused_add_rms_norm", "FusedAddRMSNormFwdOp", "fused_add_rms_norm"),
        ("tileops.ops.norm.batch_norm", "BatchNormFwdOp", "batch_norm"),
        ("tileops.ops.norm.instance_norm_backward", "InstanceNormBwdOp", "instance_norm_backward"),
        ("acme.ops.rows", "RowFwdOp", "acme__RowFwdOp"),
        ("acme", "Outer.RowOp", "acme__Outer_RowOp"),
        ("acme", "make.<locals>.RowOp", "acme__make_locals_RowOp"),
    ],
)
def test_a_torch_op_is_named_by_its_class(module: str, qualname: str, name: str) -> None:
    assert torch_op_name(module, qualname) == name


class BoundaryNormOp(LayerNormFwdOp):
    pass


class BoundaryBatchOp(BatchNormFwdOp):
    pass


@pytest.mark.parametrize(
    ("op", "names"),
    [(BoundaryNormOp(64), ["BoundaryNormOp"]), (BoundaryBatchOp(training=True), ["BoundaryBatchOp_train"])],
)
def test_a_subclass_goes_through_a_torch_op_of_its_own(op: Op, names: list[str]) -> None:
    x, *_ = tensors()
    with SeenOps() as mode:
        op(x)
    package = __name__.partition(".")[0]
    assert mode.seen == [f"tileops._{package}__{name}.default" for name in names]


class ManyOp(Op):
    torch_ops = {"": TorchOp(writes=("y",))}
    results = ("a", "b")

    def __init__(
        self, shape: int | tuple[int, ...], a: bool, b: int | None, c: float, d: str, e: torch.dtype,
        f: Literal["sum", "mean"], g: tuple[float, ...] = (), *, target: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(target=target)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any: ...


def test_annotations_are_the_schema() -> None:
    assert schema(ManyOp) == (
        f"{ManyOp._routes[0].name}(Tensor x, Tensor(b!)? y, SymInt[] shape, bool a, SymInt? b, float c, str d, "
        "ScalarType e, str f, float[] g, str? target=None) -> (Tensor, Tensor)"
    )


def schema(cls: type[Op]) -> str:
    return str(getattr(torch.ops.tileops, cls._routes[0].name).default._schema).removeprefix("tileops::")


def plain(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("parameter", "sentence"),
    [(None, "has no annotation that torch can read for size"), (object, "has no annotation that torch can read for size"),
     ("Nowhere", "name 'Nowhere' is not defined")],
)  # fmt: skip
def test_an_op_whose_annotations_say_nothing_runs_and_is_refused_only_by_torch(
    fake: Any, parameter: Any, sentence: str
) -> None:
    def init(self: Any, size: Any = 1) -> None:
        self.size, self.target = size, None

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.kernel_for("fake", fake.call(x.numel()))(x)

    init.__annotations__ = {} if parameter is None else {"size": parameter}
    base = fake.op({"a": fake.kernel(run=plain)})
    cls: Any = types.new_class(
        f"Silent{parameter}Op", (base,), {}, lambda ns: ns.update(__init__=init, forward=forward)
    )
    op = cls()
    assert op(torch.ones(3)).sum() == 3
    with SeenOps(), pytest.raises(DeclarationError, match=sentence):
        op(torch.ones(3))


ROW = """
    from dataclasses import dataclass
    from torch import Tensor
    from tileops import CallSpec, KernelInterface, Op

    @dataclass(frozen=True)
    class RowCall(CallSpec):
        n: int

    class Row(KernelInterface[RowCall]):
        request = RowCall
        def forward(self, x): raise NotImplementedError

    class Scaled(Row):
        devices = frozenset({"cpu"})
        def forward(self, x): return x * FACTOR

    FACTOR = 2.0

    class RowOp(Op):
        interfaces = {"row": Row}
        kernel_types = {"scaled": Scaled}
        def __init__(self, size: int = 1, *, target: str | None = None) -> None:
            super().__init__(target=target)
            self.size = size
        def check(self, x): pass
        def empty_results(self, x): return x.clone()
        def forward(self, x: Tensor) -> Tensor:
            return self.kernel_for("row", RowCall(x.device, x.numel()))(x)
"""


def test_a_reloaded_module_takes_its_torch_op_over(site: Any) -> None:
    site.module("acme_reload", ROW)
    module = importlib.import_module("acme_reload")
    old, x = module.RowOp(), torch.ones(3)
    with SeenOps() as mode:
        y = old(x)
    assert y.sum() == 6
    assert mode.seen == ["tileops._acme_reload__RowOp.default"]
    site.module("acme_reload", ROW.replace("FACTOR = 2.0", "FACTOR = 30.0"))
    importlib.reload(module)
    with SeenOps():
        assert module.RowOp()(x).sum() == 90
        with pytest.raises(DeclarationError, match="torch.ops.tileops.acme_reload__RowOp belongs to another class"):
            old(x)


def test_another_schema_under_the_same_name_is_refused_where_torch_sees_the_call(site: Any) -> None:
    site.module("acme_again", ROW)
    module = importlib.import_module("acme_again")
    old, x = module.RowOp(), torch.ones(3)
    with SeenOps():
        old(x)
    site.module("acme_again", ROW.replace("size: int = 1", "size: float = 1.00"))
    importlib.reload(module)
    assert module.RowOp()(x).sum() == 6
    with SeenOps(), pytest.raises(DeclarationError, match="with another schema, give this class another name"):
        module.RowOp()(x)


def test_racing_threads_define_each_torch_op_once(fake: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.kernel_for("fake", fake.call(x.numel()))(x)

    base = fake.op({"a": fake.kernel(run=torch.clone)})
    body = {"__module__": "acme_race", "forward": forward}
    ops = [type(f"Race{i}Op", (base,), body)() for i in range(20)]
    start = threading.Barrier(16)

    def call_all(seed: int) -> int:
        start.wait(timeout=30)
        with SeenOps() as mode:
            for op in ops:
                op(torch.ones(3))
        # A torch op that a thread met before its kernel for autograd was there would show by its public name.
        return len([name for name in mode.seen if name.startswith("tileops._acme_race__Race")])

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(call_all, range(16))) == [20] * 16


def test_a_torch_op_nobody_has_is_a_missing_attribute() -> None:
    assert not hasattr(torch.ops.tileops, "layer_norm_backwards_forever")
    assert torch_guards.needs_dispatcher((None, torch.ones(2))) is False


def test_torch_finds_our_ops_by_name_before_they_are_imported(site: Any) -> None:
    site.python(
        f"""
        import sys
        sys.path.insert(0, {str(Path(tileops.__file__).parents[1])!r})
        import tileops, torch
        assert not {{"tileops.ops.norm.layer_norm", "tileops.torch_boundary"}} & set(sys.modules)
        y = torch.ops.tileops.layer_norm(torch.ones(2, 4, device="meta"), None, None, [4], 1e-5)
        assert y.shape == (2, 4) and "tileops.ops.norm.layer_norm" in sys.modules
        """
    )
