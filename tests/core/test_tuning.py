"""Tuning: each configuration is tried, the fastest serves from then on, and a later process begins with it."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tileops
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tileops import CaptureError, InputError
from tileops.backend import Entry, Kernel, register_kernel_type
from tileops.kernels.configurations import Configuration
from tileops.kernels.layer_norm import LayerNorm, LayerNormCall
from tileops.norm import BatchNormFwdOp, LayerNormFwdOp, RMSNormFwdOp
from tileops.ops import entries, op_base, timing, tuning, tuning_records
from tileops.ops.signature import asked_for
from torch._subclasses.fake_tensor import FakeTensorMode

CPU = torch.device("cpu")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Time that passes only where a kernel says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for records."""
    monkeypatch.setenv(tuning_records.CACHE_VARIABLE, str(tmp_path))
    return tmp_path / "tuning"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


Tunable = Callable[..., type[Kernel[Any]]]


@pytest.fixture
def tunable(fake: Any, clock: Clock) -> Tunable:
    """Makes kernel classes whose configurations state what a call takes, in milliseconds."""

    def make(*takes: float, run: Callable[[Any, torch.Tensor], Any] | None = None, **members: Any) -> type[Kernel[Any]]:
        def forward(self: Any, x: torch.Tensor) -> Any:
            clock.now += self.configuration["takes"] / 1e3
            fake.log.append(("ran", self.configuration["takes"]))
            return x + 1 if run is None else run(self, x)

        listed = tuple({"takes": each} for each in takes)
        base = fake.kernel(**members)
        return type("Tunable", (base,), {"forward": forward, "configurations": classmethod(lambda cls, call: listed)})

    return make


def configuration(op: Any, *tensors: Any) -> Configuration:
    """What the kernel that serves a call is built in."""
    return op.kernel_for(*asked_for(op, tensors)).configuration


X = torch.zeros(4)


# ------------------------------------------------------------------------------------------------------- the winner


def test_the_fastest_configuration_serves_from_then_on(fake: Any, tunable: Tunable) -> None:
    op = fake.op({"row": tunable(3.0, 1.0, 2.0)})()
    assert configuration(op, X) == {"takes": 3.0}
    tuned = op.tune(X)
    assert configuration(op, X) == {"takes": 1.0}
    (kernel,) = tuned.kernels
    assert kernel.winner == {"takes": 1.0}
    assert [trial.ratio for trial in kernel.trials] == pytest.approx([1.0, 1 / 3, 2 / 3])


def test_the_default_stays_where_nothing_is_faster_by_more_than_runs_differ(fake: Any, tunable: Tunable) -> None:
    op = fake.op({"row": tunable(1.0, 0.99, 1.5)})()
    before = op.kernel_for(*asked_for(op, (X,)))
    assert op.tune(X).kernels[0].winner == {"takes": 1.0}
    assert op.kernel_for(*asked_for(op, (X,))) is before


def test_tuning_does_not_change_what_is_selected(fake: Any, tunable: Tunable) -> None:
    op = fake.op({"slow": tunable(9.0, 8.0, over=("fast",)), "fast": tunable(1.0)})()
    before = op.explain(X)
    assert op.tune(X).selection == before == op.explain(X)


def test_ops_that_share_the_entry_share_the_winner(fake: Any, tunable: Tunable) -> None:
    base = fake.op({"row": tunable(2.0, 1.0)})
    derived = fake.op(name="DerivedOp", base=base)()
    assert configuration(derived, X) == {"takes": 2.0}
    base().tune(X)
    assert configuration(derived, X) == {"takes": 1.0}


def test_no_look_up_is_forgotten_and_tables_of_other_ops_stay(
    fake: Any, tunable: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, other = fake.op({"row": tunable(2.0, 1.0)})(), fake.op({"row": fake.kernel()}, name="OtherOp")()
    known = torch.zeros(7)
    op(known), other(known)
    table = type(other)._entries
    op.tune(X)
    assert type(other)._entries is table
    monkeypatch.setattr(op_base, "entry_of", lambda *_: pytest.fail("it was known"))
    op(known), op(X), other(known)


class Shifted(LayerNorm):
    """Adds what its configuration says to a layer norm: a repeat tells which one it went to."""

    devices = frozenset({"cpu"})
    preferred_over = frozenset({"example:row"})

    @classmethod
    def configurations(cls, call: LayerNormCall) -> list[dict[str, float]]:
        return [{"shift": 0.0}, {"shift": 1e-5}]

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        return self.reference(self.call, x, weight, bias) + self.configuration["shift"]


def test_repeats_of_a_call_get_the_winner(backends: None, monkeypatch: pytest.MonkeyPatch) -> None:
    register_kernel_type("LayerNormFwdOp", "shifted", Shifted)
    op, x = LayerNormFwdOp(8), torch.randn(3, 8)
    first = [op(x) for _ in range(3)][-1]
    assert op._repeats.known
    monkeypatch.setattr(timing.Stopwatch, "ratios", lambda self, runs: [1.0, 0.5])
    op.tune(x)
    for _ in range(3):
        assert torch.equal(op(x), first + 1e-5)


def test_a_tensor_that_requires_grad_is_tuned_with(backends: None, monkeypatch: pytest.MonkeyPatch) -> None:
    register_kernel_type("LayerNormFwdOp", "shifted", Shifted)
    op, x, weight = LayerNormFwdOp(8), torch.randn(3, 8).t().contiguous().t(), torch.nn.Parameter(torch.ones(8))
    assert op.tune(x, weight).tensors == ("x (3, 8) float32", "weight (8,) float32")
    op(x, weight).sum().backward()
    assert weight.grad is not None


def test_tuning_again_begins_with_the_default(fake: Any, tunable: Tunable, monkeypatch: pytest.MonkeyPatch) -> None:
    op = fake.op({"row": tunable(3.0, 1.0)})()
    default = op.kernel_for(*asked_for(op, (X,)))
    op.tune(X)
    monkeypatch.setattr(timing.Stopwatch, "ratios", lambda self, runs: [1.0, 1.5])
    assert op.tune(X).kernels[0].taken == 0
    assert configuration(op, X) == default.configuration
    tileops.clear()
    assert configuration(op, X) == default.configuration


def test_threads_that_tune_one_entry_leave_one_that_all_share(backends: None, monkeypatch: pytest.MonkeyPatch) -> None:
    register_kernel_type("LayerNormFwdOp", "shifted", Shifted)
    op, x, turns = LayerNormFwdOp(8), torch.randn(3, 8), itertools.cycle([0.5, 1.5])
    right = op(x)
    monkeypatch.setattr(timing.Stopwatch, "ratios", lambda self, runs: [1.0, next(turns)])

    def work(at: int) -> bool:
        if at % 4 == 0:
            op.tune(x)
        return torch.allclose(op(x), right, atol=1e-4)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))
    (built,) = [one for one in entries.built_entries() if one.implementation.cls is Shifted]
    assert op.kernel_for(*asked_for(op, (x,))) is built.entry


# --------------------------------------------------------------------------------------------- several kernels


def two_pass(make: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda cls, call: (call, lambda: make(call))


def test_each_kernel_of_an_entry_is_tuned_once_also_where_it_runs_twice(fake: Any, tunable: Tunable) -> None:
    first, second = tunable(4.0, 1.0), tunable(2.0, 3.0, 1.0)

    def make(call: Any) -> Entry:
        one, again, other = first(call), first(call), second(call)
        return Entry(lambda x: one(again(one(other(x)))), (one, again, other))

    op = fake.op({"both": fake.kernel(entry=two_pass(make))})()
    tuned = op.tune(X)
    assert [kernel.cls for kernel in tuned.kernels] == [first, second]
    assert [kernel.winner for kernel in tuned.kernels] == [{"takes": 1.0}, {"takes": 1.0}]
    assert [len(kernel.trials) for kernel in tuned.kernels] == [2, 3]
    entry = op.kernel_for(*asked_for(op, (X,)))
    assert [kernel.configuration["takes"] for kernel in entry.kernels] == [1.0, 1.0, 1.0]


def test_a_kernel_is_timed_beside_the_winners_of_those_before_it(fake: Any, tunable: Tunable) -> None:
    first, second = tunable(9.0, 1.0), tunable(1.0, 3.0)

    def make(call: Any) -> Entry:
        kernels = first(call), second(call)
        return Entry(lambda x: kernels[1](kernels[0](x)), kernels)

    tuned = fake.op({"both": fake.kernel(entry=two_pass(make))})().tune(X)
    assert tuned.kernels[1].trials[1].ratio == pytest.approx((1 + 3) / (1 + 1))


# ------------------------------------------------------------------------------------------------------ what is dropped


def wrong_if_fast(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + (1 if self.configuration["takes"] > 1 else 2)


def raises_if_fast(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.configuration["takes"] <= 1:
        raise ZeroDivisionError("in the kernel")
    return x


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (wrong_if_fast, "4 of 4 elements of a result differ from the default's"),
        (raises_if_fast, "ZeroDivisionError: in the kernel"),
    ],
)
def test_a_configuration_that_is_wrong_or_fails_is_dropped_with_the_reason(
    fake: Any, tunable: Tunable, run: Any, reason: str
) -> None:
    op = fake.op({"row": tunable(3.0, 1.0, 2.0, run=run)})()
    (kernel,) = op.tune(X).kernels
    assert kernel.winner == {"takes": 2.0}
    assert kernel.trials[1].ratio is None
    assert kernel.trials[1].reason == reason


def test_a_configuration_that_cannot_be_built_is_dropped_with_the_reason(fake: Any, tunable: Tunable) -> None:
    kernel = tunable(3.0, 1.0, 2.0)
    build = kernel.__init__

    def fails_if_fast(self: Any, call: Any) -> None:
        build(self, call)
        if self.configuration["takes"] == 1.0:
            raise MemoryError("too many registers")

    kernel.__init__ = fails_if_fast
    op = fake.op({"row": kernel})()
    tuned = op.tune(X).kernels[0]
    assert tuned.trials[1].reason == "MemoryError: too many registers"
    assert tuned.winner == configuration(op, X) == {"takes": 2.0}


def test_what_the_default_raises_reaches_the_caller(fake: Any, tunable: Tunable) -> None:
    op = fake.op({"row": tunable(1.0, 2.0, run=raises_if_fast)})()
    with pytest.raises(ZeroDivisionError, match="in the kernel"):
        op.tune(X)
    assert configuration(op, X) == {"takes": 1.0}


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        (["fast"], "lists 'fast'; each is a mapping of names to None, bool, int, float or str"),
        ([{"tile": (1, 2)}], r"lists \{'tile': \(1, 2\)\}; each is a mapping"),
        ([{}], r"lists \{\}; each is a mapping"),
        ([{"tile": 1}, {"tile": 1}], "lists tile=1 twice"),
    ],
)
def test_what_is_no_configuration_is_refused_when_the_kernel_is_built(fake: Any, listed: Any, found: str) -> None:
    kernel = fake.kernel()
    kernel.configurations = classmethod(lambda cls, call: listed)
    with pytest.raises(tileops.BuildError, match=found):
        fake.op({"row": kernel})()(X)


def test_configurations_are_asked_of_the_class(fake: Any) -> None:
    kernel = fake.kernel()
    kernel.configurations = lambda self, call: ()
    with pytest.raises(tileops.DeclarationError, match=r"configurations must be a classmethod"):
        fake.op({"row": kernel})


# ----------------------------------------------------------------------------------------------- nothing to be tuned


def test_a_kernel_without_configurations_is_said_to_have_none(fake: Any) -> None:
    tuned = fake.op({"row": fake.kernel()})().tune(X)
    assert tuned.kernels == ()
    assert str(tuned).splitlines() == [
        "nothing was tuned: FakeOp.fake",
        "  call: FakeCall(device=cpu, n=4, tag=None)",
        "  row serves this call and lists no configurations",
    ]


def test_a_target_brings_a_kernel_of_its_own(backends: None) -> None:
    tuned = RMSNormFwdOp(8, target="example").tune(torch.randn(2, 8))
    assert tuned.remark == "target 'example' takes this call over with a kernel of its own"


def test_bad_input_gets_the_sentence_that_the_op_has_for_it() -> None:
    op = LayerNormFwdOp(8)
    with pytest.raises(InputError, match=r"x has shape \(2, 7\)"):
        op.tune(torch.randn(2, 7))
    with pytest.raises(InputError, match="LayerNormFwdOp takes x, weight, bias: missing a required argument: 'x'"):
        op.tune()


@pytest.mark.parametrize("where", [FakeTensorMode, lambda: torch.device("meta")], ids=["fake", "meta"])
def test_tensors_without_data_are_refused(where: Any) -> None:
    with where():
        x = torch.empty(2, 8)
    found = "x is (a FakeTensor|on meta); tune runs kernels: give a plain torch.Tensor that holds data"
    with pytest.raises(InputError, match=found):
        LayerNormFwdOp(8).tune(x)


def test_tensors_without_elements_are_refused(backends: None) -> None:
    with pytest.raises(InputError, match="x has no elements; a call with it runs no kernel that could be timed"):
        LayerNormFwdOp(8).tune(torch.empty(0, 8, dtype=torch.float16))


def test_a_call_that_torch_would_see_is_not_timed(backends: None) -> None:
    found = "LayerNormFwdOp.tune times kernels as an eager call runs them; call it outside of traces"
    with torch.autocast("cpu"), pytest.raises(InputError, match=found):
        LayerNormFwdOp(8).tune(torch.randn(2, 8))


def test_nothing_is_tuned_while_a_graph_is_captured(backends: None, monkeypatch: pytest.MonkeyPatch) -> None:
    op, x = LayerNormFwdOp(8), torch.randn(2, 8, dtype=torch.float16)
    op.prepare(x)
    monkeypatch.setattr(tuning, "is_capturing", lambda device: True)
    with pytest.raises(CaptureError, match=r"LayerNormFwdOp\.tune runs and times kernels, .*tune before the capture"):
        op.tune(x)


def test_what_a_kernel_writes_is_written_in_copies_alone(backends: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (interface,) = [one for one in BatchNormFwdOp.interfaces.values() if one.writes]

    class Updates(interface):
        devices = frozenset({"cpu"})
        preferred_over = frozenset({"example:torch_train"})

        @classmethod
        def configurations(cls, call: Any) -> list[dict[str, int]]:
            return [{"lost": 0}, {"lost": 1}]

        def forward(self, x: Any, mean: Any, variance: Any, weight: Any, bias: Any) -> Any:
            y, *statistics, new_mean, new_variance = self.reference(self.call, x, mean, variance, weight, bias)
            mean.copy_(new_mean)
            if not self.configuration["lost"]:
                variance.copy_(new_variance)
            return y, *statistics

    register_kernel_type("BatchNormFwdOp", "updates", Updates)
    x, mean, variance = torch.randn(6, 3, 5), torch.zeros(3), torch.ones(3)
    tuned = BatchNormFwdOp(training=True).tune(x, mean, variance)
    assert torch.equal(mean, torch.zeros(3))
    assert torch.equal(variance, torch.ones(3))
    assert tuned.kernels[0].trials[1].reason == "3 of 3 elements of a result differ from the default's"


# ---------------------------------------------------------------------------------------------------- the rendering


def test_what_was_tried_is_told_in_full(fake: Any, tunable: Tunable, records: Path) -> None:
    tuned = fake.op({"row": tunable(4.0, 1.0, 2.0, run=wrong_if_fast)})().tune(X)
    assert str(tuned).splitlines() == [
        "row is tuned: FakeOp.fake",
        "  call: FakeCall(device=cpu, n=4, tag=None)",
        "  tensors: x (4,) float32",
        "  Tunable",
        "    takes=4.0: 1.00 × the default's time",
        "    takes=1.0: dropped: 4 of 4 elements of a result differ from the default's",
        "    takes=2.0: 0.50 × the default's time: taken",
        f"  kept in {next(records.iterdir())}",
    ]


def test_what_was_found_crosses_the_border_of_a_process(backends: None, monkeypatch: pytest.MonkeyPatch) -> None:
    register_kernel_type("LayerNormFwdOp", "shifted", Shifted)
    tuned = LayerNormFwdOp(8).tune(torch.randn(3, 8))
    assert str(pickle.loads(pickle.dumps(tuned))) == str(tuned)


# --------------------------------------------------------------------------------------------------------- records


def as_in_a_later_process() -> None:
    tileops.clear()


def test_a_later_process_builds_the_winner_and_nothing_else(fake: Any, tunable: Tunable) -> None:
    op = fake.op({"row": tunable(3.0, 1.0, name="Row")})()
    op.tune(X)
    as_in_a_later_process()
    fake.log.clear()
    assert configuration(op, X) == {"takes": 1.0}
    assert fake.asked("built") == ["Row"]


def test_a_record_is_read_once_for_a_build_and_never_for_a_hit(
    fake: Any, tunable: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, reads = fake.op({"row": tunable(3.0, 1.0)})(), list[Any]()
    op.tune(X)
    as_in_a_later_process()
    read = tuning_records.read_record
    monkeypatch.setattr(tuning_records, "read_record", lambda identity: reads.append(identity) or read(identity))
    op(X), op(X), op(X)
    assert len(reads) == 1


def test_where_nobody_tuned_a_build_asks_for_no_identity(
    fake: Any, tunable: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning_records, "_versions", lambda: pytest.fail("versions are asked for"))
    op = fake.op({"row": tunable(3.0, 1.0)})()
    op(X)
    assert configuration(op, X) == {"takes": 3.0}


def test_a_kernel_without_configurations_reads_no_record(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_records, "read_record", lambda _: pytest.fail("it was read"))
    fake.op({"row": fake.kernel()})()(X)


def test_another_build_identity_has_another_record(fake: Any, tunable: Tunable, records: Path) -> None:
    op = fake.op({"row": tunable(3.0, 1.0)})()
    op.tune(X), op.tune(torch.zeros(5))
    assert len(list(records.iterdir())) == 2


def change(records: Path, edit: Callable[[Any], Any]) -> None:
    (path,) = records.iterdir()
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))


def edits() -> Iterator[Any]:
    """Records that are of something else, or of nothing, each with a name."""
    for name in ("versions", "board", "interface", "key", "class", "distribution", "build"):
        yield pytest.param(lambda record, name=name: record["identity"].update({name: "another"}) or record, id=name)
    yield pytest.param(lambda record: record["kernels"][0].update(winner=7) or record, id="no such winner")
    yield pytest.param(lambda record: record["kernels"][0].update(winner="1") or record, id="a text")
    yield pytest.param(lambda record: record["kernels"][0].update(winner=True) or record, id="a truth")
    yield pytest.param(
        lambda record: record["kernels"][0]["configurations"].pop() and record, id="fewer configurations"
    )
    yield pytest.param(lambda record: record["kernels"].clear() or record, id="no kernel")
    yield pytest.param(lambda record: {**record, "kernels": 3}, id="a number of kernels")
    yield pytest.param(lambda record: {"identity": record["identity"]}, id="no kernels")
    yield pytest.param(lambda record: [record], id="a list")
    yield pytest.param(lambda record: None, id="nothing")


@pytest.mark.parametrize("edit", list(edits()))
def test_a_record_of_something_else_is_a_miss(fake: Any, tunable: Tunable, records: Path, edit: Any) -> None:
    op = fake.op({"row": tunable(3.0, 1.0)})()
    op.tune(X)
    change(records, edit)
    as_in_a_later_process()
    assert configuration(op, X) == {"takes": 3.0}


def test_the_record_that_was_written_is_no_miss(fake: Any, tunable: Tunable, records: Path) -> None:
    op = fake.op({"row": tunable(3.0, 1.0)})()
    op.tune(X)
    change(records, lambda record: record)
    as_in_a_later_process()
    assert configuration(op, X) == {"takes": 1.0}


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_whatever_a_file_holds_is_a_miss_at_most(records: Path, content: bytes | str) -> None:
    path = tuning_records.record_path({"of": "something"})
    assert path is not None
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert tuning_records.read_record({"of": "something"}) == []


def test_a_folder_in_the_place_of_a_record_is_a_miss_and_a_remark(fake: Any, tunable: Tunable, records: Path) -> None:
    op = fake.op({"row": tunable(3.0, 1.0)})()
    path = op.tune(X).record
    path.unlink()
    path.joinpath("something").mkdir(parents=True)
    as_in_a_later_process()
    assert configuration(op, X) == {"takes": 3.0}
    tuned = op.tune(X)
    assert tuned.record is None
    assert tuned.remark.startswith("kept in this process alone: ")
    assert [file.name for file in records.iterdir()] == [path.name], "no part of a record is left"
    assert configuration(op, X) == {"takes": 1.0}


def test_a_winner_on_record_that_can_no_longer_be_built_is_a_miss(fake: Any, tunable: Tunable) -> None:
    kernel = tunable(3.0, 1.0)
    op = fake.op({"row": kernel})()
    op.tune(X)
    build = kernel.__init__

    def fails_if_fast(self: Any, call: Any) -> None:
        build(self, call)
        if self.configuration["takes"] == 1.0:
            raise MemoryError("too many registers")

    kernel.__init__ = fails_if_fast
    as_in_a_later_process()
    assert configuration(op, X) == {"takes": 3.0}


def test_a_build_that_fails_for_another_reason_fails_once(fake: Any, tunable: Tunable) -> None:
    kernel, builds = tunable(3.0, 1.0), list[Any]()

    def fails(self: Any, call: Any) -> None:
        builds.append(call)
        raise MemoryError("no memory")

    kernel.__init__ = fails
    with pytest.raises(tileops.BuildError, match="no memory"):
        fake.op({"row": kernel})()(X)
    assert len(builds) == 1


def test_an_empty_variable_keeps_and_reads_nothing(
    fake: Any, tunable: Tunable, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = fake.op({"row": tunable(3.0, 1.0)})()
    op.tune(X)
    monkeypatch.setenv(tuning_records.CACHE_VARIABLE, "")
    as_in_a_later_process()
    assert configuration(op, X) == {"takes": 3.0}
    assert op.tune(X).remark == "kept in this process alone: TILEOPS_CACHE_DIR is empty"


def test_records_are_in_the_users_cache_folder_where_nobody_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(tuning_records.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert tuning_records.records_folder() == tmp_path / "caches" / "tileops" / "tuning"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert tuning_records.records_folder() == tmp_path / ".cache" / "tileops" / "tuning"


def test_an_identity_that_no_file_can_name_is_kept_in_the_process(fake: Any, tunable: Tunable) -> None:
    token = object()
    op = fake.op({"row": tunable(3.0, 1.0, entry=lambda cls, call: ((call.n, token), lambda: cls(call)))})()
    tuned = op.tune(X)
    assert tuned.remark == "kept in this process alone: the build identity holds a object, which no file can name"
    assert configuration(op, X) == {"takes": 1.0}


def test_one_board_has_one_record_whichever_of_its_like_a_tensor_is_on(fake: Any) -> None:
    implementation = op_base.implementations(fake.op({"row": fake.kernel()}), "fake")[0]

    def identity(device: str, n: int = 1) -> Any:
        call = fake.call(n, device=device).on("h200")
        return tuning_records.identity_of(fake.Interface, implementation, call, (call.device, n, torch.float16))

    assert identity("cuda:0") == identity("cuda:1") != identity("cuda:0", n=2)
    assert json.loads(json.dumps(identity("cuda:0"))) == identity("cuda:0")


def test_writers_at_once_leave_one_whole_record(records: Path) -> None:
    identity = {"of": "something"}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: tuning_records.write_record(identity, [at] * 1000), range(40)))
    found = tuning_records.read_record(identity)
    assert len(found) == 1000
    assert len(set(found)) == 1
    assert len(list(records.iterdir())) == 1


IN_ANOTHER_PROCESS = """
    import os, sys, time
    os.environ["TILEOPS_CACHE_DIR"] = {folder!r}
    import torch, tileops
    from tileops.kernels.layer_norm import LayerNorm

    class Sleeps(LayerNorm):
        devices = frozenset({{"cpu"}})

        @classmethod
        def configurations(cls, call):
            return [{{"seconds": 0.0005}}, {{"seconds": 0.0}}]

        def forward(self, x, weight, bias):
            time.sleep(self.configuration["seconds"])
            return self.reference(self.call, x, weight, bias)

    tileops.register_kernel_type("LayerNormFwdOp", "sleeps", Sleeps)
    op, x = tileops.LayerNormFwdOp(8), torch.randn(2, 8)
    {doing}
    op(x)
    (entry,) = tileops.LayerNormFwdOp._entries.values()
    print(entry.configuration["seconds"])
"""


def test_a_second_process_reads_what_the_first_found(site: Any, forked: Any, tmp_path: Path) -> None:
    seconds = [
        forked(site, IN_ANOTHER_PROCESS.format(folder=str(tmp_path), doing=doing)).stdout.split()[-1]
        for doing in ("pass", "op.tune(x)", "pass")
    ]
    assert seconds == ["0.0005", "0.0", "0.0"]


# -------------------------------------------------------------------------------------------------------- progress


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "a line"])
def test_a_terminal_shows_what_is_tried_and_is_left_clean(
    fake: Any, tunable: Tunable, monkeypatch: pytest.MonkeyPatch, rich: bool
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    if not rich:
        monkeypatch.setitem(sys.modules, "rich", None)
    fake.op({"row": tunable(2.0, 1.0)})().tune(X)
    shown = terminal.getvalue()
    assert "tuning row" in shown
    assert "takes=1.0" in shown
    assert "building" not in shown.partition("tuning row")[2]
    assert shown.endswith(("\r\x1b[2K", "\x1b[?25h\r\x1b[1A\x1b[2K"))


def test_progress_is_silenced_as_that_of_a_build_is(
    fake: Any, tunable: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TILEOPS_PROGRESS", "0")
    fake.op({"row": tunable(2.0, 1.0)})().tune(X)
    assert terminal.getvalue() == ""


# ---------------------------------------------------------------------------------------------------------- timing


def test_large_arguments_are_copied_once_and_small_ones_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "CACHE_BYTES", 1024)
    sizes = {
        elements: len(timing.copies_beyond_cache((torch.zeros(elements), None), CPU)) for elements in (1, 128, 512)
    }
    assert sizes == {1: timing.MOST_COPIES, 128: 4, 512: 1}


def test_runs_take_turns_and_one_that_takes_long_is_run_a_few_times(clock: Clock) -> None:
    order = list[str]()

    def run(name: str, seconds: float) -> Callable[[], None]:
        def pass_time() -> None:
            order.append(name)
            clock.now += seconds

        return pass_time

    assert timing.Stopwatch(CPU).ratios([run("a", 4.0), run("b", 8.0)]) == [1.0, 2.0]
    assert order == ["a", "a", *"ab" * timing.FEWEST_ROUNDS]
