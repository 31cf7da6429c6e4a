"""Every in-tree implementation on a GPU: against its reference in float64, and through its op against torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from tileops import (
    BatchNormBwdOp,
    BatchNormFwdOp,
    CaptureError,
    FusedAddLayerNormFwdOp,
    FusedAddRMSNormFwdOp,
    GroupNormBwdOp,
    GroupNormFwdOp,
    InputError,
    InstanceNormBwdOp,
    InstanceNormFwdOp,
    LayerNormBwdOp,
    LayerNormFwdOp,
    OpNotAvailableError,
    RMSNormBwdOp,
    RMSNormFwdOp,
)
from tileops.kernels.kernel_base import Kernel, KernelInterface, available, kernels_of
from tileops.ops import entries
from tileops.verdict import IN_TREE, Answer, Owner
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("backends"),
]

CUDA = torch.device("cuda", 0)
COMPILERS = 8
"""Kernels that are compiled at once."""

OPS = (
    LayerNormFwdOp,
    RMSNormFwdOp,
    FusedAddLayerNormFwdOp,
    FusedAddRMSNormFwdOp,
    BatchNormFwdOp,
    GroupNormFwdOp,
    InstanceNormFwdOp,
    LayerNormBwdOp,
    RMSNormBwdOp,
    BatchNormBwdOp,
    GroupNormBwdOp,
    InstanceNormBwdOp,
)

PLACES = {
    (interface, kernel): f"{name}-{key}"
    for op in OPS
    for name, interface in op.interfaces.items()
    for key, kernel in op.kernel_types.items()
    if issubclass(kernel, interface)
}
IMPLEMENTATIONS = [pytest.param(*place, id=name) for place, name in PLACES.items()]


def served(interface: type[KernelInterface[Any]], kernel: type[Kernel[Any]]) -> list[Any]:
    """The sample calls of an interface that an implementation serves on this device."""
    calls = [call.normalised() for call in interface.sample_calls(CUDA)]
    runs = [call for call in calls if available(kernel, call, Owner(IN_TREE))[0] is Answer.SERVES]
    return [call for call in runs if kernel.refusal(call) is None]


def built(kernel: type[Kernel[Any]], calls: list[Any]) -> Callable[[Any], Any]:
    """A function from a call to its entry: equal identities are built once, several at a time."""
    asked = {call: kernel.entry_for(call) for call in calls}
    factories = dict(asked.values())
    with ThreadPoolExecutor(COMPILERS) as pool:
        made = dict(zip(factories, pool.map(lambda factory: factory(), factories.values())))
    return lambda call: made[asked[call][0]]


def listed(results: Any) -> list[Tensor]:
    """The tensors of a result, in order; what is absent is left out."""
    return [value for value in (results if isinstance(results, tuple) else (results,)) if value is not None]


def run(interface: type[KernelInterface[Any]], entry: Any, tensors: tuple[Tensor | None, ...]) -> list[Tensor]:
    """What an entry returns for copies of `tensors`, then what it wrote. What it may not write must stay."""
    names = list(inspect.signature(interface.forward).parameters)[1:]
    arguments = [None if value is None else value.clone() for value in tensors]
    results = listed(entry(*arguments))
    torch.cuda.synchronize()
    for name, value, old in zip(names, arguments, tensors):
        if value is not None and old is not None and name not in interface.writes:
            assert torch.equal(value, old), f"{name} was written"
    return results + [value for name, value in zip(names, arguments) if name in interface.writes and value is not None]


@pytest.mark.parametrize(("interface", "kernel"), IMPLEMENTATIONS)
def test_an_implementation_agrees_with_its_reference_and_repeats_itself_bit_by_bit(
    interface: type[KernelInterface[Any]], kernel: type[Kernel[Any]], subtests: Any
) -> None:
    calls = served(interface, kernel)
    if not calls:
        pytest.skip("not for this device")
    entry_of = built(kernel, calls)
    for seed, call in enumerate(calls):
        with subtests.test(msg=str(call)):
            tensors = interface.sample_tensors(call, torch.Generator().manual_seed(seed))
            first = run(interface, entry_of(call), tensors)
            second = run(interface, entry_of(call), tensors)
            wide = [None if value is None else value.double() for value in tensors]
            expected = listed(interface.reference(call, *wide))
            assert len(first) == len(expected)
            for one, other, right in zip(first, second, expected):
                assert one.shape == right.shape
                assert torch.equal(one, other)
                relative, absolute = interface.tolerance(one.dtype)
                torch.testing.assert_close(one.double(), right, rtol=relative, atol=absolute)


@pytest.mark.parametrize(("interface", "kernel"), IMPLEMENTATIONS)
def test_what_an_implementation_returns_is_new_and_lies_in_memory_as_its_input_does(
    interface: type[KernelInterface[Any]], kernel: type[Kernel[Any]]
) -> None:
    calls = [call for call in served(interface, kernel) if getattr(call, "need", (True,))[0]][:2]
    entry_of = built(kernel, calls)
    for call in calls:
        tensors = interface.sample_tensors(call, torch.Generator().manual_seed(0))
        x, *rest = listed(entry_of(call)(*tensors))
        assert tensors[0] is not None
        assert (x.shape, x.dtype, x.device, x.stride()) == (
            tensors[0].shape, tensors[0].dtype, tensors[0].device, tensors[0].stride(),
        )  # fmt: skip
        known = {value.untyped_storage().data_ptr() for value in tensors if value is not None}
        assert known.isdisjoint(value.untyped_storage().data_ptr() for value in (x, *rest))


@pytest.mark.parametrize(("interface", "kernel"), IMPLEMENTATIONS)
def test_an_implementation_runs_on_the_current_stream(
    interface: type[KernelInterface[Any]], kernel: type[Kernel[Any]]
) -> None:
    calls = served(interface, kernel)[:1]
    entry_of = built(kernel, calls)
    for call in calls:
        tensors = interface.sample_tensors(call, torch.Generator().manual_seed(0))
        expected = run(interface, entry_of(call), tensors)
        stream = torch.cuda.Stream()
        late = [None if value is None else torch.full_like(value, 0.5) for value in tensors]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # a kernel on another stream would overtake the copies
            for target, value in zip(late, tensors):
                if target is not None:
                    target.copy_(value)
            results = listed(entry_of(call)(*late))
        stream.synchronize()
        assert all(torch.equal(one, other) for one, other in zip(results, expected))


def test_every_sample_call_has_exactly_one_winner_on_this_device(subtests: Any) -> None:
    for op in OPS:
        for name, interface in op.interfaces.items():
            for call in interface.sample_calls(CUDA):
                with subtests.test(msg=str(call)):
                    assert op.selection(name, call).key in op.kernel_types


@pytest.mark.parametrize(("interface", "kernel"), IMPLEMENTATIONS)
def test_every_kernel_of_an_entry_is_listed_once(
    interface: type[KernelInterface[Any]], kernel: type[Kernel[Any]]
) -> None:
    calls = served(interface, kernel)[:1]
    entry_of = built(kernel, calls)
    for call in calls:
        listed_kernels = kernels_of(entry_of(call))
        assert listed_kernels
        assert len({id(one) for one in listed_kernels}) == len(listed_kernels)


# ------------------------------------------------------------------------------------------------ through the ops

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) + mean).to(device=CUDA, dtype=dtype)


def wide(*values: Tensor | None) -> list[Any]:
    return [None if value is None else value.double().clone() for value in values]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [64, 1000, 4097, 200_003])
def test_layer_norm_agrees_with_torch_in_every_memory_layout(
    close: Any, in_layouts: Any, dtype: torch.dtype, n: int
) -> None:
    x, weight, bias = drawn(6, n, dtype=dtype), drawn(n, dtype=dtype, mean=1), drawn(n)
    op = LayerNormFwdOp((n,))
    right = F.layer_norm(x.double(), (n,), *wide(weight, bias))
    for view in in_layouts(x).values():
        close(op(view, weight, bias), right, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [64, 1000, 4097, 200_003])
def test_rms_norm_agrees_with_torch_in_every_memory_layout(
    close: Any, in_layouts: Any, dtype: torch.dtype, n: int
) -> None:
    x, weight = drawn(6, n, dtype=dtype), drawn(n)
    op = RMSNormFwdOp((n,), 1e-6)
    right = F.rms_norm(x.double(), (n,), *wide(weight), 1e-6)
    for view in in_layouts(x).values():
        close(op(view, weight), right, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 1), (70_001, 64), (5003, 250), (1, 4096), (2003, 3000), (531, 16384), (77, 65536), (9, 50_001)],
    ids=str,
)
def test_row_norms_have_the_gradients_of_torch_in_every_number_of_rows(dtype: torch.dtype, shape: Any) -> None:
    rows, n = shape
    x, grad, weight = drawn(rows, n, dtype=dtype, mean=2), drawn(rows, n + 1, dtype=dtype)[:, :n], drawn(n, mean=1)
    for op, norm in (
        (LayerNormBwdOp(n, bias_dtype=torch.float32), lambda x, w, b: F.layer_norm(x, (n,), w, b)),
        (RMSNormBwdOp(n, 1e-5), lambda x, w, b: F.rms_norm(x, (n,), w, 1e-5)),
    ):
        results = op(grad, x, weight)
        arguments = [one.requires_grad_() for one in wide(x, weight, torch.zeros_like(weight))][: len(results)]
        rights = torch.autograd.grad(norm(*[*arguments, None][:3]), arguments, grad.double())
        tolerances = [(1e-5, 2e-5) if dtype is torch.float32 else (1e-2, 1e-2), *[(1e-5, 1e-5 * rows**0.5)] * 2]
        for result, right, (relative, absolute) in zip(results, rights, tolerances):
            torch.testing.assert_close(result.double(), right, rtol=relative, atol=absolute)
        assert all(torch.equal(one, other) for one, other in zip(results, op(grad, x, weight)))


@pytest.mark.parametrize("op", [LayerNormBwdOp(768, bias_dtype=torch.float32), RMSNormBwdOp(768)], ids=repr)
def test_a_row_that_is_not_finite_leaves_the_gradients_of_other_rows_alone(op: Any) -> None:
    x, grad, weight = drawn(300, 768), drawn(300, 768, mean=1), drawn(768)
    right = op(grad, x, weight)[0]
    x[-1, 5] = torch.inf
    results = op(grad, x, weight)
    assert torch.equal(results[0][:-1], right[:-1])
    assert results[0][-1].isnan().any()
    assert results[1].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [64, 1000, 4097, 200_003])
def test_a_fused_norm_is_the_sum_and_its_norm_bit_by_bit_in_every_memory_layout(
    in_layouts: Any, dtype: torch.dtype, n: int
) -> None:
    x, residual, weight, bias = drawn(6, n, dtype=dtype), drawn(6, n, dtype=dtype, mean=3), drawn(n, mean=1), drawn(n)
    rms, layer = RMSNormFwdOp((n,), 1e-6)(x + residual, weight), LayerNormFwdOp((n,), 1e-6)(x + residual, weight, bias)
    for view in in_layouts(x).values():
        for y, summed, right in (
            (*FusedAddRMSNormFwdOp()(view, residual, weight), rms),
            (*FusedAddLayerNormFwdOp()(residual, view, weight, bias), layer),
        ):
            assert torch.equal(summed, x + residual)
            assert torch.equal(y, right)


@pytest.mark.parametrize("shape", [(768,), (2, 768), (2, 3, 768)])
def test_a_repeated_fused_call_is_right_for_other_rows_and_refuses_residuals_of_fewer(shape: Any) -> None:
    op, weight = FusedAddRMSNormFwdOp(), drawn(768)
    for rows in (1, 5, 133):
        x = drawn(rows, *shape)
        y, summed = op(x, x * 2, weight)
        assert torch.equal(summed, x + x * 2)
        assert torch.equal(y, RMSNormFwdOp((768,), 1e-6)(summed, weight))
    with pytest.raises(InputError, match="residual has shape"):
        op(drawn(5, *shape), drawn(1, *shape), weight)


BATCHES = [
    (8192, 64, 1, 1),
    (37, 5, 7, 7),
    (64, 256, 14, 14),
    (8, 16, 56, 56),
    (32, 64, 112, 112),
    (4, 3, 512, 512),
    (1, 1, 1, 3),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", BATCHES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_agrees_with_torch_running_statistics_included(
    close: Any, dtype: torch.dtype, shape: Any, channels_last: bool, training: bool
) -> None:
    x, c = drawn(*shape, dtype=dtype, mean=3), shape[1]
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    mean, variance, weight, bias = drawn(c), drawn(c).abs() + 0.5, drawn(c, mean=1), drawn(c)
    values = wide(x, mean, variance, weight, bias)
    right = F.batch_norm(*values, training=training)
    output, *_ = BatchNormFwdOp(training)(x, mean, variance, weight, bias)
    close(output, right, dtype)
    close(mean, values[1])
    close(variance, values[2])
    assert output.stride() == x.stride()


def test_batch_norm_of_awkward_memory_agrees_with_torch(close: Any) -> None:
    x = drawn(6, 5, 8, 12)
    flat = torch.empty(x.numel() + 1, device=CUDA)
    flat[1:] = x.reshape(-1)
    doubled = torch.zeros(6, 5, 8, 24, device=CUDA)
    doubled[..., ::2] = x
    right = F.batch_norm(x.double(), None, None, training=True)
    for view in (flat[1:].view(x.shape), doubled[..., ::2], x.transpose(2, 3).contiguous().transpose(2, 3)):
        close(BatchNormFwdOp(training=True)(view)[0], right)
    row = drawn(1, 5, 8).expand(6, 5, 8)
    close(BatchNormFwdOp(training=True)(row)[0], F.batch_norm(row.double(), None, None, training=True))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("spatial", [1, 16, 64])
def test_a_channel_of_mean_1e4_and_deviation_1_keeps_its_variance(spatial: int, channels_last: bool) -> None:
    x = drawn(64, 8, spatial, spatial, mean=1e4)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    mean, variance = torch.zeros(8, device=CUDA), torch.zeros(8, device=CUDA)
    BatchNormFwdOp(training=True, momentum=1.0)(x, mean, variance)
    torch.testing.assert_close(variance.double(), x.double().var(dim=(0, 2, 3)), rtol=1e-5, atol=0)
    torch.testing.assert_close(mean.double(), x.double().mean(dim=(0, 2, 3)), rtol=1e-6, atol=0)


def test_a_non_contiguous_running_statistic_is_updated_in_the_callers_view(close: Any) -> None:
    table = torch.stack([torch.zeros(8), torch.ones(8), torch.full((8,), 7.0)], dim=1).to(CUDA)
    x = drawn(16, 8, 10, 10, mean=2)
    values = wide(x, table[:, 0], table[:, 1])
    F.batch_norm(*values, training=True)
    BatchNormFwdOp(training=True)(x, table[:, 0], table[:, 1])
    close(table[:, 0], values[1])
    close(table[:, 1], values[2])
    assert table[:, 2].tolist() == [7.0] * 8


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("c", "side"), [(64, 1), (8, 7), (24, 14), (3, 56)])
def test_one_batch_norm_agrees_with_torch_at_every_batch_size(
    close: Any, c: int, side: int, channels_last: bool
) -> None:
    op = BatchNormFwdOp(training=True)
    for n in (2, 3, 7, 8, 40, 83, 84, 167, 168, 400, 1300, 5000):
        if n * side * side > 1_200_000:
            continue
        x = drawn(n, c, side, side, dtype=torch.float16, mean=3)
        x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
        mean, variance, weight, bias = drawn(c), drawn(c).abs() + 0.5, drawn(c, mean=1), drawn(c)
        values = wide(x, mean, variance, weight, bias)
        right = F.batch_norm(*values, training=True)
        close(op(x, mean, variance, weight, bias)[0], right, torch.float16)
        close(mean, values[1])
        close(variance, values[2])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("c", "side"), [(64, 1), (8, 7), (24, 14), (3, 56)])
def test_one_batch_norm_has_the_gradients_of_torch_at_every_batch_size(
    c: int, side: int, channels_last: bool, training: bool
) -> None:
    op, weight = BatchNormBwdOp(training), drawn(c, mean=1)
    for n in (2, 3, 7, 8, 40, 83, 84, 167, 168, 400, 1300, 5000):
        if n * side * side > 1_200_000:
            continue
        x = drawn(n, c, side, side, dtype=torch.float16, mean=3)
        grad = drawn(n, c, side, side + 1, dtype=torch.float16)[..., :side]
        x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
        arguments = [one.requires_grad_() for one in wide(x, weight, torch.zeros_like(weight))]
        mean, variance = x.double().mean((0, 2, 3)), x.double().var((0, 2, 3), correction=0)
        running = (None, None) if training else (mean, variance)
        y = F.batch_norm(arguments[0], *running, *arguments[1:], training=training)
        rights = torch.autograd.grad(y, arguments, grad.double())
        results = op(grad, x, mean.float(), torch.rsqrt(variance + 1e-5).float(), weight)
        sums = (1e-4, 1e-5 * (n * side * side) ** 0.5)
        for result, right, (relative, absolute) in zip(results, rights, [(2e-3, 2e-3), sums, sums]):
            torch.testing.assert_close(result.double(), right, rtol=relative, atol=absolute)
        assert results[0].stride() == x.stride()


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        (LayerNormFwdOp((768,)), (768,)),
        (RMSNormFwdOp((768,)), (768,)),
        (BatchNormFwdOp(training=True), (768,)),
        (BatchNormFwdOp(training=True), (4, 28, 28)),
    ],
    ids=repr,
)
def test_two_thousand_row_counts_are_one_build_of_each_implementation_that_they_select(
    op: Any, shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries.drop_entries()
    op_class = type(op)
    monkeypatch.setattr(op_class, "_entries", {})
    builds = list[str]()

    def watcher(key: str) -> Any:
        builds.append(key)
        return nullcontext()

    buffer = drawn(2001, *shape, dtype=torch.bfloat16)
    keys = set[str]()
    monkeypatch.setattr(entries, "showing_build", watcher)
    for rows in range(2, 2002):
        op(buffer[:rows])
        keys.add(op.explain(buffer[:rows]).key)
    assert sorted(builds) == sorted(keys)
    assert len(op_class._entries) <= 12


def test_a_hit_reads_no_device_property(monkeypatch: pytest.MonkeyPatch) -> None:
    op, x = LayerNormFwdOp((768,)), drawn(4, 768, dtype=torch.bfloat16)
    first = op(x)

    def impossible(*_: Any, **__: Any) -> Any:
        raise AssertionError("a hit asks no device")

    for query in ("get_device_properties", "get_device_capability", "is_available", "device_count"):
        monkeypatch.setattr(torch.cuda, query, impossible)
    assert torch.equal(op(x), first)


def test_float64_is_refused_by_name() -> None:
    with pytest.raises(OpNotAvailableError, match="float64"):
        LayerNormFwdOp((64,))(drawn(2, 64).double())


def test_a_warm_op_is_captured_in_a_graph_and_replayed() -> None:
    op, x = LayerNormFwdOp((768,)), drawn(32, 768, dtype=torch.bfloat16)
    expected = op(x)
    graph = torch.cuda.CUDAGraph()
    still = x.clone()
    with torch.cuda.graph(graph):
        y = op(still)
    still.copy_(x * 2)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, op(x * 2))
    assert not torch.equal(y, expected) or torch.equal(op(x * 2), expected)


def test_a_miss_during_a_capture_is_an_error_that_shows_the_line_which_prepares_it() -> None:
    op, x = LayerNormFwdOp((776,)), drawn(8, 776, dtype=torch.bfloat16)
    with pytest.raises(CaptureError, match="prepare"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(0)  # a graph without any work would warn
        op(x)
    torch.cuda.synchronize()
    op.prepare(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, op(x))


def test_one_entry_on_two_streams_at_once_gives_the_same_bits() -> None:
    op = BatchNormFwdOp(training=True)
    x = drawn(32, 64, 112, 112, dtype=torch.float16)  # an entry whose kernels need scratch or a cluster
    expected = op(x)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for _ in range(8):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(op(x))
    torch.cuda.synchronize()
    for result in results:
        for one, other in zip(result, expected):
            assert torch.equal(one, other)


def test_a_hit_allocates_nothing_but_its_output() -> None:
    op, x = LayerNormFwdOp((4096,)), drawn(64, 4096, dtype=torch.bfloat16)
    op(x)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    op(x)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 1


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_call_on_another_device_than_the_current_one_runs_there(close: Any) -> None:
    other = torch.device("cuda", 1)
    x = drawn(16, 768)
    op = LayerNormFwdOp((768,))
    with torch.cuda.device(0):
        here, there = op(x), op(x.to(other))
    assert there.device == other
    assert torch.equal(here.cpu(), there.cpu())
    close(there.to(CUDA), F.layer_norm(x.double(), (768,)))
