"""Bad input: one sentence that names the argument, what came and what is served; every tensor stays as it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tileops import (
    BatchNormFwdOp,
    FusedAddLayerNormFwdOp,
    FusedAddRMSNormFwdOp,
    InputError,
    LayerNormFwdOp,
    OpNotAvailableError,
    RMSNormFwdOp,
)
from tileops.backend.registration import Registry, update_registry
from torch import Tensor

pytestmark = pytest.mark.usefixtures("backends")

X, X3 = torch.ones(6, 4), torch.ones(6, 4, 3)
W = torch.ones(4)


def layer(x: Any = X, weight: Any = None, bias: Any = None, shape: Any = (4,)) -> Any:
    return LayerNormFwdOp(shape)(x, weight, bias)


def rms(x: Any = X, weight: Any = None, shape: Any = (4,)) -> Any:
    return RMSNormFwdOp(shape)(x, weight)


def add_rms(x: Any = X, residual: Any = X, weight: Any = None) -> Any:
    return FusedAddRMSNormFwdOp()(x, residual, weight)


def add_layer(x: Any = X, residual: Any = X, weight: Any = None, bias: Any = None) -> Any:
    return FusedAddLayerNormFwdOp()(x, residual, weight, bias)


def train(x: Any = X3, mean: Any = None, var: Any = None, weight: Any = None, bias: Any = None) -> Any:
    return BatchNormFwdOp(training=True)(x, mean, var, weight, bias)


def infer(x: Any = X3, mean: Any = W, var: Any = W, weight: Any = None, bias: Any = None) -> Any:
    return BatchNormFwdOp()(x, mean, var, weight, bias)


def of(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.ones(shape).to(dtype)


def untouched(call: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Assert that `call` writes none of its tensors, whatever it raises."""
    tensors = [value for value in arguments.values() if isinstance(value, Tensor) and value.device.type == "cpu"]
    before = [(value.detach().clone(), value.shape, value.stride(), value._version) for value in tensors]
    with pytest.raises((InputError, OpNotAvailableError)):
        call(**arguments)
    for value, (old, shape, stride, version) in zip(tensors, before):
        assert (value.shape, value.stride(), value._version) == (shape, stride, version)
        assert torch.equal(bits(value), bits(old))


def bits(value: Tensor) -> Tensor:
    """The bytes of a tensor's elements, which compare equal also for NaN and for dtypes without comparison."""
    return value.detach().reshape(-1).contiguous().view(torch.uint8)


BAD: list[tuple[str, Callable[..., Any], dict[str, Any], str]] = [
    # trailing shape
    (
        "layer: trailing shape",
        layer,
        {"x": torch.ones(4, 6)},
        r"x has shape \(4, 6\); its trailing axes must be \(4,\)",
    ),
    (
        "layer: two trailing axes",
        layer,
        {"x": torch.ones(6, 4, 3), "shape": (4, 4)},
        r"x has shape \(6, 4, 3\).*\(4, 4\)",
    ),
    ("layer: fewer axes", layer, {"x": W, "shape": (2, 4)}, r"x has shape \(4,\).*\(2, 4\)"),
    ("rms: trailing shape", rms, {"x": torch.ones(4, 6)}, r"x has shape \(4, 6\); its trailing axes must be \(4,\)"),
    ("batch: one axis", train, {"x": W}, r"x has shape \(4,\); batch norm takes \(N, C, \*spatial\)"),
    # weight, bias and statistics of another shape
    ("layer: weight's shape", layer, {"weight": torch.ones(6)}, r"weight has shape \(6,\); it must have \(4,\)"),
    ("layer: weight of one", layer, {"weight": torch.ones(1)}, r"weight has shape \(1,\); it must have \(4,\)"),
    ("layer: bias' shape", layer, {"bias": torch.ones(4, 1)}, r"bias has shape \(4, 1\); it must have \(4,\)"),
    ("rms: weight's shape", rms, {"weight": torch.ones(1, 4)}, r"weight has shape \(1, 4\); it must have \(4,\)"),
    ("train: weight's shape", train, {"weight": torch.ones(3)}, r"weight has shape \(3,\); it must have \(4,\)"),
    ("train: bias' shape", train, {"bias": torch.ones(())}, r"bias has shape \(\); it must have \(4,\)"),
    ("infer: mean's shape", infer, {"mean": torch.ones(3)}, r"running_mean has shape \(3,\); it must have \(4,\)"),
    (
        "train: var's shape",
        train,
        {"mean": W, "var": torch.ones(5)},
        r"running_var has shape \(5,\); it must have \(4,\)",
    ),
    # a residual that is not like x
    (
        "add rms: one row of residual",
        add_rms,
        {"residual": torch.ones(1, 4)},
        r"residual has shape \(1, 4\); it must have \(6, 4\), that of x",
    ),
    ("add layer: residual's axes", add_layer, {"residual": torch.ones(6, 4, 1)}, r"residual has shape \(6, 4, 1\)"),
    (
        "add rms: residual's dtype",
        add_rms,
        {"residual": X.half()},
        "residual is float16; it must be float32, the dtype",
    ),
    ("add layer: residual's device", add_layer, {"residual": X.to("meta")}, "residual is on meta and x on cpu"),
    ("add layer: no residual", add_layer, {"residual": None}, "residual is NoneType; give a torch.Tensor"),
    ("add rms: weight's shape", add_rms, {"weight": torch.ones(6)}, r"weight has shape \(6,\); it must have \(4,\)"),
    ("add layer: bias' dtype", add_layer, {"bias": of(torch.float16, 4)}, "bias is float16; it must be float32"),
    ("add rms: 0-d", add_rms, {"x": torch.tensor(1.0)}, r"x has shape \(\); it must have an axis"),
    ("add rms: no tensor", add_rms, {"x": [1.0]}, "x is list; give a torch.Tensor"),
    (
        "add rms: gradient of residual",
        add_rms,
        {"residual": X.clone().requires_grad_()},
        "a gradient is wanted.*FusedAddRMSNormFwdOp has no backward",
    ),
    # devices
    ("layer: weight's device", layer, {"weight": torch.ones(4, device="meta")}, "weight is on meta and x on cpu"),
    ("rms: weight's device", rms, {"weight": torch.ones(4, device="meta")}, "weight is on meta and x on cpu"),
    ("train: bias' device", train, {"bias": torch.ones(4, device="meta")}, "bias is on meta and x on cpu"),
    ("infer: mean's device", infer, {"mean": torch.ones(4, device="meta")}, "running_mean is on meta and x on cpu"),
    (
        "layer: x on a device without kernels",
        layer,
        {"x": torch.ones(6, 4, device="meta")},
        "in-tree kernels do not run on meta",
    ),
    # dtypes of the affine tensors and the statistics
    (
        "layer: weight's dtype",
        layer,
        {"x": of(torch.float16, 6, 4), "weight": of(torch.bfloat16, 4)},
        "weight is bfloat16; it must be float32 or float16, the dtype of x",
    ),
    ("layer: bias' dtype", layer, {"bias": of(torch.float16, 4)}, "bias is float16; it must be float32"),
    ("layer: float64 bias", layer, {"bias": of(torch.float64, 4)}, "bias is float64; it must be float32"),
    ("layer: int weight", layer, {"weight": of(torch.int64, 4)}, "weight is int64; it must be float32"),
    (
        "rms: weight's dtype",
        rms,
        {"x": of(torch.bfloat16, 6, 4), "weight": of(torch.float16, 4)},
        "weight is float16; it must be float32 or bfloat16",
    ),
    ("train: weight's dtype", train, {"weight": of(torch.float16, 4)}, "weight is float16; it must be float32"),
    ("infer: bias' dtype", infer, {"bias": of(torch.float64, 4)}, "bias is float64; it must be float32"),
    (
        "train: mean's dtype",
        train,
        {"mean": of(torch.float64, 4), "var": W},
        "running_mean is float64; it must be float32",
    ),
    (
        "infer: var's dtype",
        infer,
        {"x": of(torch.float16, 6, 4), "var": of(torch.bfloat16, 4)},
        "running_var is bfloat16; it must be float32 or float16",
    ),
    ("train: int statistics", train, {"mean": of(torch.int64, 4), "var": W}, "running_mean is int64"),
    # dtypes of x
    *[
        (
            f"{name}: {dtype}",
            call,
            {"x": of(dtype, *shape)},
            f"x is {str(dtype).removeprefix('torch.')}; it must be a floating",
        )
        for name, call, shape in (
            ("layer", layer, (6, 4)),
            ("rms", rms, (6, 4)),
            ("add rms", add_rms, (6, 4)),
            ("train", train, (6, 4, 3)),
            ("infer", infer, (6, 4)),
        )
        for dtype in (torch.int64, torch.complex64, torch.bool)
    ],
    *[
        (
            f"{name}: float8",
            call,
            {"x": of(torch.float8_e4m3fn, *shape)},
            "no implementation serves this call(.|\n)*float8_e4m3fn",
        )
        for name, call, shape in (
            ("layer", layer, (6, 4)),
            ("rms", rms, (6, 4)),
            ("train", train, (6, 4, 3)),
            ("infer", infer, (6, 4)),
        )
    ],
    # gradients
    (
        "train: gradient of mean",
        train,
        {"mean": torch.nn.Parameter(W.clone()), "var": W.clone()},
        r"running_mean requires grad, and BatchNormFwdOp has no gradient for it; give running_mean.detach\(\)",
    ),
    ("infer: gradient of var", infer, {"var": torch.nn.Parameter(W.clone())}, "running_var requires grad"),
    # too few axes or values
    ("layer: 0-d", layer, {"x": torch.tensor(1.0)}, r"x has shape \(\); its trailing axes must be \(4,\)"),
    ("rms: 0-d", rms, {"x": torch.tensor(1.0)}, r"x has shape \(\); its trailing axes must be \(4,\)"),
    ("train: 0-d", train, {"x": torch.tensor(1.0)}, r"x has shape \(\); batch norm takes"),
    ("infer: 0-d", infer, {"x": torch.tensor(1.0)}, r"x has shape \(\); batch norm takes"),
    ("train: one value per channel", train, {"x": torch.ones(1, 4)}, r"x has shape \(1, 4\): one value per channel"),
    (
        "train: one value, spatial",
        train,
        {"x": torch.ones(1, 4, 1, 1), "mean": W.clone(), "var": W.clone()},
        "one value per channel",
    ),
    # statistics that do not go together
    ("train: mean without var", train, {"mean": W}, "running_mean is given without running_var; give both"),
    ("train: var without mean", train, {"var": W}, "running_var is given without running_mean; give both"),
    ("infer: mean without var", infer, {"var": None}, "running_mean is given without running_var"),
    ("infer: var without mean", infer, {"mean": None}, "running_var is given without running_mean"),
    (
        "infer: no statistics",
        infer,
        {"mean": None, "var": None},
        "running_mean and running_var are None; in inference both",
    ),
    # what is no tensor
    ("layer: no tensor", layer, {"x": [1.0]}, "x is list; give a torch.Tensor"),
    ("layer: None", layer, {"x": None}, "x is NoneType; give a torch.Tensor"),
    ("rms: weight is a number", rms, {"weight": 2.0}, "weight is float; give a torch.Tensor"),
    ("train: mean is a list", train, {"mean": [0.0], "var": W}, "running_mean is list; give a torch.Tensor"),
    ("layer: sparse x", layer, {"x": X.to_sparse()}, "x has layout torch.sparse_coo; give a strided tensor"),
]


@pytest.mark.parametrize(("call", "arguments", "sentence"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_input_is_refused_by_a_sentence_that_names_the_argument(
    call: Callable[..., Any], arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises((InputError, OpNotAvailableError), match=sentence) as raised:
        call(**arguments)
    if isinstance(raised.value, InputError):
        assert "\n" not in str(raised.value)
        assert isinstance(raised.value, ValueError)


STRIDED = [
    case
    for case in BAD
    if all(value.layout is torch.strided for value in case[2].values() if isinstance(value, Tensor))
]


@pytest.mark.parametrize(("call", "arguments"), [case[1:3] for case in STRIDED], ids=[case[0] for case in STRIDED])
def test_bad_input_leaves_every_tensor_as_it_was(call: Callable[..., Any], arguments: dict[str, Any]) -> None:
    untouched(call, arguments)


# ---------------------------------------------------------------------------------------- written arguments


def aliased() -> dict[str, tuple[dict[str, Tensor], str]]:
    shared, buffer = torch.ones(4), torch.ones(6)
    x = torch.ones(6, 4, 3)
    flat = x.view(-1)
    return {
        "one tensor twice": (
            {"mean": shared, "var": shared},
            "running_mean is written, and shares memory with running_var",
        ),
        "overlapping views": (
            {"mean": buffer[:4], "var": buffer[2:]},
            "running_mean is written, and shares memory with running_var",
        ),
        "a view of x": (
            {"x": x, "mean": flat[:4], "var": torch.ones(4)},
            "running_mean is written, and shares memory with x",
        ),
        "another view of x": (
            {"x": x, "mean": torch.ones(4), "var": flat[::18]},
            "running_var is written, and shares memory with x",
        ),
        "the weight": (
            {"mean": shared, "var": torch.ones(4), "weight": shared},
            "running_mean is written, and shares memory with weight",
        ),
        "the bias": (
            {"mean": torch.ones(4), "var": shared, "bias": shared},
            "running_var is written, and shares memory with bias",
        ),
        "an expanded mean": (
            {"mean": torch.ones(1).expand(4), "var": torch.ones(4)},
            "running_mean is written, and its elements share memory",
        ),
        "an expanded variance": (
            {"mean": torch.ones(4), "var": torch.ones(1).expand(4)},
            "running_var is written, and its elements share memory",
        ),
    }


@pytest.mark.parametrize("case", aliased())
def test_a_running_statistic_that_shares_memory_is_refused_and_nothing_is_written(case: str) -> None:
    arguments, sentence = aliased()[case]
    with pytest.raises(InputError, match=sentence):
        train(**arguments)
    untouched(train, arguments)


def test_statistics_that_lie_side_by_side_share_nothing() -> None:
    table = torch.ones(4, 2)
    train(mean=table[:, 0], var=table[:, 1])
    rows = torch.ones(8)
    train(mean=rows[:4], var=rows[4:])
    one = torch.ones(2)
    train(x=torch.ones(6, 1, 3), mean=one[:1], var=one[1:])


def test_in_inference_nothing_is_written_and_statistics_may_share_memory() -> None:
    shared = torch.ones(4)
    infer(mean=shared, var=shared, weight=shared, bias=shared)


def test_statistics_that_are_refused_late_leave_the_first_unwritten() -> None:
    mean, wrong = torch.zeros(4), torch.zeros(5)
    with pytest.raises(InputError):
        train(mean=mean, var=wrong)
    assert torch.equal(mean, torch.zeros(4))


# ------------------------------------------------------------------------------------------------ parameters


@pytest.mark.parametrize("eps", [-1e-5, -1, math.nan, "1e-5", True, torch.tensor(1e-5), 1j])
@pytest.mark.parametrize("op", [lambda eps: LayerNormFwdOp((4,), eps), lambda eps: RMSNormFwdOp((4,), eps),
                                lambda eps: BatchNormFwdOp(eps=eps), FusedAddLayerNormFwdOp, FusedAddRMSNormFwdOp],
                         ids=["layer", "rms", "batch", "add layer", "add rms"])  # fmt: skip
def test_an_eps_that_is_negative_or_no_number_is_refused_at_construction(op: Callable[[Any], Any], eps: Any) -> None:
    with pytest.raises(InputError, match="eps is .*; it must be"):
        op(eps)


@pytest.mark.parametrize(
    "op", [lambda: LayerNormFwdOp((4,), None), lambda: BatchNormFwdOp(eps=None)], ids=["layer", "batch"]
)  # type: ignore[arg-type]
def test_eps_none_is_taken_by_rms_norm_only(op: Callable[[], Any]) -> None:
    with pytest.raises(InputError, match="eps is None; it must be a number"):
        op()


@pytest.mark.parametrize("momentum", [-0.1, 1.1, math.nan, None, "0.1"])
def test_a_momentum_outside_0_to_1_is_refused_at_construction(momentum: Any) -> None:
    with pytest.raises(InputError, match="momentum is .*; it must be"):
        BatchNormFwdOp(True, momentum)


@pytest.mark.parametrize("shape", [(), [], (-1,), (4, -4), ("4",), (4.0,), 4.0, None, -1, "4", True])
@pytest.mark.parametrize("op", [LayerNormFwdOp, RMSNormFwdOp])
def test_a_normalized_shape_that_is_no_shape_is_refused_at_construction(op: Any, shape: Any) -> None:
    with pytest.raises(InputError, match="normalized_shape is .*; it must be"):
        op(shape)


# ------------------------------------------------------------------------------- calls that no kernel here serves


def test_without_a_backend_a_cpu_call_says_what_runs_where_and_what_to_install() -> None:
    update_registry(lambda _: Registry(loaded=True))
    for call in (layer, rms, train, infer):
        with pytest.raises(OpNotAvailableError, match="in-tree kernels do not run on cpu") as raised:
            call()
        assert "runs on cuda, not on cpu" in str(raised.value)
        assert "tileops-backend-example" in str(raised.value)


def test_a_refused_training_call_writes_no_statistic() -> None:
    update_registry(lambda _: Registry(loaded=True))
    untouched(train, {"mean": torch.zeros(4), "var": torch.ones(4)})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e5m2], ids=str)
def test_a_dtype_that_no_kernel_serves_is_named_by_every_kernel_that_could_run(dtype: torch.dtype) -> None:
    asked = [
        (LayerNormFwdOp((4,)), (of(dtype, 6, 4),)),
        (RMSNormFwdOp((4,)), (of(dtype, 6, 4),)),
        (BatchNormFwdOp(training=True), (of(dtype, 6, 4, 3),)),
        (BatchNormFwdOp(), (of(dtype, 6, 4, 3), W, W)),
    ]
    for op, tensors in asked:
        selection = op.explain(*tensors, on="h200")
        assert selection.key is None
        named = [verdict for verdict in selection.verdicts if ":" not in verdict.key]
        assert named
        for verdict in named:
            assert str(dtype).removeprefix("torch.") in (verdict.reason or ""), str(verdict)


def test_bad_input_is_refused_by_explain_too() -> None:
    with pytest.raises(InputError, match="weight has shape"):
        LayerNormFwdOp((4,)).explain(X, torch.ones(6))


def test_bad_input_is_refused_before_a_target_is_asked() -> None:
    with pytest.raises(InputError, match="weight has shape"):
        RMSNormFwdOp((4,), target="nobody")(X, torch.ones(6))


def test_bad_input_is_refused_also_where_x_has_no_elements() -> None:
    with pytest.raises(InputError, match="weight has shape"):
        layer(torch.ones(0, 4), torch.ones(6))
