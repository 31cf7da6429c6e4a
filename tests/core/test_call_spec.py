"""Call specs: frozen dataclasses that key tables, with device facts that take no part in equality."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tileops import CallSpec, DeviceFacts, KernelInterface, SizeClass
from tileops.call_spec import size_class
from tileops.record import key_of

if TYPE_CHECKING:
    from decimal import Decimal  # as an author's linter asks for: annotations need no import at run time

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class RowCall(CallSpec):
    n: int
    dtype: torch.dtype
    eps: float = 1e-5
    rows: Annotated[int, SizeClass(cap=64)] = 1


@dataclasses.dataclass(frozen=True)
class OtherCall(CallSpec):
    n: int
    dtype: torch.dtype
    eps: float = 1e-5
    rows: Annotated[int, SizeClass(cap=64)] = 1


@dataclasses.dataclass(frozen=True)
class LintedCall(CallSpec):
    n: int
    scale: Decimal | None = None
    rows: Annotated[int, SizeClass(cap=64)] = 1


class Rows(KernelInterface[RowCall]):
    request = RowCall


class Others(KernelInterface[OtherCall]):
    request = OtherCall


CALL = RowCall(CPU, 64, torch.float16)


def test_a_spec_behaves_as_any_frozen_dataclass() -> None:
    assert dataclasses.is_dataclass(RowCall)
    assert [field.name for field in dataclasses.fields(CALL)] == ["device", "n", "dtype", "eps", "rows"]
    assert dataclasses.asdict(CALL)["n"] == 64
    assert dataclasses.replace(CALL, n=8) == RowCall(CPU, 8, torch.float16)
    assert eval(repr(CALL), {"RowCall": RowCall, "torch": torch, "device": torch.device}) == CALL
    with pytest.raises(dataclasses.FrozenInstanceError):
        CALL.n = 3  # type: ignore[misc]
    for twin in (copy.copy(CALL), copy.deepcopy(CALL), pickle.loads(pickle.dumps(CALL))):
        assert twin == CALL
        assert hash(twin) == hash(CALL)


def test_a_specs_class_device_and_fields_decide_equality() -> None:
    assert RowCall(CPU, 64, torch.float16) == CALL
    for other in (
        OtherCall(CPU, 64, torch.float16),
        RowCall(torch.device("meta"), 64, torch.float16),
        RowCall(CPU, 65, torch.float16),
        RowCall(CPU, 64, torch.bfloat16),
        RowCall(CPU, 64, torch.float16, 1e-6),
    ):
        assert other != CALL
        assert {CALL: 1}.get(other) is None


def test_a_spec_of_an_interface_carries_its_key_from_its_construction_on() -> None:
    assert CALL._table_key == (RowCall, CPU, 64, torch.float16, 1e-5, 1)
    assert RowCall(device=CPU, n=64, dtype=torch.float16)._table_key == CALL._table_key
    assert OtherCall(CPU, 64, torch.float16)._table_key != CALL._table_key


def test_a_spec_with_stated_facts_never_has_the_key_of_a_plain_one() -> None:
    plain = RowCall(torch.device("cuda", 0), 64, torch.float16)
    stated = plain.on("h200")
    for twin in (stated, copy.copy(stated), dataclasses.replace(stated), pickle.loads(pickle.dumps(stated))):
        assert key_of(twin) == key_of(stated) != key_of(plain)


def test_a_spec_on_a_device_without_facts_reads_none() -> None:
    assert (CALL.arch, CALL.sm_count, CALL.smem_budget, CALL.calibration) == (-1, 0, 0, None)


def test_making_comparing_hashing_and_showing_a_spec_read_no_device_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    def impossible(_: Any) -> Any:
        raise AssertionError("nobody asked for a fact")

    monkeypatch.setattr(CallSpec, "facts", property(impossible))
    call = RowCall(torch.device("cuda", 0), 64, torch.float16)
    assert {call: 1}[dataclasses.replace(call)] == 1
    assert "n=64" in str(call)
    assert call.normalised() == call


# ---------------------------------------------------------------------------------------------- stated facts


def test_stated_facts_answer_in_place_of_the_device() -> None:
    stated = CALL.on("h200")
    assert (stated.arch, stated.sm_count, stated.smem_budget, stated.calibration) == (90, 132, 227 * 1024, "h200")
    assert (stated.n, stated.dtype, stated.eps, stated.rows) == (64, torch.float16, 1e-5, 1)
    assert stated.device == torch.device("cuda", 0)
    assert CALL.on(DeviceFacts(arch=123)).arch == 123


def test_a_spec_with_stated_facts_never_equals_a_plain_one() -> None:
    plain = RowCall(torch.device("cuda", 0), 64, torch.float16)
    assert plain.on("h200") != plain
    assert plain.on("h200") != plain.on("h100")
    assert plain.on("h200") == plain.on("H200")
    assert {plain: 1}.get(plain.on("h200")) is None


def test_facts_may_be_stated_anew() -> None:
    assert CALL.on("h200").on("a100") == CALL.on("a100")
    assert CALL.on("h200").on("a100").arch == 80


def test_a_spec_on_a_device_of_its_own_keeps_it_when_facts_are_stated() -> None:
    assert RowCall(torch.device("cuda", 3), 64, torch.float16).on("h200").device == torch.device("cuda", 3)


def test_a_stated_spec_stays_stated_when_it_is_replaced_normalised_and_copied() -> None:
    stated = dataclasses.replace(CALL, rows=5).on("h200")
    for twin in (dataclasses.replace(stated, rows=8), stated.normalised(), copy.copy(stated), copy.deepcopy(stated)):
        assert (twin.arch, twin.stated_on) == (90, "h200")
    assert stated.normalised().rows == 8


@pytest.mark.parametrize("board", ["h200", DeviceFacts(arch=77, sm_count=3)])
def test_a_stated_spec_crosses_process_borders(board: Any) -> None:
    stated = CALL.on(board)
    twin = pickle.loads(pickle.dumps(stated))
    assert twin == stated
    assert twin.arch == stated.arch


def test_a_spec_is_shown_as_a_reader_writes_it() -> None:
    assert str(CALL) == "RowCall(device=cpu, n=64, dtype=float16, eps=1e-05, rows=1)"
    assert str(CALL.on("h200")) == "RowCall(device=cuda:0, n=64, dtype=float16, eps=1e-05, rows=1) on h200"


# ---------------------------------------------------------------------------------------------- size classes


@pytest.mark.parametrize(
    ("size", "expected"), [(0, 1), (1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (64, 64), (65, 64)]
)
def test_a_size_is_rounded_up_to_a_power_of_two_and_capped(size: int, expected: int) -> None:
    assert SizeClass(cap=64).of(size) == expected
    assert size_class(size, 64) == expected


@given(st.integers(1, 1 << 40), st.integers(0, 40))
def test_a_size_class_holds_the_sizes_above_half_of_it(size: int, power: int) -> None:
    cap = 1 << power
    rounded = size_class(size, cap)
    assert size_class(rounded, cap) == rounded
    assert rounded == cap <= size or size <= rounded < 2 * size


def test_normalising_rounds_the_marked_fields_and_no_other() -> None:
    call = RowCall(CPU, 5, torch.float16, rows=5)
    assert (call.normalised().rows, call.normalised().n) == (8, 5)
    assert call.normalised().normalised() is call.normalised() or call.normalised().normalised() == call.normalised()


def test_a_spec_whose_annotations_only_a_type_checker_can_read_has_its_size_classes_too() -> None:
    assert LintedCall(CPU, 5, rows=5).normalised().rows == 8


def test_an_op_takes_a_spec_whose_annotations_only_a_type_checker_can_read(fake: Any) -> None:
    class Linted(KernelInterface[LintedCall]):
        request = LintedCall

        def forward(self, x: torch.Tensor) -> Any:
            raise NotImplementedError

    op = fake.op({"a": fake.kernel(of=(Linted,))}, interfaces={"linted": Linted})()
    assert op.key_for("linted", LintedCall(CPU, 5)) == "a"


def test_a_spec_of_a_program_that_is_run_as_a_script_works() -> None:
    program = """
        from dataclasses import dataclass
        import torch
        from tileops import CallSpec

        @dataclass(frozen=True)
        class ScriptCall(CallSpec):
            n: int

        print(ScriptCall(torch.device("cpu"), 3).normalised().on("h200"))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "ScriptCall(device=cuda:0, n=3) on h200"
