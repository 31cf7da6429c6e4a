"""Facts of devices: who reads them, what boards are known, open ranges of architectures."""

from __future__ import annotations

import contextlib
import os
import types
from typing import Any

import pytest
import torch
from tileops import at_least, device
from tileops.device import (
    KNOWN_BOARDS,
    DeviceFacts,
    device_facts,
    device_name,
    known_board,
    made_current,
    set_facts_readers,
    with_index,
)
from tileops.ops import entries

CUDA = torch.device("cuda", 0)


def pretend(
    monkeypatch: pytest.MonkeyPatch, name: str, major: int, minor: int, sms: int, smem: int = 232448
) -> list[Any]:
    """Make torch answer as if a CUDA device were there; the devices that were asked about."""
    asked = list[Any]()
    properties = types.SimpleNamespace(
        name=name, major=major, minor=minor, multi_processor_count=sms, shared_memory_per_block_optin=smem
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda which: asked.append(which) or properties)
    device_facts.cache_clear()
    return asked


def test_the_facts_of_a_cuda_device_are_read_once_and_from_that_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend(monkeypatch, "NVIDIA H200", 9, 0, 132)
    second = torch.device("cuda", 1)
    for _ in range(3):
        assert device_facts(second) == DeviceFacts(arch=90, sm_count=132, smem_budget=232448, calibration="h200")
    device_facts(CUDA)
    assert asked == [second, CUDA]


@pytest.mark.parametrize(
    ("name", "major", "minor", "sms", "board"),
    [
        ("NVIDIA H200", 9, 0, 132, "h200"),
        ("NVIDIA H200 NVL", 9, 0, 132, "h200"),
        ("NVIDIA H100 80GB HBM3", 9, 0, 132, "h100"),
        ("NVIDIA A100-SXM4-40GB", 8, 0, 108, "a100"),
        ("NVIDIA GeForce RTX 4090", 8, 9, 128, "rtx4090"),
        ("NVIDIA H100 PCIe", 9, 0, 114, None),
        ("NVIDIA H200 MIG 1g.18gb", 9, 0, 16, None),
        ("NVIDIA Unheard Of", 13, 0, 200, None),
    ],
)
def test_a_device_belongs_to_the_board_that_its_name_and_counts_agree_with(
    monkeypatch: pytest.MonkeyPatch, name: str, major: int, minor: int, sms: int, board: str | None
) -> None:
    pretend(monkeypatch, name, major, minor, sms)
    assert device_facts(CUDA).calibration == board
    assert device_facts(CUDA).arch == major * 10 + minor


def test_on_a_rocm_build_a_cuda_device_has_no_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "AMD Instinct MI300X", 9, 4, 304)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    facts = device_facts(CUDA)
    assert (facts.arch, facts.calibration) == (-1, None)
    assert facts.arch not in at_least(0)


@pytest.mark.parametrize("name", ["cpu", "meta", "xpu:0"])
def test_a_device_type_without_facts_has_the_empty_ones(name: str) -> None:
    assert device_facts(torch.device(name)) == DeviceFacts(arch=-1, sm_count=0, smem_budget=0, calibration=None)


def broken(_: torch.device) -> DeviceFacts:
    raise OSError("driver gone")


@pytest.mark.parametrize(
    ("reader", "said"), [(broken, "OSError: driver gone"), (lambda _: 90, "returned int, not DeviceFacts")]
)
def test_a_facts_reader_that_fails_warns_once_and_counts_as_none(fake: Any, reader: Any, said: str) -> None:
    set_facts_readers({"meta": (reader, "tileops-backend-acme 1.0")})
    op = fake.op({"narrow": fake.kernel(devices=("meta",), archs=frozenset({7}), over=("any",)),
                  "any": fake.kernel(devices=("meta",))})()  # fmt: skip
    with pytest.warns(RuntimeWarning, match=said) as caught:
        keys = [op.key_for("fake", fake.call(n, device="meta")) for n in (1, 2)]
    assert keys == ["any", "any"]
    assert len(caught) == 1


def test_a_reader_of_a_backend_never_replaces_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    set_facts_readers({"cpu": (lambda _: DeviceFacts(arch=1), "somebody")})
    assert device_facts(torch.device("cpu")) == DeviceFacts()
    set_facts_readers({})


def test_facts_are_read_again_when_readers_change(fake: Any) -> None:
    set_facts_readers({"meta": (lambda _: DeviceFacts(arch=7), "somebody")})
    assert device_facts(torch.device("meta")).arch == 7
    set_facts_readers({})
    assert device_facts(torch.device("meta")).arch == -1


def test_every_known_board_has_facts_a_source_and_its_own_name() -> None:
    assert {"h200", "h100", "a100"} <= set(KNOWN_BOARDS)
    for name, board in KNOWN_BOARDS.items():
        assert (board.name, board.facts.calibration) == (name, name)
        assert board.facts.arch >= 80
        assert board.facts.sm_count > 0
        assert board.facts.smem_budget > 96 * 1024
        assert board.source


def test_a_board_is_found_whatever_the_case_of_its_name() -> None:
    assert known_board("H200") is known_board("h200")
    assert known_board("h200").facts == DeviceFacts(arch=90, sm_count=132, smem_budget=227 * 1024, calibration="h200")


def test_an_unknown_board_is_an_error_that_lists_the_known_ones(fake: Any) -> None:
    for ask in (known_board, fake.call().on, lambda name: fake.op({})().explain(torch.ones(1), on=name)):
        with pytest.raises(LookupError, match="no known board is called 'h20'.*h200") as raised:
            ask("h20")
        assert "\\" not in str(raised.value)


def test_facts_are_given_by_keyword_and_compare_by_value() -> None:
    assert DeviceFacts(arch=90) == DeviceFacts(arch=90)
    assert hash(DeviceFacts(arch=90)) == hash(DeviceFacts(arch=90))
    with pytest.raises(TypeError):
        DeviceFacts(90)  # type: ignore[misc]
    with pytest.raises(AttributeError):
        DeviceFacts(arch=90).arch = 80  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arch", "inside"), [(-1, False), (89, False), (90, True), (121, True), ("90", False), (None, False)]
)
def test_an_open_range_contains_what_is_at_least_its_lowest(arch: object, inside: bool) -> None:
    assert (arch in at_least(90)) is inside


def test_an_open_range_prints_as_written_and_is_a_value() -> None:
    assert repr(at_least(90)) == "at_least(90)"
    assert at_least(90) == at_least(90)
    assert len({at_least(90), at_least(90), at_least(80)}) == 2


@pytest.mark.parametrize("arch", [-1, "90", None])
def test_an_open_range_from_what_is_no_architecture_is_refused(arch: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        at_least(arch)


def test_a_device_without_index_is_the_current_one_of_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert with_index(torch.device("cuda")) == torch.device("cuda", 1)
    assert with_index(CUDA) == CUDA
    assert with_index(torch.device("cpu")) == torch.device("cpu")
    assert with_index(torch.device("meta")) == torch.device("meta")


def test_a_call_without_index_is_selected_for_the_current_device(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    op = fake.op({"a": fake.kernel(devices=("cuda",))})()
    assert op.explain("fake", fake.call(device="cuda")).call.device == torch.device("cuda", 1)


def test_a_looked_up_call_without_index_follows_the_current_device(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "made_current", lambda which: contextlib.nullcontext())
    current = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    op = fake.op({"a": fake.kernel(devices=("cuda",))})()
    assert op.kernel_for("fake", fake.call(device="cuda")).call.device.index == 0
    current[0] = 1
    assert op.kernel_for("fake", fake.call(device="cuda")).call.device.index == 1


def test_kernels_are_built_with_the_calls_device_current(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    current = ["cuda:0"]

    @contextlib.contextmanager
    def guard(which: torch.device) -> Any:
        current.append(str(which))
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", guard)
    seen = list[str]()

    def entry(cls: Any, call: Any) -> Any:
        return call, lambda: seen.append(current[-1]) or cls(call)

    fake.op({"a": fake.kernel(devices=("cuda",), entry=entry)})().kernel_for("fake", fake.call(device="cuda:1"))
    assert seen == ["cuda:1"]
    assert current == ["cuda:0"]


def test_a_device_is_called_what_its_driver_calls_it_and_a_cpu_by_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA H200 MIG {device.index}g")
    assert device_name(torch.device("cuda", 1)) == "NVIDIA H200 MIG 1g"
    monkeypatch.setattr(device, "_cpu_model", lambda: "EPYC")
    assert device_name(torch.device("cpu")) == f"EPYC, {os.cpu_count()} cores"


def test_a_device_whose_driver_does_not_answer_is_called_by_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: 1 // 0)
    assert device_name(CUDA) == "cuda"
    assert device_name(torch.device("xla", 0)) == "xla"


def test_nothing_has_to_be_current_for_the_cpu() -> None:
    with made_current(torch.device("cpu")), made_current(torch.device("meta")):
        assert device.device_facts(torch.device("cpu")).arch == -1
