"""Batch norm through the op, on CPU: in training and in inference."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from hypothesis import given
from tileops import BatchNormBwdOp, BatchNormFwdOp, register_kernel_type
from tileops.kernels.batch_norm import BatchNormBwdCall, BatchNormInferCall, BatchNormTrain, BatchNormTrainCall
from tileops.kernels.batch_norm.regions import held_plans, region, vector_width
from tileops.kernels.batch_norm.split_channel import split_channels
from tileops.kernels.batch_norm.split_column import split_columns
from torch import Tensor

pytestmark = pytest.mark.usefixtures("backends")

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(5, 4), (2, 3), (5, 4, 7), (3, 5, 4, 7), (2, 3, 2, 3, 5), (1, 3, 8, 8), (6, 1, 3, 3)]
CPU = torch.device("cpu")


def drawn(*shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) + mean).to(dtype)


def statistics(channels: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return drawn(channels, dtype=dtype, seed=1), drawn(channels, dtype=dtype, seed=2).abs() + 0.5


def in_float64(*values: Tensor | None) -> list[Tensor | None]:
    return [None if value is None else value.detach().double().clone() for value in values]


def trained(
    x: Tensor, mean: Any, variance: Any, weight: Any, bias: Any, momentum: float = 0.1, eps: float = 1e-5
) -> Any:
    """Torch in float64 on the same values: output, mean, invstd, new running mean, new running variance."""
    wide, running_mean, running_var, weight, bias = in_float64(x, mean, variance, weight, bias)
    assert wide is not None
    y = F.batch_norm(wide, running_mean, running_var, weight, bias, True, momentum, eps)
    axes = [axis for axis in range(x.dim()) if axis != 1]
    invstd = 1 / torch.sqrt(wide.var(dim=axes, correction=0) + eps)
    return y, wide.mean(dim=axes), invstd, running_mean, running_var


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_training_agrees_with_torch_running_statistics_included(close: Any, shape: Any, dtype: torch.dtype) -> None:
    x, c = drawn(*shape, dtype=dtype), shape[1]
    mean, variance = statistics(c, torch.float64 if dtype is torch.float64 else torch.float32)
    weight, bias = drawn(c, dtype=dtype, mean=1), drawn(c, dtype=dtype)
    y, save_mean, save_invstd, new_mean, new_variance = trained(x, mean, variance, weight, bias)
    output, got_mean, got_invstd = BatchNormFwdOp(training=True)(x, mean, variance, weight, bias)
    close(output, y, dtype)
    close(got_mean, save_mean, mean.dtype)
    close(got_invstd, save_invstd, mean.dtype)
    close(mean, new_mean)
    close(variance, new_variance)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inference_agrees_with_torch_and_writes_nothing(close: Any, shape: Any, dtype: torch.dtype) -> None:
    x, c = drawn(*shape, dtype=dtype), shape[1]
    mean, variance = statistics(c, torch.float64 if dtype is torch.float64 else torch.float32)
    weight, bias = drawn(c, dtype=dtype, mean=1), drawn(c, dtype=dtype)
    before = mean.clone(), variance.clone()
    output, save_mean, save_invstd = BatchNormFwdOp()(x, mean, variance, weight, bias)
    close(output, F.batch_norm(*in_float64(x, mean, variance, weight, bias)), dtype)
    assert save_mean is None
    assert save_invstd is None
    assert torch.equal(mean, before[0])
    assert torch.equal(variance, before[1])


@pytest.mark.parametrize("affine", ["none", "weight", "bias", "both"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [torch.float16, torch.float32], ids=str)
def test_affine_tensors_may_be_absent_and_in_float32_or_in_the_dtype_of_x(
    close: Any, affine: str, training: bool, kind: torch.dtype
) -> None:
    x, (mean, variance) = drawn(6, 4, 5, dtype=torch.float16), statistics(4)
    weight = drawn(4, dtype=kind, mean=1) if affine in ("weight", "both") else None
    bias = drawn(4, dtype=kind) if affine in ("bias", "both") else None
    wide = in_float64(x, mean, variance, weight, bias)
    close(BatchNormFwdOp(training)(x, mean, variance, weight, bias)[0], F.batch_norm(*wide, training=training))


def test_training_without_running_statistics_uses_the_batchs(close: Any) -> None:
    x = drawn(6, 4, 5)
    output, save_mean, save_invstd = BatchNormFwdOp(training=True)(x)
    y, mean, invstd, *_ = trained(x, None, None, None, None)
    close(output, y)
    close(save_mean, mean)
    close(save_invstd, invstd)


@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("eps", [1e-12, 1e-5, 1.0])
def test_momentum_and_eps_mean_what_they_mean_in_torch(close: Any, momentum: float, eps: float) -> None:
    x, (mean, variance) = drawn(8, 3, 4), statistics(3)
    y, _, invstd, new_mean, new_variance = trained(x, mean, variance, None, None, momentum, eps)
    output, _, save_invstd = BatchNormFwdOp(True, momentum, eps)(x, mean, variance)
    for got, expected in ((output, y), (save_invstd, invstd), (mean, new_mean), (variance, new_variance)):
        close(got, expected)


def test_the_running_variance_is_unbiased(close: Any) -> None:
    x, mean, variance = torch.tensor([[0.0], [2.0]]), torch.zeros(1), torch.zeros(1)
    BatchNormFwdOp(training=True, momentum=1.0)(x, mean, variance)
    assert (mean.item(), variance.item()) == (1.0, 2.0)


@pytest.mark.parametrize("kind", [torch.float16, torch.float32], ids=str)
def test_running_statistics_in_the_dtype_of_x_are_updated(close: Any, kind: torch.dtype) -> None:
    x, (mean, variance) = drawn(8, 3, 4, dtype=torch.float16), statistics(3, kind)
    *_, new_mean, new_variance = trained(x, mean, variance, None, None)
    BatchNormFwdOp(training=True)(x, mean, variance)
    close(mean, new_mean, kind)
    close(variance, new_variance, kind)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(8, 64), (7, 5, 9), (4, 16, 8, 8), (2, 3, 2, 5, 4)], ids=str)
def test_running_statistics_are_torchs_to_the_last_bit_after_many_steps(shape: Any, dtype: torch.dtype) -> None:
    """In float32, or in float64 beside it: in fewer bits torch rounds in the middle of its sums."""
    kind = torch.float64 if dtype is torch.float64 else torch.float32
    ours, theirs = statistics(shape[1], kind), statistics(shape[1], kind)
    op = BatchNormFwdOp(training=True, momentum=0.3)
    for step in range(5):
        x = drawn(*shape, dtype=dtype, mean=10.0 * step) * (step + 1)
        if len(shape) == 4 and step % 2:
            x = x.contiguous(memory_format=torch.channels_last)
        op(x, *ours)
        F.batch_norm(x, *theirs, training=True, momentum=0.3)
        assert all(torch.equal(own, other) for own, other in zip(ours, theirs))


def test_a_non_contiguous_running_statistic_is_updated_in_the_callers_view(close: Any) -> None:
    table = torch.stack([*statistics(3), torch.full((3,), 7.0)], dim=1)
    mean, variance = table[:, 0], table[:, 1]
    x = drawn(8, 3, 4)
    *_, new_mean, new_variance = trained(x, mean, variance, None, None)
    BatchNormFwdOp(training=True)(x, mean, variance)
    close(table[:, 0], new_mean)
    close(table[:, 1], new_variance)
    assert table[:, 2].tolist() == [7.0] * 3


def test_misaligned_running_statistics_are_updated_in_place(close: Any) -> None:
    buffer = torch.cat([torch.full((1,), 7.0), *statistics(3), torch.full((1,), 7.0)])
    mean, variance = buffer[1:4], buffer[4:7]
    x = drawn(8, 3, 4)
    *_, new_mean, new_variance = trained(x, mean, variance, None, None)
    BatchNormFwdOp(training=True)(x, mean, variance)
    close(mean, new_mean)
    close(variance, new_variance)
    assert (buffer[0].item(), buffer[7].item()) == (7.0, 7.0)


def test_inference_with_awkward_statistics_is_correct(close: Any) -> None:
    table = torch.stack(statistics(3), dim=1)
    x = drawn(8, 3, 4)
    output, *_ = BatchNormFwdOp()(x, table[:, 0], table[:, 1])
    close(output, F.batch_norm(*in_float64(x, table[:, 0], table[:, 1])))


def awkward(x: Tensor) -> dict[str, Tensor]:
    n, c, h, w = x.shape
    wide = torch.zeros(n, c, h, 2 * w, dtype=x.dtype)
    wide[..., ::2] = x
    flat = torch.empty(x.numel() + 1, dtype=x.dtype)
    flat[1:] = x.reshape(-1)
    last = torch.empty(x.numel() + 1, dtype=x.dtype)
    last[1:] = x.permute(0, 2, 3, 1).reshape(-1)
    return {
        "channels_last": x.contiguous(memory_format=torch.channels_last),
        "strided": wide[..., ::2],
        "transposed": x.transpose(2, 3).contiguous().transpose(2, 3),
        "batch_innermost": x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
        "misaligned": flat[1:].view(x.shape),
        "misaligned_channels_last": last[1:].view(n, h, w, c).permute(0, 3, 1, 2),
        "sliced": torch.cat([x, x], dim=1)[:, :c],
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", list(awkward(torch.zeros(1, 1, 1, 1))))
def test_every_memory_layout_gives_what_a_contiguous_tensor_gives(
    close: Any, layout: str, dtype: torch.dtype, training: bool
) -> None:
    x = drawn(3, 5, 4, 7, dtype=dtype, mean=1)
    view = awkward(x)[layout]
    assert torch.equal(view, x)
    kept, weight, bias = statistics(5), drawn(5, mean=1), drawn(5)
    mean, variance = (value.clone() for value in kept)
    output, *_ = BatchNormFwdOp(training)(view, mean, variance, weight, bias)
    wide = in_float64(x, *kept, weight, bias)
    close(output, F.batch_norm(*wide, training=training), dtype)
    close(mean, wide[1])
    close(variance, wide[2])
    assert torch.equal(view, x)


def test_channels_last_memory_comes_out_as_it_went_in() -> None:
    x, (mean, variance) = drawn(3, 5, 4, 7).contiguous(memory_format=torch.channels_last), statistics(5)
    for training in (True, False):
        output, *_ = BatchNormFwdOp(training)(x, mean, variance)
        assert output.is_contiguous(memory_format=torch.channels_last)
        assert output.stride() == x.stride()
    output, *_ = BatchNormFwdOp()(x.contiguous(), mean, variance)
    assert output.is_contiguous()


def test_an_expanded_batch_is_served(close: Any) -> None:
    x = drawn(1, 3, 8).expand(4, 3, 8)
    close(BatchNormFwdOp(training=True)(x)[0], trained(x, None, None, None, None)[0])


@pytest.mark.parametrize(("mean_of_x", "digits"), [(1e3, 1e-5), (1e4, 1e-4)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_channel_of_large_mean_and_deviation_1_keeps_its_variance(
    mean_of_x: float, digits: float, channels_last: bool
) -> None:
    x = drawn(16, 4, 16, 16, mean=mean_of_x)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    mean, variance = torch.zeros(4), torch.zeros(4)
    _, expected_mean, expected_invstd, *_ = trained(x, None, None, None, None)
    output, save_mean, save_invstd = BatchNormFwdOp(training=True, momentum=1.0)(x, mean, variance)
    torch.testing.assert_close(save_invstd.double(), expected_invstd, rtol=digits, atol=0)
    torch.testing.assert_close(save_mean.double(), expected_mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(variance.double(), x.double().var(dim=(0, 2, 3)), rtol=digits, atol=0)
    assert (output.std(dim=(0, 2, 3)) - 1).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_batch_of_mean_1000_and_deviation_a_tenth_is_finite(close: Any, dtype: torch.dtype) -> None:
    x = (1000 + 0.1 * drawn(32, 64)).to(dtype)
    output, _, save_invstd = BatchNormFwdOp(training=True)(x)
    assert output.isfinite().all()
    torch.testing.assert_close(save_invstd.double(), trained(x, None, None, None, None)[2], rtol=1e-5, atol=0)


def test_two_runs_are_bit_identical() -> None:
    x = drawn(33, 5, 7, 7, mean=3)
    results = []
    for _ in range(2):
        mean, variance = statistics(5)
        results.append([*BatchNormFwdOp(training=True)(x, mean, variance), mean, variance])
    assert all(torch.equal(one, other) for one, other in zip(*results))


def test_results_are_new(close: Any) -> None:
    x, (mean, variance) = drawn(5, 3, 4), statistics(3)
    known = {value.untyped_storage().data_ptr() for value in (x, mean, variance)}
    for training in (True, False):
        results = [value for value in BatchNormFwdOp(training)(x, mean, variance) if value is not None]
        assert known.isdisjoint(value.untyped_storage().data_ptr() for value in results)


def test_buffers_that_batch_norm_modules_hold_are_updated_under_no_grad(close: Any) -> None:
    module, x = torch.nn.BatchNorm2d(4), drawn(3, 4, 5, 5)
    twin = torch.nn.BatchNorm2d(4).double()
    with torch.no_grad():
        output, *_ = BatchNormFwdOp(training=True)(
            x, module.running_mean, module.running_var, module.weight, module.bias
        )
        close(output, twin(x.double()))
    close(module.running_mean, twin.running_mean)
    close(module.running_var, twin.running_var)


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_an_input_without_elements_gives_an_empty_result_and_leaves_the_statistics(shape: Any, training: bool) -> None:
    mean, variance = statistics(shape[1])
    before = mean.clone(), variance.clone()
    output, save_mean, save_invstd = BatchNormFwdOp(training)(torch.empty(shape), mean, variance)
    assert tuple(output.shape) == shape
    assert torch.equal(mean, before[0])
    assert torch.equal(variance, before[1])
    if training:
        assert tuple(save_mean.shape) == tuple(save_invstd.shape) == (shape[1],)
    else:
        assert save_mean is None


# ------------------------------------------------------------------------------------------------- selection


def test_the_training_interface_has_exactly_four_in_tree_keys_and_inference_one() -> None:
    op = BatchNormFwdOp()
    call = BatchNormTrainCall(CPU, 32, 64, 49, torch.float16).on("h200")
    train = [v.key for v in op.explain("batch_norm_fwd_train", call).verdicts if ":" not in v.key]
    infer_call = BatchNormInferCall(CPU, 64, 49, torch.float16).on("h200")
    infer = [v.key for v in op.explain("batch_norm_fwd_infer", infer_call).verdicts if ":" not in v.key]
    assert (len(train), len(infer)) == (4, 1)


def test_four_training_calls_have_four_winners_on_an_h200() -> None:
    op = BatchNormFwdOp(training=True)
    sizes = [(32, 64, 1), (8192, 1024, 1), (32, 64, 12544), (1024, 64, 12544)]
    keys = [
        op.key_for("batch_norm_fwd_train", BatchNormTrainCall(CPU, n, c, spatial, torch.float16).on("h200"))
        for n, c, spatial in sizes
    ]
    assert len(set(keys)) == 4, keys


@pytest.mark.parametrize("board", ["a100", "l40s", "h100", "h200", "b200", "rtx5090"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_every_training_call_has_exactly_one_in_tree_kernel_on_every_known_board(
    board: str, dtype: torch.dtype
) -> None:
    op = BatchNormFwdOp(training=True)
    for n in (1, 2, 32, 1024, 1 << 15):
        for c in (1, 3, 64, 1000, 4096):
            for spatial in (1, 2, 7, 49, 64, 3136, 12544, 1 << 20):
                call = BatchNormTrainCall(CPU, n, c, spatial, dtype)
                for spec in (call, dataclasses.replace(call, channels_last=True)):
                    if n * spatial > 1 and (spatial > 1 or not spec.channels_last):
                        selection = op.explain("batch_norm_fwd_train", spec.on(board))
                        assert selection.key is not None, str(selection)
                        assert ":" not in selection.key


@pytest.mark.parametrize("board", ["a100", "h200", "b200"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_inference_call_has_an_in_tree_kernel(board: str, dtype: torch.dtype) -> None:
    op = BatchNormFwdOp()
    for c in (1, 3, 64, 4096):
        for spatial in (1, 7, 49, 12544):
            for channels_last in {False, spatial > 1}:
                call = BatchNormInferCall(CPU, c, spatial, dtype, channels_last=channels_last)
                assert op.key_for("batch_norm_fwd_infer", call.on(board)) == "elementwise"


def test_a_running_batch_size_is_a_hit_within_its_size_class() -> None:
    op = BatchNormFwdOp(training=True)
    calls = {op.explain(torch.empty(n, 4, 8), on="h200").call for n in range(1, 2001)}
    assert len(calls) == 12


def test_explain_rounds_a_batch_of_5_to_8() -> None:
    op = BatchNormFwdOp(training=True)
    assert op.explain(torch.empty(5, 4, 8)).call.n == 8
    assert op.explain("batch_norm_fwd_train", BatchNormTrainCall(CPU, 5, 4, 8, torch.float32)).call.n == 8


def test_the_op_selects_the_interface_by_training() -> None:
    x, (mean, variance) = torch.empty(5, 4, 8), statistics(4)
    assert BatchNormFwdOp(training=True).explain(x, mean, variance).interface == "batch_norm_fwd_train"
    assert BatchNormFwdOp(training=False).explain(x, mean, variance).interface == "batch_norm_fwd_infer"


def test_the_call_spec_names_what_the_call_holds() -> None:
    x = torch.empty(5, 4, 3, 3, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    call = BatchNormFwdOp(True, 0.5, 0.25).explain(x, *statistics(4), torch.ones(4), torch.ones(4).half()).call
    assert call == BatchNormTrainCall(
        CPU, 8, 4, 9, torch.float16, 0.25, 0.5, True, torch.float32, torch.float16, running=True
    )


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 1, 1), (5, 1, 3, 3)], ids=str)
def test_memory_that_is_both_orders_is_called_channels_first(shape: Any) -> None:
    x = torch.empty(shape)
    assert BatchNormFwdOp(training=True).explain(x).call.channels_last is False


BOARDS = ("h200", "a100", "rtx5090")
"""One board of each kind: with clusters and much shared memory, without clusters, with little shared memory."""


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("spatial", [1, 4, 49, 101, 196, 3136, 12544, 1 << 20])
@pytest.mark.parametrize("board", BOARDS)
def test_batch_sizes_build_each_implementation_once_and_select_at_most_two(
    board: str, spatial: int, channels_last: bool
) -> None:
    built = set[tuple[str, Any]]()
    for n in (1 << power for power in range(1, 21)):
        call = BatchNormTrainCall(torch.device("cuda", 0), n, 64, spatial, torch.float16, channels_last=channels_last)
        winner = BatchNormFwdOp.selection("batch_norm_fwd_train", call.on(board)).winner
        assert winner is not None
        built.add((winner.key, winner.cls.entry_for(call.on(board))[0]))
    assert len(built) == len({key for key, _ in built}) <= 2


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("spatial", [1, 49, 101, 3136, 12544, 1 << 20])
@pytest.mark.parametrize("interface", list(BatchNormBwdOp.interfaces))
@pytest.mark.parametrize("board", BOARDS)
def test_batch_sizes_build_each_backward_once_and_select_at_most_two(
    board: str, interface: str, spatial: int, channels_last: bool
) -> None:
    built = set[tuple[str, Any]]()
    for n in (1 << power for power in range(1, 21)):
        call = BatchNormBwdCall(torch.device("cuda", 0), n, 64, spatial, torch.float16, channels_last).on(board)
        winner = BatchNormBwdOp.selection(interface, call).winner
        assert winner is not None
        built.add((winner.key, winner.cls.entry_for(call)[0]))
    assert len(built) == len({key for key, _ in built}) <= 2


@given(
    n=st.integers(1, 1 << 20),
    c=st.integers(1, 4096),
    spatial=st.integers(1, 1 << 17),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    board=st.sampled_from(BOARDS),
)
def test_a_batch_that_stays_on_chip_has_a_program_that_holds_it(
    n: int, c: int, spatial: int, dtype: torch.dtype, board: str
) -> None:
    call = BatchNormTrainCall(torch.device("cuda", 0), n, c, spatial, dtype).on(board)
    plans = held_plans(call)
    assert [plan.most_n for plan in plans] == sorted({plan.most_n for plan in plans})
    if region(call) == "held_channel":
        plan = next(plan for plan in plans if n <= plan.most_n)
        vectors = plan.blocks * plan.most_warps * 32 * (plan.held + plan.parked)
        assert n * spatial <= vectors * vector_width(spatial, dtype)
        assert plan.parked % plan.group == 0


@given(rows=st.integers(1, 1 << 40), c=st.integers(1, 4096), channels_last=st.booleans())
def test_columns_are_cut_into_parts_that_hold_all_rows_and_none_of_which_is_empty(
    rows: int, c: int, channels_last: bool
) -> None:
    split = split_columns(BatchNormTrainCall(CPU, 2, c, 49, torch.float16, channels_last=channels_last).on("h200"))
    chunks, parts = split.cut(rows)
    length = chunks * split.chunk
    assert (parts - 1) * length < rows <= parts * length


@given(items=st.integers(1, 1 << 40), c=st.integers(1, 4096))
def test_channels_are_cut_into_parts_that_hold_all_vectors_and_none_of_which_is_empty(items: int, c: int) -> None:
    split = split_channels(BatchNormTrainCall(CPU, 2, c, 3136, torch.float16).on("h200"))
    chunks, parts = split.cut(items, c)
    length = chunks * split.chunk
    assert (parts - 1) * length < items <= parts * length


@pytest.mark.parametrize("layout", list(awkward(torch.zeros(1, 1, 1, 1))))
def test_a_kernel_is_given_dense_memory_aligned_to_16_bytes_in_the_order_that_the_call_names(layout: str) -> None:
    seen = list[tuple[bool, int]]()

    class Probe(BatchNormTrain):
        devices = frozenset({"cpu"})

        def forward(self, x: Tensor, running_mean: Any, running_var: Any, weight: Any, bias: Any) -> Any:
            dense = x.movedim(1, -1) if self.call is not None and self.call.channels_last else x
            vectors = (running_mean, running_var, weight, bias)
            seen.extend((value.is_contiguous(), value.data_ptr() % 16) for value in (dense, *vectors))
            running_mean.fill_(3)
            running_var.fill_(4)
            return x.clone(), running_mean, running_var

    register_kernel_type("BatchNormFwdOp", "probe", Probe)
    odd = torch.zeros(21)
    mean, variance, weight, bias = odd[1:6], odd[6:11], odd[11:16], odd[16:]
    BatchNormFwdOp(training=True)(awkward(drawn(3, 5, 4, 7))[layout], mean, variance, weight, bias)
    assert seen == [(True, 0)] * 5
    assert odd.tolist() == [0.0] + [3.0] * 5 + [4.0] * 5 + [0.0] * 10
