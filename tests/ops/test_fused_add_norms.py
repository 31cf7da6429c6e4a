"""The sum of two tensors and its norm, through the ops, on CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from tileops import FusedAddLayerNormFwdOp, FusedAddRMSNormFwdOp, InputError
from tileops.kernels.fused_add_layer_norm import FusedAddLayerNorm, FusedAddLayerNormCall
from tileops.kernels.fused_add_rms_norm import FusedAddRMSNorm, FusedAddRMSNormCall
from torch import Tensor

pytestmark = pytest.mark.usefixtures("backends")

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BOARDS = ["a100", "l40s", "h100", "h200", "b200", "rtx5090"]
CPU = torch.device("cpu")


class Case:
    """One of the two ops, and torch's norm of a sum."""

    def __init__(self, op: Any, interface: str, call: Any, affine: int) -> None:
        self.op, self.interface, self.call, self.affine = op, interface, call, affine

    def norm(self, summed: Tensor, *affine: Tensor | None, eps: float = 1e-6) -> Tensor:
        """Torch, in float64, on the same values."""
        wide = [None if value is None else value.double() for value in affine]
        norm: Any = F.rms_norm if self.affine == 1 else F.layer_norm
        return norm(summed.double(), summed.shape[-1:], *wide, eps=eps)

    def parameters(self, n: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [drawn(n, dtype=dtype, mean=1.0) for _ in range(self.affine)]


CASES = [
    pytest.param(Case(FusedAddRMSNormFwdOp, "fused_add_rms_norm", FusedAddRMSNormCall, 1), id="rms"),
    pytest.param(Case(FusedAddLayerNormFwdOp, "fused_add_layer_norm", FusedAddLayerNormCall, 2), id="layer"),
]
both = pytest.mark.parametrize("case", CASES)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + int(mean))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) + mean).to(dtype)


# ------------------------------------------------------------------------------------------------------ results


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("affine", ["own", "float32", None])
def test_it_returns_the_norm_of_the_rounded_sum_and_that_sum(
    close: Any, case: Case, dtype: torch.dtype, affine: str | None
) -> None:
    x, residual = drawn(5, 64, dtype=dtype), drawn(5, 64, dtype=dtype, mean=7)
    given = [] if affine is None else case.parameters(64, dtype if affine == "own" else torch.float32)
    y, summed = case.op()(x, residual, *given)
    assert torch.equal(summed, x + residual)
    close(y, case.norm(summed, *given), dtype)


@both
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_the_sum_is_rounded_before_the_statistics_are_taken(close: Any, case: Case, dtype: torch.dtype) -> None:
    x = torch.full((1, 64), 256.0, dtype=dtype)
    residual = torch.where(torch.arange(64) % 2 == 0, 0.05, -0.05).to(dtype)[None]  # below half an ulp of 256
    y, summed = case.op()(x, residual)
    assert torch.equal(summed, x)
    close(y, case.norm(x), dtype)


def test_the_bias_may_be_given_alone(close: Any) -> None:
    x, residual, bias = drawn(5, 64), drawn(5, 64, mean=1), drawn(64)
    close(FusedAddLayerNormFwdOp()(x, residual, bias=bias)[0], F.layer_norm((x + residual).double(), (64,)) + bias)


@both
@pytest.mark.parametrize("shape", [(1,), (64,), (3, 7), (2, 3, 65), (2, 1, 4, 1000)], ids=str)
def test_any_leading_shape_and_any_row_length_is_served(close: Any, case: Case, shape: Any) -> None:
    x, residual, given = drawn(*shape), drawn(*shape, mean=1), case.parameters(shape[-1])
    y, summed = case.op()(x, residual, *given)
    assert (y.shape, summed.shape) == (x.shape, x.shape)
    close(y, case.norm(x + residual, *given))


@both
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1.0])
def test_eps_is_added_inside_the_root(close: Any, case: Case, eps: float) -> None:
    x, residual = drawn(3, 64) * 0.01, drawn(3, 64, mean=1) * 0.01
    close(case.op(eps)(x, residual)[0], case.norm(x + residual, eps=eps))


@both
@pytest.mark.parametrize("layout", ["strided", "transposed", "misaligned", "padded", "reversed"])
def test_every_memory_layout_gives_what_contiguous_tensors_give(in_layouts: Any, case: Case, layout: str) -> None:
    x, residual = drawn(6, 64), drawn(6, 64, mean=1)
    op = case.op()
    for given in ((in_layouts(x)[layout], residual), (x, in_layouts(residual)[layout])):
        for result, right in zip(op(*given), op(x, residual)):
            assert torch.equal(result, right)
            assert result.is_contiguous()


@both
def test_a_tensor_is_added_to_itself_and_to_an_expanded_one(case: Case) -> None:
    x, row = drawn(6, 64), drawn(1, 64, mean=1).expand(6, 64)
    op = case.op()
    for _ in range(3):
        assert torch.equal(op(x, x)[1], x * 2)
        assert torch.equal(op(x, row)[1], x + row)


@both
def test_both_results_are_new_and_no_argument_is_written(case: Case) -> None:
    given = [drawn(4, 64), drawn(4, 64, mean=1), *case.parameters(64)]
    before = [value.clone() for value in given]
    results = case.op()(*given)
    memory = [value.untyped_storage().data_ptr() for value in (*results, *given)]
    assert len(set(memory)) == len(memory)
    assert all(torch.equal(value, old) for value, old in zip(given, before))


@both
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (2, 0)], ids=str)
def test_inputs_without_elements_give_empty_results(case: Case, shape: Any) -> None:
    results = case.op()(torch.empty(shape, dtype=torch.float16), torch.empty(shape, dtype=torch.float16))
    assert [(tuple(one.shape), one.dtype) for one in results] == [(shape, torch.float16)] * 2


@both
def test_infinities_and_nan_reach_their_own_row_only(case: Case) -> None:
    x, residual = drawn(3, 64), drawn(3, 64, mean=1)
    x[1, 5], residual[1, 5] = float("inf"), float("-inf")
    y, summed = case.op()(x, residual)
    assert summed[1, 5].isnan()
    assert y[1].isnan().all()
    assert not y[[0, 2]].isnan().any()


def test_rows_of_large_mean_keep_their_variance() -> None:
    x, residual = drawn(4, 1000, mean=1e3), drawn(4, 1000, mean=-3)
    right = F.layer_norm((x + residual).double(), (1000,), eps=1e-6)
    relative, absolute = FusedAddLayerNorm.tolerance(torch.float32)
    torch.testing.assert_close(FusedAddLayerNormFwdOp()(x, residual)[0].double(), right, rtol=relative, atol=absolute)


# ---------------------------------------------------------------------------------------------- repeated calls


@both
@pytest.mark.parametrize("shape", [(64,), (2, 64), (2, 3, 64)], ids=str)
def test_a_repeated_call_is_neither_checked_nor_looked_up_and_is_right_for_other_rows(
    case: Case, shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, given = case.op(), case.parameters(64)
    op(drawn(4, *shape), drawn(4, *shape, mean=1), *given)
    monkeypatch.setattr(case.op, "check", lambda *_: pytest.fail("it is checked again"))
    for rows in (1, 4, 7):
        x, residual = drawn(rows, *shape), drawn(rows, *shape, mean=1)
        y, summed = op(x, residual, *given)
        assert torch.equal(summed, x + residual)
        torch.testing.assert_close(y, case.norm(summed, *given).float())


@both
@pytest.mark.parametrize(("rows", "of_residual"), [((5,), (1,)), ((1,), (5,)), ((2, 3), (3, 2)), ((4, 2), (4, 1))])
def test_rows_that_differ_are_refused_also_after_a_like_call(case: Case, rows: Any, of_residual: Any) -> None:
    op = case.op()
    op(drawn(*rows, 64), drawn(*rows, 64))
    with pytest.raises(InputError, match="residual has shape"):
        op(drawn(*rows, 64), drawn(*of_residual, 64))


# --------------------------------------------------------------------------------------------------- selection


@both
@pytest.mark.parametrize("board", BOARDS)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("n", [1, 7, 64, 1000, 4097, 32768, 65536, (1 << 20) + 1])
def test_every_row_has_exactly_one_in_tree_kernel_on_every_known_board(
    case: Case, board: str, dtype: torch.dtype, n: int
) -> None:
    selection = case.op.selection(case.interface, case.call(CPU, n, dtype).on(board))
    assert selection.key in ("held_row", "streamed_row"), str(selection)


@both
def test_a_row_is_held_while_512_threads_have_the_registers(case: Case) -> None:
    keys = [case.op().key_for(case.interface, case.call(CPU, n, torch.bfloat16).on("h200")) for n in (32768, 32776)]
    assert keys == ["held_row", "streamed_row"]
    refused = case.op.selection(case.interface, case.call(CPU, 32776, torch.bfloat16).on("h200")).verdicts[0]
    assert "row of 32776 elements; serves up to 32768 of torch.bfloat16" in str(refused.reason)


@both
def test_a_row_count_is_no_fact_of_selection(case: Case) -> None:
    x = torch.empty(2000, 64)
    assert len({case.op().explain(x[:rows], x[:rows], on="h200").call for rows in range(1, 2001, 7)}) == 1


# --------------------------------------------------------------------------------------------------- contracts


@pytest.mark.parametrize(
    ("interface", "call", "norm"),
    [
        (FusedAddRMSNorm, FusedAddRMSNormCall(CPU, 64, torch.float16, 1e-3, torch.float16), F.rms_norm),
        (
            FusedAddLayerNorm,
            FusedAddLayerNormCall(CPU, 64, torch.float16, 1e-3, torch.float16, torch.float16),
            F.layer_norm,
        ),
    ],
    ids=["rms", "layer"],
)
def test_the_reference_in_float64_rounds_the_sum_as_a_kernel_does(
    close: Any, interface: Any, call: Any, norm: Any
) -> None:
    x, residual, *affine = interface.sample_tensors(call, torch.Generator().manual_seed(1))
    wide = [value.double() for value in (x, residual, *affine)]
    y, summed = interface.reference(call, *wide)
    assert torch.equal(summed, (x + residual).double())
    close(y, norm(summed, (64,), *wide[2:], eps=1e-3))
