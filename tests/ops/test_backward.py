"""The backward ops, called as ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from tileops import BatchNormBwdOp, GroupNormBwdOp, InputError, InstanceNormBwdOp, LayerNormBwdOp, RMSNormBwdOp
from tileops.kernels.batch_norm import BatchNormBwdInfer, BatchNormBwdTrain
from tileops.kernels.kernel_base import KernelInterface
from tileops.kernels.layer_norm import LayerNormBwd, LayerNormBwdCall
from tileops.kernels.rms_norm import RMSNormBwd
from tileops.kernels.row_backward_plan import held_backward_plan, longest_held_backward_row
from torch import Tensor

pytestmark = pytest.mark.usefixtures("backends")

N = 6
CPU = torch.device("cpu")


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


X, GRAD, W = drawn(4, N), drawn(4, N, seed=1), drawn(N, seed=2)
X_IN_SPACE, GRAD_IN_SPACE = drawn(3, N, 4), drawn(3, N, 4, seed=1)
MEAN, INVSTD = X.mean(0), 1 / torch.sqrt(X.var(0, correction=0) + 1e-5)

CASES: list[tuple[Any, tuple[Tensor | None, ...], tuple[Any, ...]]] = [
    (LayerNormBwdOp, (GRAD, X, W), (N, 1e-5)),
    (RMSNormBwdOp, (GRAD, X, W), (N, 1e-5)),
    (BatchNormBwdOp, (GRAD, X, MEAN, INVSTD, W), (True,)),
    (BatchNormBwdOp, (GRAD, X, MEAN, INVSTD, W), (False,)),
    (GroupNormBwdOp, (GRAD, X, W), (2, 1e-5)),
    (InstanceNormBwdOp, (GRAD_IN_SPACE, X_IN_SPACE, None, None, W), (True, 1e-5)),
    (InstanceNormBwdOp, (GRAD, X, MEAN, INVSTD, W), (False,)),
]
NAMES = ["layer", "rms", "train", "infer", "group", "instance", "instance by running"]
each_op = pytest.mark.parametrize(("op", "tensors", "parameters"), CASES, ids=NAMES)


def expected(op: Any, tensors: tuple[Tensor, ...], parameters: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """By torch's autograd."""
    grad, x = (one.double() for one in tensors[:2])
    x, w, b = (one.clone().requires_grad_() for one in (x, tensors[-1].double(), torch.zeros(N).double()))
    if op is LayerNormBwdOp:
        return torch.autograd.grad(F.layer_norm(x, (N,), w, b), (x, w, b), grad)
    if op is RMSNormBwdOp:
        return torch.autograd.grad(F.rms_norm(x, (N,), w, 1e-5), (x, w), grad)
    if op is GroupNormBwdOp:
        return torch.autograd.grad(F.group_norm(x, 2, w, b), (x, w, b), grad)
    if op is InstanceNormBwdOp and parameters[0]:
        return torch.autograd.grad(F.instance_norm(x, weight=w, bias=b), (x, w, b), grad)
    if parameters[0]:
        return torch.autograd.grad(F.batch_norm(x, None, None, w, b, training=True), (x, w, b), grad)
    y = (x - tensors[2].double()) * tensors[3].double() * w + b
    return torch.autograd.grad(y, (x, w, b), grad)


@each_op
def test_it_gives_the_gradients_of_torch(op: Any, tensors: Any, parameters: Any, close: Any) -> None:
    results = op(*parameters)(*tensors)
    assert op.results == ("grad_x", "grad_weight", "grad_bias")[: len(results)]
    for result, right in zip(results, expected(op, tensors, parameters), strict=True):
        close(result, right, torch.float64)


@each_op
@pytest.mark.parametrize("through", [False, True])
def test_what_is_not_needed_is_none(op: Any, tensors: Any, parameters: Any, through: bool, close: Any) -> None:
    right = expected(op, tensors, parameters)
    for at in range(len(op.results)):
        need = tuple(one == at for one in range(len(op.results)))
        with torch.device("cpu") if through else torch.enable_grad():  # a default device takes calls to the torch op
            results = op(*parameters, need=need)(*tensors)
        assert [result is not None for result in results] == list(need)
        close(results[at], right[at], torch.float64)


@each_op
@pytest.mark.parametrize("through", [False, True])
def test_an_absent_weight_has_no_gradient(op: Any, tensors: Any, parameters: Any, through: bool, close: Any) -> None:
    right = expected(op, (*tensors[:-1], torch.ones(N)), parameters)
    with torch.device("cpu") if through else torch.enable_grad():
        results = op(*parameters)(*tensors[:-1])
    assert results[1] is None
    for at in {0, len(results) - 1} - {1}:
        close(results[at], right[at], torch.float64)


@each_op
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [None, torch.float32], ids=["own", "float32"])
def test_gradients_have_the_dtypes_of_what_they_are_gradients_of(
    op: Any, tensors: Any, parameters: Any, dtype: torch.dtype, kind: torch.dtype | None, close: Any
) -> None:
    grad, x, *statistics, weight = tensors
    given = (
        grad.to(dtype),
        x.to(dtype),
        *(None if one is None else one.float() for one in statistics),
        weight.to(kind or dtype),
    )
    options = {} if op is RMSNormBwdOp else {"bias_dtype": torch.float32}
    results = op(*parameters, **options)(*given)
    wide = expected(op, given, parameters)
    for result, right, its in zip(results, wide, (dtype, kind or dtype, torch.float32)):
        assert result.dtype is its
        torch.testing.assert_close(result.double(), right, rtol=2e-2, atol=2e-2)


@each_op
def test_no_argument_is_written_and_two_runs_are_equal_bit_for_bit(op: Any, tensors: Any, parameters: Any) -> None:
    kept = [None if one is None else one.clone() for one in tensors]
    first, second = op(*parameters)(*tensors), op(*parameters)(*tensors)
    assert all(torch.equal(one, other) for one, other in zip(first, second))
    assert all(one is None or torch.equal(one, other) for one, other in zip(tensors, kept))


@each_op
def test_sums_over_nothing_are_zero(op: Any, tensors: Any, parameters: Any) -> None:
    grad, x, *others = tensors
    grad_x, *sums = op(*parameters)(grad[:0], x[:0], *others)
    assert grad_x.shape == (0, *x.shape[1:])
    assert all(torch.equal(one, torch.zeros(N, dtype=torch.float64)) for one in sums)


@each_op
def test_its_own_gradient_is_the_formulas(op: Any, tensors: Any, parameters: Any) -> None:
    if op is BatchNormBwdOp:  # its statistics are functions of x, or constants: neither is an argument to step along
        tensors = tensors[:2] + tuple(one.detach() for one in tensors[2:])
    grad, x = (one.clone().requires_grad_() for one in tensors[:2])
    (got,) = torch.autograd.grad(op(*parameters)(grad, x, *tensors[2:])[0].sum(), grad)
    (right,) = torch.autograd.grad(op(*parameters).formula(grad, x, *tensors[2:])[0].sum(), grad)
    torch.testing.assert_close(got, right)


BAD: list[tuple[Any, tuple[Any, ...], str]] = [
    (LayerNormBwdOp(N), (GRAD[:2], X, W), r"grad has shape \(2, 6\); it must have \(4, 6\), that of x"),
    (RMSNormBwdOp(N), (GRAD.float(), X, W), "grad is float32; it must be float64, the dtype of x"),
    (LayerNormBwdOp(N), (GRAD.to("meta"), X, W), "grad is on meta and x on cpu"),
    (LayerNormBwdOp(N), (None, X, W), "grad is NoneType; give a torch.Tensor"),
    (LayerNormBwdOp(3), (GRAD, X), r"x has shape \(4, 6\); its trailing axes must be \(3,\)"),
    (LayerNormBwdOp(N), (GRAD, X, W[:3]), r"weight has shape \(3,\); it must have \(6,\), the normalized_shape"),
    (RMSNormBwdOp(N), (GRAD.long(), X.long()), "x is int64; it must be a floating-point tensor"),
    (BatchNormBwdOp(), (GRAD, X, MEAN[:2], INVSTD), r"mean has shape \(2,\); it must have \(6,\)"),
    (BatchNormBwdOp(), (GRAD, X, MEAN, INVSTD.float()), "invstd is float32; it must be float64"),
    (BatchNormBwdOp(), (W, W, MEAN, INVSTD), r"x has shape \(6,\); batch norm takes"),
    (GroupNormBwdOp(4), (GRAD, X), "x has 6 channels; they must divide evenly into num_groups, which is 4"),
    (GroupNormBwdOp(2), (GRAD[:2], X), r"grad has shape \(2, 6\); it must have \(4, 6\), that of x"),
    (InstanceNormBwdOp(), (GRAD, X, MEAN, INVSTD), "mean and invstd are given; with use_input_stats=True"),
    (InstanceNormBwdOp(use_input_stats=False), (GRAD, X, None, INVSTD), "mean is NoneType; give a torch.Tensor"),
]


@pytest.mark.parametrize(("op", "tensors", "sentence"), BAD, ids=[case[2] for case in BAD])
def test_bad_input_is_refused_by_a_sentence_that_names_the_argument(op: Any, tensors: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        op(*tensors)


def test_a_gradient_of_other_rows_is_refused_after_many_calls_too() -> None:
    op = LayerNormBwdOp(N)
    for n in (4, 3, 4, 2):
        op(GRAD[:n], X[:n], W)
    assert op._repeats.known
    with pytest.raises(InputError, match=r"grad has shape \(2, 6\); it must have \(4, 6\)"):
        op(GRAD[:2], X, W)


@pytest.mark.parametrize("need", [(True,), (True, True, 1), (True,) * 4], ids=str)
def test_need_says_true_or_false_for_each_gradient(need: Any) -> None:
    with pytest.raises(InputError, match="it must say for each of grad_x, grad_weight, grad_bias True or False"):
        LayerNormBwdOp(N, need=need)


@pytest.mark.parametrize("interface", [LayerNormBwd, RMSNormBwd, BatchNormBwdTrain, BatchNormBwdInfer])
def test_an_in_tree_kernel_serves_every_sample_on_a_gpu(interface: type[KernelInterface[Any]]) -> None:
    ops = (LayerNormBwdOp(N), RMSNormBwdOp(N), BatchNormBwdOp())
    (op,) = (one for one in ops if interface in one.interfaces.values())
    name = next(name for name, known in op.interfaces.items() if known is interface)
    for call in interface.sample_calls(CPU):
        for board in ("a100", "h200"):
            assert op.explain(name, call.on(board)).key is not None


@pytest.mark.parametrize("op", [LayerNormBwdOp, RMSNormBwdOp])
@pytest.mark.parametrize(("n", "key"), [(1, "held_row"), (16384, "held_row"), (65536, "streamed_row")])
def test_a_row_is_held_while_a_block_can_keep_it_and_its_sums(op: Any, n: int, key: str) -> None:
    ((name, interface),) = op.interfaces.items()
    call = interface.request(torch.device("cuda", 0), n, torch.bfloat16, 1e-5)
    for board in ("a100", "h200"):
        assert op.selection(name, call.on(board)).key == key


def test_a_refusal_to_hold_a_row_says_what_is_held() -> None:
    call = LayerNormBwdCall(torch.device("cuda", 0), 65536, torch.bfloat16).on("h200")
    assert LayerNormBwdOp.kernel_types["held_row"].refusal(call) == (
        "row of 65536 elements; with 2 sums over rows, 232448 bytes of shared memory serve up to 16384 of bfloat16 "
        "at its alignment"
    )


@given(
    st.integers(1, 1 << 17),
    st.sampled_from([torch.float16, torch.float32]),
    st.sampled_from([None, torch.float32]),
    st.integers(0, 2),
    st.sampled_from([49152, 101376, 232448]),
)
def test_threads_that_hold_a_row_cover_it_and_fit_a_block(
    n: int, dtype: torch.dtype, weight_dtype: torch.dtype | None, sums: int, smem_budget: int
) -> None:
    plan = held_backward_plan(n, dtype, weight_dtype, sums, smem_budget)
    longest = longest_held_backward_row(n, dtype, sums, smem_budget)
    if plan is None:
        assert n > longest
        return
    row = plan.row
    assert n <= longest
    assert row.lanes * row.elements >= n > row.lanes * (row.elements - row.vector)
    assert row.lanes % 32 == 0 or 32 % row.lanes == 0
    assert 32 <= row.threads <= 512
    # A warp of a row holds a part of it: none divides by nothing.
    assert row.lanes <= 32 or row.vectors > row.lanes - 32
