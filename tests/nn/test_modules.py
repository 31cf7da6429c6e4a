"""The norm modules: torch's in everything but what computes them."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import tileops.nn
import torch
from tileops import InputError, functional
from tileops.ops import op_base
from torch import Tensor, nn
from torch._dynamo.utils import counters

pytestmark = pytest.mark.usefixtures("backends")

BATCH_NORMS = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d"]
ROW_NORMS = ["LayerNorm", "RMSNorm"]
INSTANCE_NORMS = ["InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"]
SHAPES = {
    **{f"{kind}Norm1d": (6, 4, 5) for kind in ("Batch", "Instance")},
    **{f"{kind}Norm2d": (6, 4, 3, 5) for kind in ("Batch", "Instance")},
    **{f"{kind}Norm3d": (6, 4, 2, 3, 2) for kind in ("Batch", "Instance")},
    "GroupNorm": (6, 4, 3, 5),
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "LayerNorm": [{}, {"eps": 1e-3}, {"bias": False}, {"elementwise_affine": False}, {"dtype": torch.float64}],
    "RMSNorm": [{}, {"eps": 1e-3}, {"elementwise_affine": False}, {"dtype": torch.float64}],
    **dict.fromkeys(
        BATCH_NORMS,
        [{}, {"eps": 1e-3}, {"momentum": 0.5}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}],
    ),
    "GroupNorm": [{}, {"eps": 1e-3}, {"affine": False}, {"dtype": torch.float64}],
    **dict.fromkeys(
        INSTANCE_NORMS,
        [{}, {"affine": True}, {"affine": True, "eps": 1e-3}]
        + [{"track_running_stats": True, "momentum": momentum} for momentum in (0.5, None)],
    ),
}
CASES = [(name, options) for name, all_options in OPTIONS.items() for options in all_options]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 + 3).to(dtype)


def made(name: str, **options: Any) -> tuple[Any, Any]:
    """Our module and torch's, of four channels, in two groups."""
    sizes = (2, 4) if name == "GroupNorm" else (4,)
    ours, theirs = (getattr(module, name)(*sizes, **options) for module in (tileops.nn, nn))
    return ours, theirs


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    """Both with equal parameters that are not the initial ones."""
    ours, theirs = made(name, **options)
    for seed, parameter in enumerate(theirs.parameters()):
        parameter.data.copy_(drawn(4, seed=seed))
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def taken(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return drawn(*SHAPES.get(name, (6, 5, 4)), seed=seed, dtype=dtype)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_a_module_has_torchs_constructor_state_dict_repr_and_class(name: str, options: dict[str, Any]) -> None:
    ours, theirs = made(name, **options)
    assert isinstance(ours, type(theirs))
    assert inspect.signature(type(ours)) == inspect.signature(type(theirs))
    assert repr(ours) == repr(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for own, other in zip(ours.state_dict().values(), theirs.state_dict().values()):
        torch.testing.assert_close(own, other, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_a_module_agrees_with_torchs_in_inference(name: str, options: dict[str, Any]) -> None:
    ours, theirs = pair(name, **options)
    x = taken(name, dtype=options.get("dtype", torch.float32))
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


STEPS = [(name, options) for name, options in CASES if name in (*BATCH_NORMS, *INSTANCE_NORMS)]


@pytest.mark.parametrize(("name", "options"), STEPS, ids=str)
def test_a_norm_with_statistics_follows_torchs_over_many_steps(name: str, options: dict[str, Any]) -> None:
    ours, theirs = pair(name, **options)
    with torch.no_grad():
        for seed in range(20):
            x = taken(name, seed=seed)
            torch.testing.assert_close(ours(x), theirs(x))
        for own, other in zip(ours.buffers(), theirs.buffers()):
            torch.testing.assert_close(own, other)
        torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_batches_are_counted_as_torch_counts_them() -> None:
    ours, _ = pair("BatchNorm1d")
    with torch.no_grad():
        ours(taken("BatchNorm1d"))
        ours.eval()(taken("BatchNorm1d"))
        ours.train()(taken("BatchNorm1d"))
        with pytest.raises(InputError, match="one value per channel"):
            ours(torch.ones(1, 4))
    assert ours.num_batches_tracked == 2


def test_statistics_whose_count_is_taken_away_are_moved_as_torch_moves_them() -> None:
    for momentum in (0.5, None):
        ours, theirs = pair("BatchNorm1d", momentum=momentum)
        ours.num_batches_tracked = theirs.num_batches_tracked = None
        with torch.no_grad():
            torch.testing.assert_close(ours(taken("BatchNorm1d")), theirs(taken("BatchNorm1d")))
        torch.testing.assert_close(ours.running_mean, theirs.running_mean)


def test_running_statistics_that_are_taken_away_leave_the_batchs() -> None:
    ours, theirs = pair("BatchNorm1d", momentum=None)
    for module in (ours, theirs):
        module.running_mean = module.running_var = None
    x = taken("BatchNorm1d")
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x))
        torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_an_average_over_batches_builds_one_kernel_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    misses: list[str] = []
    resolve = op_base.Op._resolve
    monkeypatch.setattr(op_base.Op, "_resolve", lambda *args: misses.append(args[1]) or resolve(*args))
    ours, _ = pair("BatchNorm1d", momentum=None, eps=2e-4)
    with torch.no_grad():
        for seed in range(10):
            ours(taken("BatchNorm1d", seed=seed))
    assert misses == ["batch_norm_fwd_train"]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_changed_attribute_counts_from_the_next_call_on(name: str) -> None:
    ours, theirs = pair(name)
    x = taken(name)
    with torch.no_grad():
        for eps in (1e-5, 1.0):
            ours.eps = theirs.eps = eps
            torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


@pytest.mark.parametrize(("name", "shape"), [("InstanceNorm1d", (4, 5)), ("InstanceNorm2d", (4, 3, 5)), ("InstanceNorm3d", (4, 2, 3, 2))])  # fmt: skip
def test_an_instance_norm_takes_one_sample_without_a_batch_axis(name: str, shape: Any) -> None:
    ours, theirs = pair(name, affine=True)
    with torch.no_grad():
        torch.testing.assert_close(ours(drawn(*shape)), theirs(drawn(*shape)))


def test_an_instance_norm_refuses_and_warns_of_other_channels_as_torchs_does() -> None:
    for module in (tileops.nn, nn):
        with pytest.raises(ValueError, match=r"to match num_features \(4\)"):
            module.InstanceNorm1d(4, affine=True)(drawn(2, 3, 5))
        with pytest.warns(UserWarning, match="does not match num_features"):
            module.InstanceNorm1d(4)(drawn(2, 3, 5))


def test_our_op_computes_what_an_instance_norm_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "instance_norm", lambda x, *_: x + 7)
    x = drawn(2, 4, 5)
    assert torch.equal(tileops.nn.InstanceNorm1d(4)(x), x + 7)


@pytest.mark.parametrize(("name", "x"), [("BatchNorm1d", (2, 4, 3, 3)), ("BatchNorm2d", (2, 4)), ("BatchNorm3d", (2, 4, 3, 3)), ("InstanceNorm2d", (2, 4))])  # fmt: skip
def test_a_rank_that_torch_refuses_is_refused(name: str, x: Any) -> None:
    with pytest.raises(ValueError, match="expected .* input"):
        getattr(tileops.nn, name)(4)(torch.ones(x))


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_copies_and_pickles_compute_the_same(name: str, options: dict[str, Any]) -> None:
    ours, _ = pair(name, **options)
    x = taken(name, dtype=options.get("dtype", torch.float32))
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with torch.no_grad():
        expected = ours.eval()(x)
        for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), loaded):
            assert type(twin) is type(ours)
            assert torch.equal(twin.eval()(x), expected)


def test_factory_arguments_place_the_parameters() -> None:
    norm = tileops.nn.BatchNorm2d(4, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in norm.parameters()} == {("meta", torch.bfloat16)}


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rms = tileops.nn.LayerNorm(4), tileops.nn.RMSNorm(4)
        self.batch, self.average = tileops.nn.BatchNorm1d(4), tileops.nn.BatchNorm1d(4, momentum=None)
        self.group, self.instance = tileops.nn.GroupNorm(2, 4), tileops.nn.InstanceNorm1d(4, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.group(self.average(self.batch(self.rms(self.layer(x)))))
        return self.instance(rows.t()[None])


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")  # inductor's own use of it
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("training", [True, False])
def test_modules_compile_into_one_graph_with_the_same_results_and_statistics(backend: str, training: bool) -> None:
    eager = Norms().train(training)
    traced = copy.deepcopy(eager)
    compiled = torch.compile(traced, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for rows in (6, 5, 30):
            torch.testing.assert_close(compiled(drawn(rows, 4)), eager(drawn(rows, 4)))
    for own, other in zip(traced.buffers(), eager.buffers()):
        torch.testing.assert_close(own, other)
    assert counters["stats"]["unique_graphs"] == 1
