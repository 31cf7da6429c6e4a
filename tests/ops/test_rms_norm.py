"""RMS norm through the op, on CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from tileops import RMSNormFwdOp
from tileops.kernels.rms_norm import RMSNormCall
from torch import Tensor

pytestmark = pytest.mark.usefixtures("backends")

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CPU = torch.device("cpu")


def drawn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64) * scale).to(
        dtype
    )


def expected(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Torch, in float64, on the same values."""
    return F.rms_norm(x.double(), shape, None if weight is None else weight.double(), eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("affine", [None, "own", "float32"])
def test_it_agrees_with_torch_for_every_dtype_and_weight(close: Any, dtype: torch.dtype, affine: str | None) -> None:
    weight = None if affine is None else drawn(64, dtype=dtype if affine == "own" else torch.float32)
    x = drawn(5, 64, dtype=dtype)
    close(RMSNormFwdOp((64,), eps=1e-6)(x, weight), expected(x, (64,), weight), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eps_none_is_what_torch_takes(dtype: torch.dtype) -> None:
    x = drawn(3, 64, dtype=dtype, scale=1e-3)
    torch.testing.assert_close(RMSNormFwdOp((64,))(x), F.rms_norm(x, (64,)))


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1.0])
def test_eps_is_added_inside_the_root(close: Any, eps: float) -> None:
    x = drawn(3, 64, scale=0.01)
    close(RMSNormFwdOp((64,), eps=eps)(x), expected(x, (64,), eps=eps))


@pytest.mark.parametrize("n", [1, 2, 7, 65, 1000])
def test_any_row_length_is_served(close: Any, n: int) -> None:
    x, weight = drawn(3, n), drawn(n)
    close(RMSNormFwdOp(n, 1e-6)(x, weight), expected(x, (n,), weight))


@pytest.mark.parametrize(
    ("shape", "normalized"), [((64,), (64,)), ((2, 3, 4), (4,)), ((2, 3, 4), (3, 4)), ((2, 3, 4), (2, 3, 4))]
)
def test_any_number_of_batch_and_normalised_axes_is_served(close: Any, shape: Any, normalized: Any) -> None:
    x, weight = drawn(*shape), drawn(*normalized)
    close(RMSNormFwdOp(normalized, 1e-6)(x, weight), expected(x, normalized, weight))


@pytest.mark.parametrize("layout", ["strided", "transposed", "misaligned", "padded", "reversed"])
def test_every_memory_layout_gives_what_a_contiguous_tensor_gives(in_layouts: Any, layout: str) -> None:
    x = drawn(6, 64)
    op = RMSNormFwdOp((64,))
    assert torch.equal(op(in_layouts(x)[layout]), op(x))


def test_an_expanded_input_and_an_awkward_weight_are_served(close: Any) -> None:
    x, weight = drawn(1, 64).expand(5, 64), drawn(128)[::2]
    close(RMSNormFwdOp((64,), 1e-6)(x, weight), expected(x, (64,), weight))


def test_the_result_is_new_and_no_argument_is_written() -> None:
    x, weight = drawn(4, 64), drawn(64)
    before = x.clone(), weight.clone()
    y = RMSNormFwdOp((64,))(x, weight)
    assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_tiny_and_large_rows_keep_their_digits(close: Any, scale: float) -> None:
    x = drawn(3, 64, scale=scale)
    close(RMSNormFwdOp((64,), eps=0.0)(x), expected(x, (64,), eps=0.0))


def test_a_row_of_zeros_is_zero() -> None:
    assert torch.equal(RMSNormFwdOp((64,))(torch.zeros(2, 64)), torch.zeros(2, 64))


def test_an_input_without_elements_gives_an_empty_result() -> None:
    y = RMSNormFwdOp((64,))(torch.empty(3, 0, 64, dtype=torch.float16))
    assert (tuple(y.shape), y.dtype) == ((3, 0, 64), torch.float16)


@pytest.mark.parametrize("board", ["a100", "l40s", "h100", "h200", "b200", "rtx5090"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("n", [1, 7, 64, 1000, 4097, 16384, 131072, (1 << 20) + 1])
def test_every_row_has_exactly_one_in_tree_kernel_on_every_known_board(board: str, dtype: torch.dtype, n: int) -> None:
    selection = RMSNormFwdOp((n,)).explain("rms_norm", RMSNormCall(CPU, n, dtype, 1e-6).on(board))
    assert selection.key in ("held_row", "streamed_row"), str(selection)


def test_a_row_count_is_no_fact_of_selection() -> None:
    op = RMSNormFwdOp((64,))
    assert len({op.explain(torch.empty(rows, 64), on="h200").call for rows in range(1, 2001)}) == 1


def test_the_example_target_takes_the_op_over_for_whoever_names_it(close: Any) -> None:
    x, weight = drawn(3, 64), drawn(64)
    close(RMSNormFwdOp((64,), 1e-6, target="example")(x, weight), expected(x, (64,), weight))
