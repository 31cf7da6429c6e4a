"""Getting a kernel ready without running it, and what happens where that was forgotten."""

from __future__ import annotations

import copy
import io
import logging
import multiprocessing
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tileops
import torch
from tileops.backend import register_kernel_type, unregister_kernel_type
from tileops.kernels.layer_norm import LayerNorm, LayerNormCall
from tileops.norm import (
    BatchNormFwdOp,
    FusedAddRMSNormFwdOp,
    GroupNormFwdOp,
    InstanceNormFwdOp,
    LayerNormFwdOp,
    RMSNormFwdOp,
)
from tileops.ops import entries, op_base, progress, target_kernels
from tileops.record import key_of
from torch._subclasses.fake_tensor import FakeTensorMode

CPU = torch.device("cpu")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# ---------------------------------------------------------------------------------------------------- prepare


def test_a_prepared_call_builds_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    op, x = LayerNormFwdOp(48), torch.randn(2, 48, dtype=torch.float16)
    selection = op.prepare(x)
    assert selection.key == "example:torch"
    monkeypatch.setattr(op_base, "entry_of", lambda *_: pytest.fail("it was not ready"))
    assert op(x).shape == x.shape


def test_a_call_is_prepared_by_its_spec_too() -> None:
    call = LayerNormCall(CPU, 56, torch.bfloat16, weight_dtype=None, bias_dtype=None)
    assert LayerNormFwdOp(56).prepare("layer_norm", call).key == "example:torch"
    assert ("layer_norm", key_of(call), None) in LayerNormFwdOp._entries


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (LayerNormFwdOp(40), lambda: (torch.empty(3, 40, dtype=torch.float16), torch.empty(40))),
        (RMSNormFwdOp(40), lambda: (torch.empty(3, 40),)),
        (FusedAddRMSNormFwdOp(), lambda: (torch.empty(3, 40), torch.empty(3, 40), torch.empty(40))),
        (BatchNormFwdOp(training=True), lambda: (torch.empty(3, 4, 5), torch.empty(4), torch.empty(4))),
        (BatchNormFwdOp(), lambda: (torch.empty(3, 4, 5), torch.empty(4), torch.empty(4))),
        (GroupNormFwdOp(2), lambda: (torch.empty(3, 4), torch.empty(4))),
        (InstanceNormFwdOp(), lambda: (torch.empty(3, 4, 5), torch.empty(4), torch.empty(4))),
    ],
    ids=["layer", "rms", "fused", "train", "infer", "group", "instance"],
)
def test_fake_and_meta_tensors_prepare_what_real_ones_run(op: Any, arguments: Any) -> None:
    real = op.prepare(*arguments())
    with FakeTensorMode():
        assert op.prepare(*arguments()).key == real.key
    with torch.device("meta"):
        assert op.prepare(*arguments()).key == real.key


def test_preparing_what_nobody_serves_raises_what_the_call_raises() -> None:
    with pytest.raises(tileops.OpNotAvailableError, match="no implementation serves this call"):
        LayerNormFwdOp(4).prepare(torch.empty(1, 4, dtype=torch.float8_e4m3fn))


@pytest.mark.parametrize("target", [None, "example"])
def test_preparing_without_tensors_says_what_the_op_takes(target: str | None) -> None:
    with pytest.raises(tileops.InputError, match="RMSNormFwdOp takes x, weight: missing a required argument: 'x'"):
        RMSNormFwdOp(24, target=target).prepare()


def test_a_targets_kernel_is_prepared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    op, x = RMSNormFwdOp(24, target="example"), torch.randn(2, 24)
    assert op.prepare(x).target == "example"
    monkeypatch.setattr(target_kernels, "_build", lambda *_: pytest.fail("it was not ready"))
    assert op(x).shape == x.shape


def test_a_miss_during_a_graph_capture_is_one_error_with_the_line_that_prepares_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(op_base, "is_capturing", lambda _: True)
    op = LayerNormFwdOp(72)
    x = torch.randn(2, 72, dtype=torch.float16)
    with pytest.raises(tileops.CaptureError) as raised:
        op(x)
    line = str(raised.value).splitlines()[-1].strip()
    monkeypatch.undo()
    assert eval(line, {"LayerNormFwdOp": LayerNormFwdOp, "LayerNormCall": LayerNormCall, "torch": torch}).key
    monkeypatch.setattr(op_base, "is_capturing", lambda _: True)
    assert op(x).shape == x.shape


# --------------------------------------------------------------------------------------------------- progress


def test_a_terminal_shows_the_kernel_that_is_built_and_is_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    LayerNormFwdOp(88).prepare(torch.empty(1, 88, dtype=torch.float16))
    shown = terminal.getvalue()
    assert "tileops: building the kernel example:torch …" in shown
    assert shown.endswith("\r\x1b[2K")


def test_a_hit_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    op, x = LayerNormFwdOp(96), torch.empty(1, 96, dtype=torch.float16)
    op.prepare(x)
    monkeypatch.setattr(sys, "stderr", Terminal())
    op(x)
    assert sys.stderr.getvalue() == ""


def test_progress_is_silenced_by_a_variable_and_away_from_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, file = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", quiet)
    monkeypatch.setenv(progress.SILENCE, "0")
    with progress.showing_build("row"):
        pass
    monkeypatch.delenv(progress.SILENCE)
    monkeypatch.setattr(sys, "stderr", file)
    with progress.showing_build("row"):
        pass
    assert quiet.getvalue() == file.getvalue() == ""


def test_a_compiler_that_tells_what_it_does_is_not_heard_and_its_warnings_are(
    fake: Any, caplog: pytest.LogCaptureFixture
) -> None:
    compiles, caches = (logging.getLogger(f"tilelang.{name}") for name in ("jit.kernel", "cache.kernel_cache"))

    def tell(cls: Any, call: Any) -> Any:
        def factory() -> Any:
            compiles.info("it begins")
            caches.warning("it has that already")
            compiles.warning("it is not sure")
            return cls(call)

        return call, factory

    with caplog.at_level(logging.INFO, "tilelang"):
        fake.op({"row": fake.kernel(entry=tell)})().prepare("fake", fake.call())
        caches.warning("somebody else compiles")
    assert caplog.messages == ["it is not sure", "somebody else compiles"]


# ------------------------------------------------------------------------------------- threads and processes


class Slow(LayerNorm):
    devices = frozenset({"cpu"})
    preferred_over = frozenset({"example:row"})

    @classmethod
    def refusal(cls, call: LayerNormCall) -> str | None:
        return None if call.n % 2 else f"row of {call.n} elements; serves odd ones"

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        return self.reference(self.call, x, weight, bias)


def test_64_threads_on_mixed_specs_are_right_while_kernels_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[tuple[Any, ...]] = []
    run_factory = entries.run_factory

    def counted(implementation: Any, call: Any, factory: Any) -> Any:
        builds.append((implementation.cls, implementation.cls.entry_for(call)[0]))
        return run_factory(implementation, call, factory)

    monkeypatch.setattr(entries, "run_factory", counted)
    tileops.clear()
    inputs = {n: torch.randn(3, n, dtype=torch.float64) for n in range(33, 49)}
    right = {n: torch.nn.functional.layer_norm(x, (n,)) for n, x in inputs.items()}
    stop = threading.Event()

    def registering() -> None:
        while not stop.is_set():
            register_kernel_type("LayerNormFwdOp", "slow", Slow)
            unregister_kernel_type("LayerNormFwdOp", "slow")

    def calling(seed: int) -> bool:
        order = [33 + (seed + 5 * i) % 16 for i in range(40)]
        return all(torch.allclose(LayerNormFwdOp(n)(inputs[n]), right[n]) for n in order)

    other = threading.Thread(target=registering)
    other.start()
    try:
        with ThreadPoolExecutor(64) as pool:
            assert all(pool.map(calling, range(64)))
    finally:
        stop.set()
        other.join()
    assert len(builds) == len(set(builds)), "one build for each identity"


def test_one_entry_called_from_four_threads_gives_the_same_bits() -> None:
    op, x = LayerNormFwdOp(1000), torch.randn(64, 1000)
    first = op(x)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(first, y) for y in pool.map(lambda _: op(x), range(40)))


def _answer(op: Any, x: torch.Tensor) -> Any:
    return op(x).tolist()


def test_a_spawned_worker_runs_an_op_that_it_was_sent() -> None:
    op, x = LayerNormFwdOp(8), torch.randn(2, 8, dtype=torch.float64)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_answer, (op, x)) == op(x).tolist()


def test_a_module_that_holds_an_op_is_copied_and_pickled_with_it() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = LayerNormFwdOp((8,), eps=1e-3)

    model, x = Model(), torch.randn(2, 8)
    twin = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(model.norm))
    assert torch.equal(twin.norm(x), model.norm(x))
    assert torch.equal(again(x), model.norm(x))
    assert repr(again) == repr(model.norm)
