"""Kernels of targets: how often they are built, how long they are kept, what they may return."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tileops import BackendError, CaptureError
from tileops.backend import BUILTIN, register_detector, register_kernel_builder
from tileops.errors import RegistrationError
from tileops.ops import target_kernels
from tileops.ops.op_base import Op

X = torch.ones(4)


def on_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def filling(value: float) -> Callable[..., Any]:
    """A builder of kernels that fill the result."""
    return lambda *specs, **params: lambda x, *rest: torch.full_like(x, value)


def served_by(result: Any) -> Any:
    """The name of the fake kernel that ran, or the value that a target's kernel filled in."""
    return result[0] if isinstance(result, tuple) else result.flatten()[0].item()


@pytest.fixture
def op(fake: Any) -> type[Op]:
    class DetectedOp(fake.op({"a": fake.kernel("Ours")}, name="Base")):
        def __init__(self, slope: float = 0.5, *, target: str | None = None) -> None:
            super().__init__(target=target)
            self.slope = slope

    return DetectedOp


def test_a_kernel_is_built_once_however_many_threads_ask(op: Any) -> None:
    built = list[int]()
    begun = threading.Event()

    def build(x: Any, **params: Any) -> Any:
        begun.wait(10)
        time.sleep(0.02)
        built.append(threading.get_ident())
        return filling(1)()

    register_detector("acme", on_cpu)
    register_kernel_builder("DetectedOp", "acme", build)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(op(), X) for _ in range(8)]
        begun.set()
        assert [served_by(call.result()) for call in calls] == [1] * 8
    assert len(built) == 1


def test_the_kernels_of_a_target_have_a_bound_of_their_own(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_kernels, "TARGET_KERNELS", 16)
    asked = list[int]()

    def build(x: Any, **params: Any) -> Any:
        asked.append(x.shape[0])
        return filling(1)()

    register_kernel_builder("DetectedOp", "acme", build)
    live, kernels = op(target="acme"), op(target=BUILTIN)
    kernels(X)
    for n in range(1, 41):
        live(torch.ones(n))
    [table] = target_kernels._tables._shared.values()
    assert len(table) <= 16
    live(torch.ones(40))
    assert asked == list(range(1, 41))
    live(torch.ones(1))
    assert asked[-1] == 1
    assert len(op._entries) == 1


def test_a_kernel_that_is_not_ready_under_a_graph_capture_is_one_error(
    op: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_kernel_builder("DetectedOp", "acme", filling(1))
    live = op(target="acme")
    live(X)
    monkeypatch.setattr(target_kernels, "is_capturing", lambda _: True)
    assert served_by(live(X)) == 1
    with pytest.raises(CaptureError, match=r"DetectedOp: target 'acme' \(local\) has no kernel ready for this call"):
        live(torch.ones(5))


class Counting:
    """A builder of kernels that count their calls."""

    made = 0

    def __call__(self, *specs: Any, **params: Any) -> Any:
        self.made += 1
        return CountingKernel()


class CountingKernel:
    calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.full_like(x, self.calls)


def test_equal_ops_share_a_targets_kernel_unless_it_is_one_per_op(op: Any) -> None:
    shared, own = Counting(), Counting()
    register_kernel_builder("DetectedOp", "shared", shared)
    register_kernel_builder("DetectedOp", "own", own, per_op=True)
    for target, counts in (("shared", [1, 2, 3, 4]), ("own", [1, 2, 1, 2])):
        first, second = op(target=target), op(target=target)
        assert [served_by(one(X)) for one in (first, first, second, second)] == counts
    assert (shared.made, own.made) == (1, 2)


def test_a_kernel_of_one_op_dies_with_it(op: Any) -> None:
    made = list[weakref.ref[Any]]()

    def build(*specs: Any, **params: Any) -> Any:
        kernel = CountingKernel()
        made.append(weakref.ref(kernel))
        return kernel

    register_detector("acme", on_cpu)
    register_kernel_builder("DetectedOp", "acme", build, per_op=True)
    live, other = op(), op()
    live(X), other(X)
    del live
    gc.collect()
    assert [kernel() is None for kernel in made] == [True, False]


def test_the_same_builder_cannot_be_shared_and_one_per_op(op: Any) -> None:
    build = filling(1)
    register_kernel_builder("DetectedOp", "acme", build)
    with pytest.raises(RegistrationError, match="target 'acme' has a builder for DetectedOp already"):
        register_kernel_builder("DetectedOp", "acme", build, per_op=True)


# ----------------------------------------------------------------------------------------------- what kernels return


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda x: x.double(), r"returned output as float64 of shape \(4,\) on cpu; it must be float32 of shape \(4,\)"),
        (lambda x: torch.ones(3), r"returned output as float32 of shape \(3,\) on cpu; it must be float32 of shape \(4,\)"),
        (lambda x: x.to("meta"), r"returned output as float32 of shape \(4,\) on meta; it must be .* on cpu"),
        (lambda x: None, r"returned output as None; it must be a tensor, float32 of shape \(4,\) on cpu"),
        (lambda x: (x, x), "returned a tuple of 2; it must return output"),
        (lambda x: [x.clone()], "returned output as a list of 1; it must be a tensor"),
        (lambda x: x, "returned output in the memory of x; it must be new"),
    ],
)  # fmt: skip
def test_a_result_that_the_op_does_not_promise_is_an_error_that_names_the_target(
    op: Any, result: Callable[..., Any], said: str
) -> None:
    register_kernel_builder("DetectedOp", "acme", lambda *specs, **params: result)
    live = op(target="acme")
    for _ in range(2):
        with pytest.raises(BackendError, match=r"DetectedOp: the kernel of target 'acme' \(local\) " + said):
            live(X)


def test_results_are_compared_once_for_each_kernel(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    register_kernel_builder("DetectedOp", "acme", filling(1))
    live = op(target="acme")
    live(X)
    monkeypatch.setattr(target_kernels, "settled", lambda *_: pytest.fail("compared again"))
    assert served_by(live(X)) == 1


def test_results_come_back_in_the_memory_order_that_the_op_promises(fake: Any) -> None:
    class KeepsOrder(fake.op({}, name="Base")):
        def empty_results(self, x: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(x)

    register_kernel_builder("KeepsOrder", "acme", lambda *specs, **params: lambda x: x * 2)
    register_kernel_builder("KeepsOrder", "odd", lambda *specs, **params: lambda x: (x * 2).t().contiguous().t())
    x = torch.arange(12.0).reshape(3, 4)
    for target in ("acme", "odd"):
        live = KeepsOrder(target=target)
        for given in (x, x.t(), x, x.t()):
            y = live(given)
            assert torch.equal(y, given * 2)
            assert y.stride() == given.stride()


def test_an_exception_of_a_targets_kernel_says_whose_it_was(op: Any) -> None:
    def run(x: Any) -> Any:
        raise ZeroDivisionError("in the target")

    register_kernel_builder("DetectedOp", "acme", lambda *specs, **params: run)
    with pytest.raises(ZeroDivisionError) as raised:
        op(target="acme")(X)
    if hasattr(raised.value, "__notes__"):
        assert raised.value.__notes__ == ["raised in the kernel of target 'acme' for DetectedOp (local)"]
