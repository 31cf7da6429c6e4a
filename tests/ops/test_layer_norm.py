"""Layer norm through the op, on CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from tileops import LayerNormFwdOp, register_kernel_type
from tileops.kernels.layer_norm import LayerNorm, LayerNormCall
from torch import Tensor

pytestmark = pytest.mark.usefixtures("backends")

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CPU = torch.device("cpu")


def drawn(*shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64) + mean).to(
        dtype
    )


def expected(
    x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Torch, in float64, on the same values."""
    wide = [None if value is None else value.double() for value in (weight, bias)]
    return F.layer_norm(x.double(), shape, *wide, eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("affine", ["none", "weight", "bias", "both"])
@pytest.mark.parametrize("affine_dtype", ["own", "float32"])
def test_it_agrees_with_torch_for_every_dtype_and_presence_of_the_affine_tensors(
    close: Any, dtype: torch.dtype, affine: str, affine_dtype: str
) -> None:
    kind = dtype if affine_dtype == "own" else torch.float32
    weight = drawn(64, dtype=kind) if affine in ("weight", "both") else None
    bias = drawn(64, dtype=kind, mean=1) if affine in ("bias", "both") else None
    x = drawn(5, 64, dtype=dtype)
    close(LayerNormFwdOp((64,))(x, weight, bias), expected(x, (64,), weight, bias), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_agrees_with_torch_in_the_same_dtype(dtype: torch.dtype) -> None:
    x, weight, bias = drawn(5, 64, dtype=dtype), drawn(64, dtype=dtype), drawn(64, dtype=dtype, mean=1)
    torch.testing.assert_close(LayerNormFwdOp((64,))(x, weight, bias), F.layer_norm(x, (64,), weight, bias))


@pytest.mark.parametrize("n", [1, 2, 7, 63, 64, 65, 1000])
def test_any_row_length_is_served(close: Any, n: int) -> None:
    x, weight, bias = drawn(3, n), drawn(n, mean=1), drawn(n)
    close(LayerNormFwdOp(n)(x, weight, bias), expected(x, (n,), weight, bias))


@pytest.mark.parametrize(
    ("shape", "normalized"),
    [((64,), (64,)), ((2, 3, 4), (4,)), ((2, 3, 4), (3, 4)), ((2, 3, 4), (2, 3, 4)), ((2, 1, 1), (1, 1))],
)
def test_any_number_of_batch_and_normalised_axes_is_served(close: Any, shape: Any, normalized: Any) -> None:
    x, weight, bias = drawn(*shape), drawn(*normalized, mean=1), drawn(*normalized)
    y = LayerNormFwdOp(normalized)(x, weight, bias)
    assert y.shape == x.shape
    close(y, expected(x, normalized, weight, bias))


@pytest.mark.parametrize("normalized", [64, (64,), [64], torch.Size([64])], ids=repr)
def test_the_normalised_shape_is_given_as_torch_takes_it(normalized: Any) -> None:
    assert LayerNormFwdOp(normalized).normalized_shape == (64,)


@pytest.mark.parametrize("layout", ["strided", "transposed", "misaligned", "padded", "reversed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_every_memory_layout_gives_what_a_contiguous_tensor_gives(
    in_layouts: Any, layout: str, dtype: torch.dtype
) -> None:
    x = drawn(6, 64, dtype=dtype)
    awkward = in_layouts(x)[layout]
    assert torch.equal(awkward, x)
    before = awkward.clone()
    op = LayerNormFwdOp((64,))
    y = op(awkward)
    assert torch.equal(y, op(x))
    assert y.is_contiguous()
    assert torch.equal(awkward, before)


def test_an_expanded_input_gives_equal_rows(close: Any) -> None:
    x = drawn(1, 64).expand(5, 64)
    close(LayerNormFwdOp((64,))(x), expected(x, (64,)))


def test_awkward_affine_tensors_are_served(close: Any) -> None:
    x, wide = drawn(4, 8, 8), drawn(8, 16, mean=1)
    weight, bias = wide[:, ::2], drawn(1, 8).expand(8, 8)
    close(LayerNormFwdOp((8, 8))(x, weight, bias), expected(x, (8, 8), weight, bias))


def test_the_result_is_new_and_no_argument_is_written() -> None:
    x, weight, bias = drawn(4, 64), drawn(64), drawn(64)
    before = [value.clone() for value in (x, weight, bias)]
    y = LayerNormFwdOp((64,))(x, weight, bias)
    assert y.untyped_storage().data_ptr() not in {value.untyped_storage().data_ptr() for value in (x, weight, bias)}
    assert all(torch.equal(value, old) for value, old in zip((x, weight, bias), before))


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 1.0])
def test_eps_is_added_inside_the_root(close: Any, eps: float) -> None:
    x = drawn(3, 64) * 0.01
    close(LayerNormFwdOp((64,), eps=eps)(x), expected(x, (64,), eps=eps))


def test_two_values_of_eps_are_two_kernels_results(close: Any) -> None:
    x = drawn(3, 64) * 0.01
    for eps in (1e-5, 1.0, 1e-5):
        close(LayerNormFwdOp((64,), eps)(x), expected(x, (64,), eps=eps))


def test_a_row_of_large_mean_keeps_its_variance(close: Any) -> None:
    x = drawn(4, 1000, mean=1e4)
    close(LayerNormFwdOp((1000,))(x), expected(x, (1000,)))


def test_a_constant_row_gives_the_bias() -> None:
    x, bias = torch.full((3, 64), 1234.5), drawn(64)
    torch.testing.assert_close(LayerNormFwdOp((64,))(x, None, bias), bias.expand(3, 64))


def test_a_row_with_a_nan_is_nan_and_its_neighbours_are_not() -> None:
    x = drawn(3, 64)
    x[1, 5] = float("nan")
    y = LayerNormFwdOp((64,))(x)
    assert y[1].isnan().all()
    assert not y[[0, 2]].isnan().any()


def test_parameters_are_taken_where_no_gradient_is_wanted(close: Any) -> None:
    weight = torch.nn.Parameter(drawn(64))
    x = drawn(3, 64)
    with torch.no_grad():
        close(LayerNormFwdOp((64,))(x, weight), expected(x, (64,), weight))


def test_arguments_may_be_given_by_name() -> None:
    x, weight, bias = drawn(3, 64), drawn(64), drawn(64)
    op = LayerNormFwdOp((64,))
    assert torch.equal(op(bias=bias, x=x, weight=weight), op(x, weight, bias))
    assert torch.equal(op(x, bias=bias), op(x, None, bias))


def test_two_runs_are_bit_identical() -> None:
    x = drawn(133, 1000, mean=10)
    op = LayerNormFwdOp((1000,))
    assert torch.equal(op(x), op(x))


def test_threads_that_share_an_op_do_not_disturb_each_other() -> None:
    from concurrent.futures import ThreadPoolExecutor

    op = LayerNormFwdOp((64,))
    inputs = [drawn(3, 64, mean=i) for i in range(64)]
    alone = [op(x) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(op, inputs))
    assert all(torch.equal(one, other) for one, other in zip(alone, together))


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (2, 0)], ids=str)
def test_an_input_without_elements_gives_an_empty_result_and_asks_no_kernel(shape: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(LayerNormFwdOp, "kernel_for", lambda *_: pytest.fail("no kernel is needed"))
    y = LayerNormFwdOp(shape[-1:])(torch.empty(shape, dtype=torch.float16))
    assert (tuple(y.shape), y.dtype) == (shape, torch.float16)


# ------------------------------------------------------------------------------------------------- selection


@pytest.mark.parametrize("board", ["a100", "l40s", "rtx4090", "h100", "h200", "b200", "rtx5090"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("n", [1, 7, 64, 1000, 4096, 4097, 16384, 65536, 131072, 1 << 20, (1 << 20) + 1])
def test_every_row_has_exactly_one_in_tree_kernel_on_every_known_board(board: str, dtype: torch.dtype, n: int) -> None:
    selection = LayerNormFwdOp((n,)).explain("layer_norm", LayerNormCall(CPU, n, dtype).on(board))
    assert selection.key in ("held_row", "streamed_row"), str(selection)


def test_short_and_long_rows_have_different_kernels() -> None:
    op = LayerNormFwdOp((64,))
    keys = [op.key_for("layer_norm", LayerNormCall(CPU, n, torch.float16).on("h200")) for n in (1024, 1 << 20)]
    assert keys == ["held_row", "streamed_row"]


def test_a_row_count_is_no_fact_of_selection() -> None:
    op = LayerNormFwdOp((64,))
    assert len({op.explain(torch.empty(rows, 64), on="h200").call for rows in range(1, 2001)}) == 1


def test_float64_on_a_gpu_is_refused_by_name() -> None:
    selection = LayerNormFwdOp((64,)).explain("layer_norm", LayerNormCall(CPU, 64, torch.float64).on("h200"))
    assert selection.key is None
    assert all("float64" in (verdict.reason or "") for verdict in selection.verdicts if ":" not in verdict.key)


def test_the_call_spec_names_what_the_call_holds() -> None:
    x, weight = torch.empty(3, 64, dtype=torch.float16), torch.empty(64)
    call = LayerNormFwdOp((64,), eps=0.5).explain(x, weight).call
    assert call == LayerNormCall(CPU, 64, torch.float16, 0.5, torch.float32, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_agrees_with_torch(close: Any, dtype: torch.dtype) -> None:
    call = LayerNormCall(CPU, 64, dtype, 1e-3, dtype, dtype)
    x, weight, bias = LayerNorm.sample_tensors(call, torch.Generator().manual_seed(1))
    assert x is not None
    wide = [None if value is None else value.double() for value in (x, weight, bias)]
    close(LayerNorm.reference(call, *wide), F.layer_norm(wide[0], (64,), wide[1], wide[2], 1e-3))


@pytest.mark.parametrize("layout", ["contiguous", "strided", "transposed", "misaligned", "padded", "reversed"])
def test_a_kernel_is_given_contiguous_tensors_aligned_to_16_bytes(in_layouts: Any, layout: str) -> None:
    seen = list[tuple[bool, int]]()

    class Probe(LayerNorm):
        devices = frozenset({"cpu"})
        preferred_over = frozenset({"example:row", "example:torch"})

        def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            seen.extend(
                (value.is_contiguous(), value.data_ptr() % 16) for value in (x, weight, bias) if value is not None
            )
            return x.clone()

    register_kernel_type("LayerNormFwdOp", "probe", Probe)
    x, odd = in_layouts(drawn(6, 64))[layout], torch.zeros(65)
    assert torch.equal(LayerNormFwdOp((64,))(x, odd[1:], drawn(128)[::2]), x)
    assert seen == [(True, 0)] * 3
