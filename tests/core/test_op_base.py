"""`Op`: hits, misses, tables, entries, what it refuses and what it says."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
import pickle
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import pytest
import tileops
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tileops import (
    AmbiguousDispatchError,
    BuildError,
    CallSpec,
    DeclarationError,
    Entry,
    InputError,
    KernelInterface,
    OpNotAvailableError,
    register_kernel_type,
    unregister_kernel_type,
)
from tileops.call_spec import SizeClass
from tileops.device import DeviceFacts
from tileops.kernels.kernel_base import kernels_of
from tileops.kernels.layer_norm import LayerNormCall
from tileops.norm import LayerNormFwdOp
from tileops.ops import entries, op_base
from tileops.ops.op_base import Op

THREADS = 32


def together(work: Any, count: int = THREADS) -> list[Any]:
    """What `count` threads that run `work()` return or raise."""

    def outcome(_: int) -> Any:
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - the outcome is what is tested
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(outcome, range(count)))


# ---------------------------------------------------------------------------------------------------- a hit


def test_a_hit_consults_no_implementation_and_reads_no_device_property(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = fake.kernel(devices=("cpu",), refuse=fake.upto(8))
    general = fake.kernel("General", general=True)
    op = fake.op({"a": kernel, "general": general})()
    call = fake.call(4)
    entry = op.kernel_for("fake", call)

    def impossible(*_: Any, **__: Any) -> Any:
        raise AssertionError("a hit asks nobody")

    for cls in (kernel, general):
        monkeypatch.setattr(cls, "refusal", classmethod(impossible))
        monkeypatch.setattr(cls, "entry_for", classmethod(impossible))
        monkeypatch.setattr(cls, "devices", property(impossible))
    monkeypatch.setattr(CallSpec, "facts", property(impossible))
    monkeypatch.setattr(op_base, "select", impossible)
    for query in ("get_device_properties", "is_available", "current_device", "device_count", "get_device_capability"):
        monkeypatch.setattr(torch.cuda, query, impossible)
    assert op.kernel_for("fake", fake.call(4)) is entry
    x = torch.zeros(4)
    assert op(x) == ("Fake", x)


def test_a_thousand_calls_ask_for_device_facts_at_most_once(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = list[torch.device]()
    monkeypatch.setattr(CallSpec, "facts", property(lambda call: queries.append(call.device) or DeviceFacts(arch=90)))
    op = fake.op({"a": fake.kernel(archs=frozenset({90}))})()
    for _ in range(1000):
        op.kernel_for("fake", fake.call(4))
    assert len(queries) == 1


def test_a_miss_asks_in_the_order_availability_applicability_precedence_entry(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        CallSpec, "facts", property(lambda call: fake.log.append(("facts", "device")) or DeviceFacts(arch=90))
    )
    kernels = {
        "a_elsewhere": fake.kernel("Elsewhere", devices=("cuda",)),
        "b_older": fake.kernel("Older", archs=frozenset({80})),
        "c_refusing": fake.kernel("Refusing", refuse="no"),
        "d_beaten": fake.kernel("Beaten", archs=frozenset({90})),
        "e_winner": fake.kernel("Winner", over=("d_beaten",)),
    }
    fake.op(kernels)().kernel_for("fake", fake.call())
    assert [event for event, _ in itertools.groupby(fake.log)] == [
        ("facts", "device"),
        ("refusal", "Refusing"),
        ("facts", "device"),
        ("refusal", "Beaten"),
        ("refusal", "Winner"),
        ("entry_for", "Winner"),
        ("built", "Winner"),
    ]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    limits=st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True),
    sizes=st.lists(st.integers(0, 11), min_size=1, max_size=20),
)
def test_a_hit_equals_a_miss(fake: Any, limits: list[int], sizes: list[int]) -> None:
    limits = sorted(limits)
    keys = [f"upto_{limit}" for limit in limits]
    kernels = {
        key: fake.kernel(key, refuse=fake.upto(limit), over=tuple(keys[i + 1 :]))
        for i, (key, limit) in enumerate(zip(keys, limits))
    }
    warm = fake.op(kernels, name="WarmOp")()
    for n in sizes:
        expected = next((key for key, limit in zip(keys, limits) if n <= limit), None)
        for _ in range(2):
            try:
                entry: Any = warm.kernel_for("fake", fake.call(n))
            except OpNotAvailableError:
                assert expected is None
            else:
                assert type(entry) is kernels[expected or ""]
                assert warm.key_for("fake", fake.call(n)) == expected


# ------------------------------------------------------------------------------------------ tables and entries


def test_every_instance_of_an_op_shares_what_was_built(fake: Any) -> None:
    op = fake.op({"a": fake.kernel()})
    assert len({id(op().kernel_for("fake", fake.call(4))) for _ in range(200)}) == 1
    assert fake.asked("built") == ["Fake"]


def test_calls_with_equal_identity_share_an_entry_and_others_do_not(fake: Any) -> None:
    kernel = fake.kernel(entry=lambda cls, call: (call.n % 2, lambda: cls(call)))
    op = fake.op({"a": kernel})()
    odd, even = op.kernel_for("fake", fake.call(1)), op.kernel_for("fake", fake.call(2))
    assert op.kernel_for("fake", fake.call(3)) is odd
    assert even is not odd
    assert len(fake.asked("built")) == 2


def test_two_classes_with_equal_identity_do_not_share_an_entry(fake: Any) -> None:
    def same(cls: Any, call: Any) -> Any:
        return "same", lambda: cls(call)

    op = fake.op(
        {"a": fake.kernel(entry=same, refuse=fake.upto(4)), "general": fake.kernel(entry=same, general=True)}
    )()
    assert op.kernel_for("fake", fake.call(1)) is not op.kernel_for("fake", fake.call(9))


def test_a_class_with_two_interfaces_has_an_entry_in_each(fake: Any) -> None:
    kernel = fake.kernel(of=(fake.Interface, fake.Other), entry=lambda cls, call: ("same", lambda: cls(call)))
    op = fake.op({"a": kernel}, interfaces={"fake": fake.Interface, "other": fake.Other})()
    first, second = op.kernel_for("fake", fake.call()), op.kernel_for("other", fake.call())
    assert first is not second
    assert fake.asked("built") == ["Fake", "Fake"]


def test_two_ops_with_one_interface_share_entries(fake: Any) -> None:
    kernel = fake.kernel()
    one, other = fake.op({"a": kernel}, name="OneOp")(), fake.op({"b": kernel}, name="AnotherOp")()
    assert one.kernel_for("fake", fake.call()) is other.kernel_for("fake", fake.call())


def test_a_key_belongs_to_every_interface_that_its_class_subclasses_and_to_no_other(fake: Any) -> None:
    both = fake.kernel("Both", of=(fake.Interface, fake.Other))
    only = fake.kernel("Only", of=(fake.Other,), over=("both",))
    op = fake.op({"both": both, "only": only}, interfaces={"fake": fake.Interface, "other": fake.Other})()
    assert [verdict.key for verdict in op.explain("fake", fake.call()).verdicts] == ["both"]
    assert op.key_for("other", fake.call()) == "only"


def test_kernel_for_returns_what_the_factory_returned(fake: Any) -> None:
    made = list[Any]()

    def entry(cls: Any, call: Any) -> Any:
        return call, lambda: made.append(Entry(lambda x: ("two", x), kernels=(cls(call), cls(call)))) or made[-1]

    op = fake.op({"split": fake.kernel(entry=entry)})()
    found = op.kernel_for("fake", fake.call(3))
    assert found is made[0]
    assert op(torch.ones(3))[0] == "two"


def test_an_entry_lists_each_of_its_kernels_once(fake: Any) -> None:
    first, second = fake.kernel()(), fake.kernel()()
    entry = Entry(lambda x: x, kernels=(first, second, first))
    assert entry.kernels == (first, second)
    assert kernels_of(entry) == (first, second)
    assert kernels_of(first) == (first,)


def test_a_batch_size_enters_the_spec_as_its_size_class(fake: Any) -> None:
    op = sized_op(fake)()
    assert op.explain("sized", SizedCall(torch.device("cpu"), 5)).call.rows == 8
    assert op.kernel_for("sized", SizedCall(torch.device("cpu"), 5)).call.rows == 8
    assert op.kernel_for("sized", SizedCall(torch.device("cpu"), 1000)).call.rows == 64


def test_row_counts_of_one_class_are_one_build(fake: Any) -> None:
    op = sized_op(fake)()
    for rows in range(1, 2001):
        op.kernel_for("sized", SizedCall(torch.device("cpu"), rows))
    assert len(fake.asked("built")) == 7  # 1, 2, 4, … 64


@dataclasses.dataclass(frozen=True)
class SizedCall(CallSpec):
    rows: Annotated[int, SizeClass(cap=64)]


class SizedInterface(KernelInterface[SizedCall]):
    request = SizedCall

    def forward(self, x: torch.Tensor) -> Any:
        raise NotImplementedError


def sized_op(fake: Any) -> Any:
    return fake.op({"a": fake.kernel(of=(SizedInterface,))}, interfaces={"sized": SizedInterface})


def test_look_ups_are_bounded_and_forgotten_ones_are_found_again(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_base, "LOOK_UPS", 16)
    cls = fake.op({"a": fake.kernel(entry=lambda cls, call: (0, lambda: cls(call)))})
    op = cls()
    assert len({id(op.kernel_for("fake", fake.call(n))) for n in range(100)}) == 1
    assert len(cls._entries) <= 16
    assert op.kernel_for("fake", fake.call(0)) is op.kernel_for("fake", fake.call(99))
    assert fake.asked("built") == ["Fake"]


def test_clear_forgets_look_ups_and_entries(fake: Any) -> None:
    op = fake.op({"a": fake.kernel()})()
    first = op.kernel_for("fake", fake.call())
    tileops.clear()
    assert op.kernel_for("fake", fake.call()) is not first
    assert fake.asked("built") == ["Fake", "Fake"]


# --------------------------------------------------------------------------------------------------- threads


def test_a_factory_runs_once_when_32_threads_miss_together(fake: Any) -> None:
    barrier = threading.Barrier(THREADS)

    def entry(cls: Any, call: Any) -> Any:
        barrier.wait(timeout=30)  # every thread is past its look-up before any builds
        return call.n, lambda: cls(call)

    op = fake.op({"a": fake.kernel(entry=entry)})()
    outcomes = together(lambda: op.kernel_for("fake", fake.call()))
    assert len({id(outcome) for outcome in outcomes}) == 1
    assert isinstance(outcomes[0], fake.Interface), outcomes[0]
    assert fake.asked("built") == ["Fake"]


def test_threads_that_miss_different_calls_build_side_by_side(fake: Any) -> None:
    inside = threading.Barrier(4)

    def entry(cls: Any, call: Any) -> Any:
        def factory() -> Any:
            inside.wait(timeout=30)  # passes only if four factories run at once
            return cls(call)

        return call.n, factory

    op = fake.op({"a": fake.kernel(entry=entry)})()
    sizes = iter(range(4))
    outcomes = together(lambda: op.kernel_for("fake", fake.call(next(sizes))), 4)
    assert len({id(outcome) for outcome in outcomes}) == 4
    assert all(isinstance(outcome, fake.Interface) for outcome in outcomes), outcomes


def test_a_failing_factory_gives_every_waiting_thread_the_error_and_the_next_call_retries(fake: Any) -> None:
    barrier = threading.Barrier(THREADS)
    broken = [True]

    def entry(cls: Any, call: Any) -> Any:
        def factory() -> Any:
            if broken[0]:
                raise OSError("no space left")
            return cls(call)

        if broken[0]:
            barrier.wait(timeout=30)
        return call.n, factory

    op = fake.op({"a": fake.kernel(entry=entry), "general": fake.kernel("General", general=True)})()
    outcomes = together(lambda: op.kernel_for("fake", fake.call()))
    assert {type(outcome) for outcome in outcomes} == {BuildError}
    broken[0] = False
    assert type(op.kernel_for("fake", fake.call())).__name__ == "Fake"
    assert "General" not in fake.asked("built")


# --------------------------------------------------------------------------------------------------- failures


def failing(error: Exception) -> Any:
    def entry(cls: Any, call: Any) -> Any:
        def factory() -> Any:
            raise error

        return call, factory

    return entry


def test_a_build_error_names_op_key_class_call_cause_and_the_way_out(fake: Any) -> None:
    cause = OSError("no space left")
    op = fake.op({"a": fake.kernel("Broken", entry=failing(cause))})()
    with pytest.raises(BuildError) as raised:
        op.kernel_for("fake", fake.call(7))
    assert raised.value.__cause__ is cause
    message = str(raised.value)
    for part in (
        "FakeOp",
        "a was selected",
        "Broken",
        "n=7",
        "OSError: no space left",
        "no other kernel",
    ):
        assert part in message


def test_a_build_error_of_a_programs_own_kernel_says_how_to_take_it_out(fake: Any) -> None:
    op = fake.op({})()
    register_kernel_type("FakeOp", "broken", fake.kernel(entry=failing(OSError("no"))))
    with pytest.raises(BuildError, match=r"unregister_kernel_type\(op, 'broken'\)"):
        op.kernel_for("fake", fake.call())


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (lambda cls, call: ([], lambda: cls(call)), "unhashable"),
        (lambda cls, call: 1 // 0, "ZeroDivisionError"),
        (lambda cls, call: call, "TypeError"),
        (lambda cls, call: (call, lambda: None), "neither a kernel nor an Entry"),
        (lambda cls, call: (call, None), "not callable"),
    ],
)
def test_an_entry_for_that_cannot_be_used_is_a_build_error(fake: Any, entry: Any, said: str) -> None:
    op = fake.op({"a": fake.kernel(entry=entry)})()
    for _ in range(2):
        with pytest.raises(BuildError, match=said):
            op.kernel_for("fake", fake.call())


def test_a_factory_that_asks_for_its_own_entry_is_told_so(fake: Any) -> None:
    op: Any = None

    def entry(cls: Any, call: Any) -> Any:
        return call.n, lambda: op.kernel_for("fake", call)

    op = fake.op({"a": fake.kernel(entry=entry)})()
    with pytest.raises(BuildError, match="asks for itself while it is being built"):
        op.kernel_for("fake", fake.call())


def test_a_factory_may_ask_for_another_entry(fake: Any) -> None:
    op: Any = None

    def entry(cls: Any, call: Any) -> Any:
        inner = (lambda: op.kernel_for("fake", fake.call(call.n - 1))) if call.n else (lambda: cls(call))
        return call.n, inner

    op = fake.op({"a": fake.kernel(entry=entry)})()
    assert op.kernel_for("fake", fake.call(3)) is op.kernel_for("fake", fake.call(0))


class KernelTroubleError(Exception):
    pass


def trouble(x: torch.Tensor) -> None:
    raise KernelTroubleError("in the kernel")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
def test_an_exception_of_a_kernel_reaches_the_caller_with_a_note_that_names_key_and_distribution(fake: Any) -> None:
    with pytest.raises(KernelTroubleError) as raised:
        fake.op({"a": fake.kernel(run=trouble)})()(torch.ones(2))
    assert str(raised.value) == "in the kernel"
    (note,) = raised.value.__notes__
    assert note == "raised in a (in-tree)"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
def test_the_note_names_the_kernel_that_ran_and_not_one_that_shares_its_code(fake: Any) -> None:
    base = fake.kernel("Base", run=trouble, refuse=fake.upto(4))
    heir = type("Heir", (base,), {"refusal": classmethod(lambda cls, call: None if call.n > 4 else "no")})
    op = fake.op({"base": base, "heir": heir})()
    for size, key in ((2, "base"), (8, "heir"), (3, "base")):
        with pytest.raises(KernelTroubleError) as raised:
            op(torch.ones(size))
        assert [note.split()[2] for note in raised.value.__notes__] == [key]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
def test_an_exception_of_an_entry_over_several_kernels_is_named_too(fake: Any) -> None:
    def entry(cls: Any, call: Any) -> Any:
        return call, lambda: Entry(trouble, kernels=(cls(call),))

    with pytest.raises(KernelTroubleError) as raised:
        fake.op({"split": fake.kernel(entry=entry)})()(torch.ones(2))
    assert "split" in raised.value.__notes__[0]


def test_an_exception_of_a_kernel_stays_itself_beside_an_entry_that_is_a_plain_function(fake: Any) -> None:
    def entry(cls: Any, call: Any) -> Any:
        return call, lambda: lambda x: x

    plain = fake.op({"a": fake.kernel(entry=entry)}, name="PlainOp")()
    assert plain(torch.ones(2)) is not None
    with pytest.raises(KernelTroubleError):
        fake.op({"a": fake.kernel(run=trouble)})()(torch.ones(2))


def test_an_exception_of_forward_itself_is_nobodys_kernels(fake: Any) -> None:
    class Clumsy(fake.op({"a": fake.kernel()})):
        def forward(self, x: torch.Tensor) -> Any:
            self.kernel_for("fake", fake.call())
            raise KernelTroubleError("before the kernel")

    with pytest.raises(KernelTroubleError) as raised:
        Clumsy()(torch.ones(2))
    assert not getattr(raised.value, "__notes__", [])


# ------------------------------------------------------------------------------------------- what is refused


@dataclasses.dataclass(frozen=True)
class StrayCall(CallSpec):
    n: int
    tag: object = None


def heir_of(call: Any) -> Any:
    heir = dataclasses.dataclass(frozen=True)(type("Heir", (type(call),), {}))
    return heir(call.device, call.n, call.tag)


@pytest.mark.parametrize("served_before", [False, True])
@pytest.mark.parametrize("ask", ["kernel_for", "explain", "key_for"])
def test_a_spec_of_another_type_is_refused_also_after_an_equal_call_was_served(
    fake: Any, ask: str, served_before: bool
) -> None:
    op = fake.op({"a": fake.kernel()})()
    if served_before:
        op.kernel_for("fake", fake.call(3))
    for stray in (StrayCall(torch.device("cpu"), 3), heir_of(fake.call(3)), (torch.device("cpu"), 3, None), None):
        with pytest.raises(DeclarationError, match="FakeOp.fake takes a FakeCall, not a "):
            getattr(op, ask)("fake", stray)


@pytest.mark.parametrize("served_before", [False, True])
def test_stated_facts_are_refused_by_kernel_for_also_after_an_equal_call_was_served(
    fake: Any, served_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "made_current", lambda device: contextlib.nullcontext())
    op = fake.op({"a": fake.kernel(devices=("cpu", "cuda"))})()
    call = fake.call(3, device="cuda:0")
    if served_before:
        op.kernel_for("fake", call)
    with pytest.raises(DeclarationError, match="states the facts of a device.*explain"):
        op.kernel_for("fake", call.on("h200"))
    assert op.key_for("fake", call.on("h200")) == "a"


@dataclasses.dataclass
class Thawed:
    x: int = 1


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ([1], "list"),
        ({1: 2}, "dict"),
        (torch.ones(1), "Tensor"),
        (object(), "object"),
        ((1, [2]), "tuple"),
        (float("nan"), "float"),
        (Thawed(), "Thawed"),
        (Thawed, "type"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("ask", ["kernel_for", "explain", "key_for"])
def test_a_field_that_cannot_key_a_table_is_refused_by_name(fake: Any, ask: str, value: Any, shown: str) -> None:
    op = fake.op({"a": fake.kernel()})()
    with pytest.raises(DeclarationError, match=f"FakeCall holds tag={shown}, which cannot key a table"):
        getattr(op, ask)("fake", fake.call(3, tag=value))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1,
        1.5,
        "x",
        torch.float16,
        torch.device("cuda:1"),
        (1, "a"),
        frozenset({2}),
        DeviceFacts(),
        inspect.Parameter.VAR_KEYWORD,
    ],
    ids=str,
)
def test_a_field_that_can_key_a_table_is_taken(fake: Any, value: Any) -> None:
    op = fake.op({"a": fake.kernel()})()
    entry = op.kernel_for("fake", fake.call(3, tag=value))
    assert op.kernel_for("fake", fake.call(3, tag=copy.copy(value))) is entry


def test_an_unknown_interface_is_refused_with_the_known_ones(fake: Any) -> None:
    op = fake.op({"a": fake.kernel()})()
    for ask in (op.kernel_for, op.explain, op.key_for):
        with pytest.raises(DeclarationError, match="FakeOp has no interface 'fke'; it has: fake"):
            ask("fke", fake.call())


def test_a_wrong_number_of_arguments_is_a_sentence(fake: Any) -> None:
    class NamedOp(fake.op({"a": fake.kernel()})):
        def check(self, x: torch.Tensor) -> None: ...

    with pytest.raises(InputError, match="NamedOp takes x: "):
        NamedOp()()
    with pytest.raises(InputError, match="NamedOp takes x: .*'y'"):
        NamedOp()(torch.ones(1), y=torch.ones(1))


# ------------------------------------------------------------------------------------------- the three errors


def three_errors(fake: Any) -> Any:
    """An op whose calls of 1, 5 and 9 end in each error, with a backend-shipped and two in-tree keys."""
    kernels = {
        "low": fake.kernel("Low", refuse=fake.upto(2)),
        "alike": fake.kernel("Alike", refuse=fake.upto(2)),
        "elsewhere": fake.kernel("Elsewhere", devices=("cuda",)),
    }
    op = fake.op(kernels)()
    register_kernel_type("FakeOp", "mine", fake.kernel("Mine", refuse="not today"))
    return op


def test_an_error_of_an_op_of_ours_says_which_distribution_ships_each_kernel() -> None:
    call = LayerNormCall(torch.device("meta"), 4, torch.float32)
    lines = str(LayerNormFwdOp(4).explain("layer_norm", call)).splitlines()
    for key, shipped in (("held_row", "tileops-core"), ("streamed_row", "tileops-core")):
        (line,) = [line for line in lines if line.strip().startswith(f"{key} ")]
        assert shipped in line


@pytest.mark.parametrize(
    ("n", "device", "error", "phrase"),
    [
        (1, "cpu", AmbiguousDispatchError, "dispatch is ambiguous: alike, low all serve this call"),
        (9, "cpu", OpNotAvailableError, "no implementation serves this call"),
        (1, "meta", OpNotAvailableError, "in-tree kernels do not run on meta"),
    ],
)
def test_each_error_opens_with_its_phrase_and_lists_every_verdict_and_who_ships_it(
    fake: Any, n: int, device: str, error: type[Exception], phrase: str
) -> None:
    op = three_errors(fake)
    for ask in (op.kernel_for, op.key_for):
        with pytest.raises(error) as raised:
            ask("fake", fake.call(n, device))
        caught: Any = raised.value
        lines = str(caught).splitlines()
        assert lines[0].startswith(phrase)
        assert f"FakeCall(device={device}, n={n}" in lines[1]
        for key, cls in (("low", "Low"), ("alike", "Alike"), ("elsewhere", "Elsewhere"), ("local:mine", "Mine")):
            (line,) = [line for line in lines if line.strip().startswith(f"{key} ")]
            assert cls in line
            assert "tileops-core" not in line, "these classes are not of our distribution"
        assert lines[-1].strip()
        assert (caught.op, caught.interface, caught.call) == ("FakeOp", "fake", fake.call(n, device))
        assert {verdict.key for verdict in caught.verdicts} == {"low", "alike", "elsewhere", "local:mine"}


def test_the_reasons_of_all_that_refuse_are_in_the_error(fake: Any) -> None:
    with pytest.raises(OpNotAvailableError) as raised:
        three_errors(fake).kernel_for("fake", fake.call(9))
    assert str(raised.value).count("n is 9; serves up to 2") == 2
    assert "not today" in str(raised.value)
    assert "runs on cuda, not on cpu" in str(raised.value)


def test_a_failed_selection_is_not_remembered(fake: Any) -> None:
    op = three_errors(fake)
    with pytest.raises(OpNotAvailableError):
        op.kernel_for("fake", fake.call(9))
    register_kernel_type("FakeOp", "all", fake.kernel("All"))
    assert type(op.kernel_for("fake", fake.call(9))).__name__ == "All"


# ------------------------------------------------------------------------------------------------- explaining


def test_explain_runs_and_builds_nothing(fake: Any) -> None:
    op = fake.op({"a": fake.kernel()})()
    assert op.explain(torch.ones(3)).key == "a"
    assert op.explain("fake", fake.call(3)).key == "a"
    assert {what for what, _ in fake.log} == {"refusal"}


def test_explain_of_tensors_and_of_a_spec_give_one_selection(fake: Any) -> None:
    op = fake.op({"a": fake.kernel(), "b": fake.kernel(refuse=fake.upto(2), over=("a",))})()
    for n in (1, 5):
        assert op.explain(torch.ones(n)) == op.explain("fake", fake.call(n))


def test_explain_does_not_raise_where_nothing_serves_or_dispatch_is_ambiguous(fake: Any) -> None:
    op = three_errors(fake)
    assert op.explain("fake", fake.call(1)).contenders == ("alike", "low")
    assert op.explain(torch.ones(9)).key is None
    assert op.explain("fake", fake.call(1, "meta")).key is None


def test_explain_asks_about_a_board_that_is_not_there(fake: Any) -> None:
    hopper = fake.kernel(devices=("cuda",), archs=frozenset({90}))
    op = fake.op({"cpu_row": fake.kernel(), "hopper": hopper})()
    assert op.explain(torch.ones(3)).key == "cpu_row"
    assert op.explain(torch.ones(3), on="h200").key == "hopper"
    assert op.explain(torch.ones(3), on=DeviceFacts(arch=80)).key is None
    assert op.explain("fake", fake.call(3).on("h200")) == op.explain(torch.ones(3), on="h200")


def test_an_op_subclass_can_be_explained_like_its_base(fake: Any) -> None:
    heir = type("HeirOp", (fake.op({"a": fake.kernel()}),), {})
    assert heir().explain(torch.ones(3)).op == "HeirOp"


# ------------------------------------------------------------------------------- registration and live instances


def test_a_late_registration_takes_effect_at_the_next_call_of_live_instances(fake: Any) -> None:
    op = fake.op({"a": fake.kernel("Ours")})()
    assert op(torch.ones(2))[0] == "Ours"
    register_kernel_type("FakeOp", "mine", fake.kernel("Mine", over=("a",), refuse=fake.upto(4)))
    assert op(torch.ones(2))[0] == "Mine"
    assert op(torch.ones(8))[0] == "Ours"
    unregister_kernel_type("FakeOp", "mine")
    assert op(torch.ones(2))[0] == "Ours"


def test_a_registration_drops_no_entry(fake: Any) -> None:
    op = fake.op({"a": fake.kernel("Ours")})()
    first = op.kernel_for("fake", fake.call())
    register_kernel_type("FakeOp", "mine", fake.kernel("Mine", refuse="no"))
    assert op.kernel_for("fake", fake.call()) is first


def test_subclasses_of_an_op_get_what_is_registered_for_their_base(fake: Any) -> None:
    base = fake.op({"a": fake.kernel("Ours")})
    heir = fake.op(name="HeirOp", base=base)()
    register_kernel_type("FakeOp", "mine", fake.kernel("Mine", over=("a",)))
    assert heir(torch.ones(2))[0] == "Mine"
    register_kernel_type("HeirOp", "narrow", fake.kernel("Narrow", over=("mine",)))
    assert heir(torch.ones(2))[0] == "Narrow"
    assert base()(torch.ones(2))[0] == "Mine"


def test_an_op_with_a_constructor_of_its_own_gets_registered_kernels(fake: Any) -> None:
    class OwnOp(fake.op({"a": fake.kernel("Ours")})):
        def __init__(self, size: int) -> None:
            self.size = size
            self.target = None

    register_kernel_type("OwnOp", "mine", fake.kernel("Mine", over=("a",)))
    assert OwnOp(3)(torch.ones(2))[0] == "Mine"


def test_a_kernel_that_serves_nothing_on_this_device_leaves_the_op_to_the_others(fake: Any) -> None:
    op = fake.op({"a": fake.kernel("Ours")})()
    register_kernel_type("FakeOp", "mine", fake.kernel("Mine", over=("a",), devices=("cuda",)))
    assert op(torch.ones(2))[0] == "Ours"


def test_a_miss_during_a_registration_never_serves_from_the_old_table(fake: Any) -> None:
    inside, registered = threading.Event(), threading.Event()

    def entry(cls: Any, call: Any) -> Any:
        def factory() -> Any:
            inside.set()
            assert registered.wait(timeout=30)
            return cls(call)

        return call, factory

    op = fake.op({"a": fake.kernel("Slow", entry=entry)})()
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(op.kernel_for, "fake", fake.call())
        assert inside.wait(timeout=30)
        register_kernel_type("FakeOp", "mine", fake.kernel("Mine", over=("a",)))
        registered.set()
        assert type(slow.result(timeout=30)).__name__ == "Slow"
    assert type(op.kernel_for("fake", fake.call())).__name__ == "Mine"


# ------------------------------------------------------------------------------------ declarations of an op class


def test_the_tables_of_an_op_class_are_read_only(fake: Any) -> None:
    op = fake.op({"a": fake.kernel()})
    with pytest.raises(TypeError):
        op.kernel_types["b"] = fake.kernel()
    with pytest.raises(TypeError):
        op.interfaces["b"] = fake.Interface


def test_an_op_class_whose_kernel_fits_no_interface_is_refused(fake: Any) -> None:
    with pytest.raises(DeclarationError, match="implements no interface of this op; subclass one of: .*FakeInterface"):
        fake.op({"a": fake.kernel(of=(fake.Other,))})


def test_an_op_class_that_prefers_a_key_it_does_not_have_is_refused(fake: Any) -> None:
    with pytest.raises(DeclarationError, match="'a' is preferred over .*lng.*it has: a, long"):
        fake.op({"a": fake.kernel(over=("lng",)), "long": fake.kernel()})


def test_an_op_class_with_two_generals_on_a_device_type_is_refused(fake: Any) -> None:
    with pytest.raises(DeclarationError, match="a and b are both general for FakeInterface on cpu"):
        fake.op({"a": fake.kernel(general=True), "b": fake.kernel(general=True)})
    fake.op({"a": fake.kernel(general=True), "b": fake.kernel(general=True, devices=("cuda",))})


def test_an_op_class_whose_preferences_form_a_cycle_is_refused(fake: Any) -> None:
    with pytest.raises(DeclarationError, match="form a cycle") as raised:
        fake.op({"a": fake.kernel(over=("b",)), "b": fake.kernel(over=("c",)), "c": fake.kernel(over=("a",))})
    assert all(key in str(raised.value) for key in "abc")


def test_an_op_may_have_no_kernel_at_all(fake: Any) -> None:
    with pytest.raises(OpNotAvailableError, match="in-tree kernels do not run on cpu"):
        fake.op({})().kernel_for("fake", fake.call())


# --------------------------------------------------------------------------------------- copies, pickles, repr


@pytest.mark.parametrize(
    "op",
    [
        tileops.LayerNormFwdOp((4, 8), eps=1e-3),
        tileops.RMSNormFwdOp(8),
        tileops.BatchNormFwdOp(True, 0.2),
        tileops.FusedAddLayerNormFwdOp(1e-3),
        tileops.GroupNormFwdOp(4),
        tileops.InstanceNormFwdOp(use_input_stats=False),
    ],
    ids=repr,
)
def test_an_op_copies_and_pickles_with_its_parameters(op: Op) -> None:
    for twin in (copy.copy(op), copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert type(twin) is type(op)
        assert twin.params == op.params
        assert repr(twin) == repr(op)


def test_an_op_shows_how_it_was_constructed() -> None:
    assert repr(tileops.LayerNormFwdOp((4, 8))) == "LayerNormFwdOp(normalized_shape=(4, 8), eps=1e-05)"
    assert repr(tileops.RMSNormFwdOp(8, target="example")) == (
        "RMSNormFwdOp(normalized_shape=(8,), eps=None, target='example')"
    )


def test_a_copy_of_an_op_that_ran_finds_the_same_entry(fake: Any) -> None:
    op = fake.op({"a": fake.kernel()})()
    assert copy.deepcopy(op).kernel_for("fake", fake.call()) is op.kernel_for("fake", fake.call())


def test_selection_never_depends_on_the_order_of_declarations(fake: Any) -> None:
    kernels = {
        "general": fake.kernel("General", general=True),
        "wide": fake.kernel("Wide", refuse=fake.upto(8)),
        "narrow": fake.kernel("Narrow", refuse=fake.upto(4), over=("wide",)),
    }
    mine = {"mine": fake.kernel("Mine", refuse=fake.upto(2), over=(tileops.IN_TREE,)),
            "other": fake.kernel("Other", refuse=fake.upto(1), over=("mine", "narrow"))}  # fmt: skip
    expected = ["local:other", "local:mine", "narrow", "narrow", "wide", "general"]
    for seed in range(10):
        order, added = list(kernels.items()), list(mine.items())
        random.Random(seed).shuffle(order)
        random.Random(seed).shuffle(added)
        op = fake.op(dict(order), name=f"Order{seed}Op")()
        for key, cls in added:
            register_kernel_type(f"Order{seed}Op", key, cls)
        assert [op.key_for("fake", fake.call(n)) for n in (1, 2, 3, 4, 8, 9)] == expected


@pytest.mark.usefixtures("backends")
@pytest.mark.parametrize("op", [LayerNormFwdOp(4), tileops.RMSNormFwdOp(4), tileops.BatchNormFwdOp()], ids=repr)
def test_too_many_arguments_are_refused_with_the_names_of_those_it_takes(op: Any) -> None:
    names = ", ".join(op.argument_names)
    with pytest.raises(InputError, match=f"takes {names}: too many positional arguments"):
        op(torch.ones(2, 4), *[torch.ones(4)] * len(op.argument_names))
