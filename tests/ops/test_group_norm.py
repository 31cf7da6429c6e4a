"""Group norm and instance norm through their ops, on CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from hypothesis import given
from hypothesis import strategies as st
from tileops import GroupNormFwdOp, InputError, InstanceNormFwdOp, OpNotAvailableError, register_kernel_type
from tileops.kernels.group_norm import GroupNormBwdCall, GroupNormCall
from tileops.kernels.group_norm.interface import ROWS_CAP, sample_x
from tileops.kernels.instance_norm import InstanceNormTrain, InstanceNormTrainCall
from tileops.ops import op_base
from tileops.testing import Limits
from tileops.testing.target_rules import _cases
from torch import Tensor

pytestmark = pytest.mark.usefixtures("backends")

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CPU = torch.device("cpu")
CHANNELS = 6
# (N, C), (N, C, L), (N, C, H, W), (N, C, D, H, W); one sample, primes.
SHAPES = [(5, 6), (1, 6, 7), (3, 6, 4, 5), (2, 6, 2, 3, 4), (1, 6, 4099)]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) + mean).to(dtype)


def affine(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return drawn(CHANNELS, dtype=dtype, mean=1), drawn(CHANNELS, dtype=dtype, seed=1)


def running() -> tuple[Tensor, Tensor]:
    return drawn(CHANNELS, seed=2), drawn(CHANNELS, seed=3).abs() + 0.5


def in_float64(*values: Tensor | None) -> list[Any]:
    return [None if value is None else value.detach().double().clone() for value in values]


# ------------------------------------------------------------------------------------------------- agreement


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_group_norm_agrees_with_torch_in_every_rank(close: Any, dtype: torch.dtype, groups: int) -> None:
    for shape in SHAPES:
        x, (weight, bias) = drawn(*shape, dtype=dtype, mean=1), affine(dtype)
        wide, w, b = in_float64(x, weight, bias)
        close(GroupNormFwdOp(groups, 1e-3)(x, weight, bias), F.group_norm(wide, groups, w, b, 1e-3), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_instance_norm_by_the_statistics_of_its_input_agrees_with_torch(close: Any, dtype: torch.dtype) -> None:
    for shape in SHAPES[1:]:
        x, (weight, bias) = drawn(*shape, dtype=dtype, mean=1), affine(dtype)
        wide, w, b = in_float64(x, weight, bias)
        right = F.instance_norm(wide, weight=w, bias=b, eps=1e-3)
        close(InstanceNormFwdOp(eps=1e-3)(x, None, None, weight, bias), right, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_instance_norm_by_running_statistics_agrees_with_torch_and_writes_nothing(
    close: Any, dtype: torch.dtype
) -> None:
    for shape in SHAPES:
        x, (weight, bias), (mean, variance) = drawn(*shape, dtype=dtype), affine(dtype), running()
        kept = torch.float64 if dtype is torch.float64 else torch.float32
        mean, variance = mean.to(kept), variance.to(kept)
        values = in_float64(x, mean, variance, weight, bias)
        y = InstanceNormFwdOp(use_input_stats=False)(x, mean, variance, weight, bias)
        close(y, F.instance_norm(*values, use_input_stats=False), dtype)
        assert (mean._version, variance._version) == (0, 0)


@pytest.mark.parametrize("momentum", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_running_statistics_move_as_torch_moves_them(close: Any, dtype: torch.dtype, momentum: float) -> None:
    for shape in SHAPES[1:]:
        x, (weight, bias) = drawn(*shape, dtype=dtype, mean=2), affine(dtype)
        mean, variance = (one.to(torch.float64 if dtype is torch.float64 else torch.float32) for one in running())
        values = in_float64(x, mean, variance, weight, bias)
        right = F.instance_norm(*values, momentum=momentum)
        close(InstanceNormFwdOp(momentum=momentum)(x, mean, variance, weight, bias), right, dtype)
        close(mean, values[1])
        close(variance, values[2])


def test_the_running_statistics_are_means_over_the_batch_and_the_variance_is_unbiased() -> None:
    x, mean, variance = torch.tensor([[[0.0, 2.0]], [[10.0, 14.0]]]), torch.zeros(1), torch.zeros(1)
    InstanceNormFwdOp(momentum=1.0)(x, mean, variance)
    assert (mean.item(), variance.item()) == (6.5, 5.0)


@pytest.mark.parametrize(
    "op", [GroupNormFwdOp(3), InstanceNormFwdOp(), InstanceNormFwdOp(use_input_stats=False)], ids=repr
)
def test_a_call_made_again_gives_the_same(op: Any) -> None:
    x, statistics = drawn(3, 6, 8), [] if isinstance(op, GroupNormFwdOp) else list(running())
    given = [statistics] if isinstance(op, GroupNormFwdOp) or not op.use_input_stats else [statistics, [None, None]]
    for beside in given:
        results = [op(x, *beside, *affine()) for _ in range(4)]
        assert all(torch.equal(results[0], one) for one in results)


@pytest.mark.parametrize("present", ["weight", "bias", "none"])
@pytest.mark.parametrize("kind", [torch.float16, torch.float32], ids=str)
def test_affine_tensors_may_be_absent_and_in_float32_or_in_the_dtype_of_x(
    close: Any, present: str, kind: torch.dtype
) -> None:
    x, (weight, bias), (mean, variance) = drawn(3, 6, 5, dtype=torch.float16), affine(kind), running()
    given = (weight if present == "weight" else None, bias if present == "bias" else None)
    wide, w, b = in_float64(x, *given)
    close(GroupNormFwdOp(2)(x, *given), F.group_norm(wide, 2, w, b))
    close(InstanceNormFwdOp()(x, None, None, *given), F.instance_norm(wide, weight=w, bias=b))
    close(InstanceNormFwdOp()(x, mean, variance, *given), F.instance_norm(wide, weight=w, bias=b))


@pytest.mark.parametrize("shape", [(4, 6, 1000), (1, 6, 128, 128)], ids=str)
def test_a_group_of_large_mean_and_deviation_1_keeps_its_variance(shape: Any) -> None:
    for mean, digits in ((1e3, 1e-5), (1e4, 1e-4)):
        x, running_mean, running_var = drawn(*shape, mean=mean), torch.zeros(6), torch.zeros(6)
        for y, groups in (
            (GroupNormFwdOp(2)(x), 2),
            (InstanceNormFwdOp(momentum=1.0)(x, running_mean, running_var), 6),
        ):
            deviations = y.double().reshape(shape[0], groups, -1).std(dim=2, correction=0)
            torch.testing.assert_close(deviations, torch.ones_like(deviations), rtol=digits, atol=0)
        right = x.double().flatten(2).var(dim=2).mean(dim=0)
        torch.testing.assert_close(running_var.double(), right, rtol=digits, atol=0)


def test_a_group_of_one_element_is_its_bias() -> None:
    x, (weight, bias) = drawn(3, 6, mean=100), affine()
    assert torch.equal(GroupNormFwdOp(6)(x, weight, bias), bias.expand(3, 6))
    assert torch.equal(GroupNormFwdOp(6)(x[:1], weight, bias), bias.expand(1, 6))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_group_with_a_value_that_is_not_finite_spoils_no_other_group(value: float) -> None:
    x = drawn(2, 6, 5)
    right = GroupNormFwdOp(2)(x)
    x[1, 4, 2] = value
    y = GroupNormFwdOp(2)(x)
    assert y[1, 3:].isnan().all()
    assert torch.equal(y[0], right[0])
    assert torch.equal(y[1, :3], right[1, :3])


def test_two_runs_are_bit_identical_and_results_are_new() -> None:
    x, kept = drawn(33, 6, 7, 7, mean=3), [running() for _ in range(2)]
    first, second = (InstanceNormFwdOp()(x, *statistics) for statistics in kept)
    assert torch.equal(first, second)
    assert all(torch.equal(one, other) for one, other in zip(*kept))
    assert first.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


# -------------------------------------------------------------------------------------------------- memory


def awkward(x: Tensor) -> dict[str, Tensor]:
    """Tensors with the values of a four-dimensional x, in memory layouts that are awkward for a kernel."""
    flat = torch.empty(x.numel() + 1, dtype=x.dtype)
    flat[1:] = x.reshape(-1)
    return {
        "channels_last": x.contiguous(memory_format=torch.channels_last),
        "strided": torch.stack([x, x], dim=-1)[..., 0],
        "transposed": x.transpose(2, 3).contiguous().transpose(2, 3),
        "misaligned": flat[1:].view(x.shape),
        "sliced": torch.cat([x, x], dim=1)[:, : x.shape[1]],
    }


@pytest.mark.parametrize("layout", list(awkward(torch.zeros(1, 1, 1, 1))))
def test_every_memory_layout_gives_what_a_contiguous_tensor_gives(layout: str) -> None:
    x, table = drawn(3, 6, 4, 5), torch.stack([*running(), *affine()], dim=1)
    for op in (GroupNormFwdOp(3), InstanceNormFwdOp(), InstanceNormFwdOp(use_input_stats=False)):
        plain, strided = [one.contiguous() for one in table.unbind(1)], table.clone().unbind(1)
        count = len(op.argument_names) - 1
        y, right = op(awkward(x)[layout], *strided[-count:]), op(x, *plain[-count:])
        torch.testing.assert_close((y, *strided), (right, *plain), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", [GroupNormFwdOp(3), InstanceNormFwdOp()], ids=repr)
def test_channels_last_memory_comes_out_as_it_went_in_and_so_do_gradients(op: Any) -> None:
    for shape, order in (((3, 6, 4, 5), torch.channels_last), ((2, 6, 2, 3, 4), torch.channels_last_3d)):
        x = drawn(*shape).contiguous(memory_format=order).requires_grad_()
        y = op(x)
        y.backward(torch.ones(shape))
        assert x.grad is not None
        assert (y.stride(), x.grad.stride()) == (x.stride(), x.stride())
        assert op(x.detach().contiguous()).is_contiguous()


@pytest.mark.parametrize("layout", list(awkward(torch.zeros(1, 1, 1, 1))))
def test_a_kernel_is_given_contiguous_memory_aligned_to_16_bytes(layout: str) -> None:
    seen = list[tuple[bool, int]]()

    class Probe(InstanceNormTrain):
        devices = frozenset({"cpu"})

        def forward(self, x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Any, bias: Any) -> Tensor:
            tensors = (x, running_mean, running_var, weight, bias)
            seen.extend((value.is_contiguous(), value.data_ptr() % 16) for value in tensors)
            running_mean.fill_(3)
            running_var.fill_(4)
            return x.clone()

    register_kernel_type("InstanceNormFwdOp", "probe", Probe)
    odd = torch.zeros(25)
    InstanceNormFwdOp()(awkward(drawn(3, 6, 4, 5))[layout], odd[1:7], odd[7:13], odd[13:19], odd[19:])
    assert seen == [(True, 0)] * 5
    assert odd.tolist() == [0.0] + [3.0] * 6 + [4.0] * 6 + [0.0] * 12


@pytest.mark.parametrize("shape", [(0, 6, 4), (2, 0, 4), (2, 6, 0), (0, 6, 1)], ids=str)
def test_an_input_without_elements_gives_an_empty_result_and_leaves_the_statistics(shape: Any) -> None:
    statistics = torch.full(shape[1:2], 7.0), torch.full(shape[1:2], 7.0)
    assert GroupNormFwdOp(2)(torch.empty(shape)).shape == shape
    if shape[2] != 1:
        assert InstanceNormFwdOp()(torch.empty(shape), *statistics).shape == shape
    assert InstanceNormFwdOp(use_input_stats=False)(torch.empty(shape), *statistics).shape == shape
    assert all(torch.equal(one, torch.full(shape[1:2], 7.0)) for one in statistics)


# ------------------------------------------------------------------------------------------------- selection


def test_instance_norm_selects_the_interface_by_its_meaning() -> None:
    x, statistics = drawn(3, 6, 8), running()
    asked = {
        "group_norm": InstanceNormFwdOp().explain(x),
        "instance_norm_train": InstanceNormFwdOp().explain(x, *statistics),
        "batch_norm_fwd_infer": InstanceNormFwdOp(use_input_stats=False).explain(x, *statistics),
    }
    assert {name: selection.interface for name, selection in asked.items()} == {name: name for name in asked}
    assert asked["group_norm"].call == GroupNormCall(CPU, 32, 1, 8, torch.float32, 1e-5, None, None)


def test_a_group_norm_and_an_instance_norm_of_one_kernel_share_its_entry() -> None:
    call = GroupNormCall(CPU, 16, 1, 77, torch.float32, weight_dtype=None, bias_dtype=None)
    assert InstanceNormFwdOp().kernel_for("group_norm", call) is GroupNormFwdOp(4).kernel_for("group_norm", call)


def test_calls_whose_rows_are_of_one_class_are_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    op = GroupNormFwdOp(2, 3e-4)
    op(drawn(3, 4, 5))
    monkeypatch.setattr(op_base.Op, "_resolve", lambda *_: pytest.fail("a miss"))
    op(drawn(4, 4, 5))
    op(drawn(4, 4, 1, 5))
    assert op._repeats.known


@pytest.mark.parametrize("board", ["a100", "h200", "rtx5090"])
@given(
    rows=st.integers(1, 1 << 24),
    channels=st.integers(1, 4096),
    spatial=st.integers(2, 1 << 18),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_every_call_of_up_to_2_to_the_30_elements_a_group_has_exactly_one_in_tree_kernel(
    board: str, rows: int, channels: int, spatial: int, dtype: torch.dtype
) -> None:
    calls = {
        "group_norm": GroupNormCall(CPU, rows, channels, spatial, dtype),
        "instance_norm_train": InstanceNormTrainCall(CPU, rows, spatial, dtype),
    }
    for interface, call in calls.items():
        assert InstanceNormFwdOp().key_for(interface, call.on(board)) in InstanceNormFwdOp.kernel_types
    backward = GroupNormBwdCall(CPU, rows, channels, spatial, dtype).on(board)
    assert GroupNormFwdOp.backward is not None
    for op in (GroupNormFwdOp.backward, InstanceNormFwdOp.backward):
        assert op.selection("group_norm_bwd", backward).key in op.kernel_types


@given(st.integers(1, 1 << 12), st.integers(1, 3), st.integers(1, 2))
def test_sample_tensors_have_rows_of_the_class_that_they_are_drawn_for(rows: int, channels: int, spatial: int) -> None:
    call = GroupNormCall(CPU, rows, channels, spatial, torch.float32).normalised()
    x = sample_x(call.rows, channels, spatial, torch.float32, CPU, torch.Generator())
    assert x.shape[2] == spatial
    groups = x.shape[1] // channels
    assert GroupNormCall(CPU, x.shape[0] * groups, channels, spatial, torch.float32).normalised() == call
    assert call.rows <= ROWS_CAP


@pytest.mark.parametrize("op", [GroupNormFwdOp, GroupNormFwdOp.backward, InstanceNormFwdOp, InstanceNormFwdOp.backward])
def test_some_sample_calls_are_calls_of_the_op_which_a_target_is_tried_with(op: Any) -> None:
    asked = {type(case.call) for case in _cases(op, Limits(samples=20, elements=1 << 14))}
    assert asked == {interface.request for interface in op.interfaces.values()}


# ------------------------------------------------------------------------------------------------- bad input


X, W = drawn(3, 6, 4), torch.ones(6)
BAD: list[tuple[Any, tuple[Any, ...], str]] = [
    (GroupNormFwdOp(4), (X,), "x has 6 channels; they must divide evenly into num_groups, which is 4"),
    (GroupNormFwdOp(2), (W,), r"x has shape \(6,\); group norm takes \(N, C, \*spatial\), two axes or more"),
    (GroupNormFwdOp(2), (X, W[:2]), r"weight has shape \(2,\); it must have \(6,\), one value per channel of x"),
    (GroupNormFwdOp(2), (X, W, W.half()), "bias is float16; it must be float32"),
    (GroupNormFwdOp(2), (X.long(),), "x is int64; it must be a floating-point tensor"),
    (GroupNormFwdOp(2), (None,), "x is NoneType; give a torch.Tensor"),
    (InstanceNormFwdOp(), (W,), r"x has shape \(6,\); instance norm takes \(N, C, \*spatial\)"),
    (InstanceNormFwdOp(), (X[..., 0],), r"x has shape \(3, 6\): one element of space, which has no variance"),
    (InstanceNormFwdOp(), (X[..., :1, None],), r"x has shape \(3, 6, 1, 1\): one element of space"),
    (InstanceNormFwdOp(), (X, W.clone()), "running_mean is given without running_var; give both"),
    (InstanceNormFwdOp(), (X, None, W.clone()), "running_var is given without running_mean; give both"),
    (InstanceNormFwdOp(), (X, W, W), "running_mean is written, and shares memory with running_var"),
    (InstanceNormFwdOp(), (X, W.clone(), torch.ones(1).expand(6)), "running_var is written, and its elements share"),
    (InstanceNormFwdOp(), (X, W, W.clone(), W), "running_mean is written, and shares memory with weight"),
    (InstanceNormFwdOp(use_input_stats=False), (X,), "without input statistics both are needed"),
    (InstanceNormFwdOp(use_input_stats=False), (X, W.double(), W), "running_mean is float64; it must be float32"),
    (
        InstanceNormFwdOp(),
        (X, torch.ones(6, requires_grad=True), W.clone()),
        r"running_mean requires grad, and InstanceNormFwdOp has no gradient for it",
    ),
]


@pytest.mark.parametrize(("op", "tensors", "sentence"), BAD, ids=[case[2][:40] for case in BAD])
def test_bad_input_is_refused_by_a_sentence_and_writes_nothing(op: Any, tensors: Any, sentence: str) -> None:
    versions = [one._version for one in tensors if one is not None]
    with pytest.raises(InputError, match=sentence):
        op(*tensors)
    assert [one._version for one in tensors if one is not None] == versions


@pytest.mark.parametrize("groups", [0, -2, 2.0, "2", None, True])
def test_what_is_no_number_of_groups_is_refused_at_construction(groups: Any) -> None:
    with pytest.raises(InputError, match="num_groups is .*; it must be a number of groups, 1 or more"):
        GroupNormFwdOp(groups)


@pytest.mark.parametrize("parameters", [{"eps": -1.0}, {"eps": None}, {"momentum": 1.5}, {"momentum": None}], ids=str)
def test_a_number_out_of_its_range_is_refused_at_construction(parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(parameters))} is .*; it must be"):
        InstanceNormFwdOp(**parameters)


def test_a_dtype_that_no_kernel_serves_is_named() -> None:
    for op, beside in ((GroupNormFwdOp(2), ()), (InstanceNormFwdOp(), ()), (InstanceNormFwdOp(), running())):
        with pytest.raises(OpNotAvailableError, match="float8_e4m3fn"):
            op(X.to(torch.float8_e4m3fn), *beside)
