"""The benchmark of the norms: its cases, its processes, what it makes of their times, and its page."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tileops.norm
import torch

sys.path.insert(0, str(Path(__file__).parent))  # these are scripts, which import each other as neighbours

import device_worker  # noqa: E402
import norm_arms  # noqa: E402
import norm_cases  # noqa: E402
import norm_page  # noqa: E402
import norm_results  # noqa: E402
import norms  # noqa: E402
import peers  # noqa: E402
import row_counts  # noqa: E402
from norm_cases import Bar, Case  # noqa: E402

SMALL = [
    Case(op, (2, 32, 4, 4) if op.startswith(("batch", "group", "instance")) else (4, 64), "float32", Bar(rival=1.0))
    for op in norm_cases.PASSES
]


def is_there(op: str) -> bool:
    return hasattr(tileops.norm, "GroupNormFwdOp") or not op.startswith(("group", "instance"))


# --------------------------------------------------------------------------------------------------------- the cases


def test_every_case_has_a_name_of_its_own_within_its_op_and_something_that_its_time_is_held_to() -> None:
    cases = norm_cases.cases()
    assert len({(case.op, case.name) for case in cases}) == len(cases)
    assert {case.op for case in cases} == set(norm_cases.PASSES)
    assert all((case.bar.copy, case.bar.rival) != (None, None) for case in cases)


@pytest.mark.parametrize(
    ("op", "shape", "bar"),
    [
        ("layer_norm", (4096, 4096), Bar(copy=1.10, rival=1.02)),
        ("layer_norm", (2048, 1024), Bar(copy=1.18, rival=1.02)),
        ("layer_norm", (512, 65536), Bar(copy=1.20)),
        ("layer_norm", (1_000_000, 64), Bar(copy=1.10)),
        ("rms_norm", (1, 16384), Bar(rival=1.0, margin=0.3)),
        ("fused_add_rms_norm", (4096, 4096), Bar(rival=1 / 0.98)),
        ("batch_norm_train", (8192, 1024), Bar(rival=0.8)),
        ("batch_norm_infer", (2, 16, 64, 64), Bar(copy=1.10)),
        ("group_norm_bwd", (8, 320, 64, 64), Bar(rival=1.0)),
    ],
)
def test_a_case_is_held_to_the_bar_of_its_row(op: str, shape: tuple[int, ...], bar: Bar) -> None:
    assert {case.bar for case in norm_cases.cases() if (case.op, case.shape) == (op, shape)} == {bar}


# ------------------------------------------------------------------------------------------------------- the workers


@pytest.fixture
def worker() -> Any:
    return device_worker.Worker("cpu")


@pytest.mark.parametrize("case", [case for case in SMALL if is_there(case.op)], ids=lambda case: case.op)
@pytest.mark.usefixtures("backends")
def test_our_call_of_every_op_agrees_with_torchs(worker: Any, case: Case) -> None:
    answer = worker.answer({"do": "prepare", "arm": "tileops", "case": dataclasses.asdict(case)})
    assert answer["kernel"]
    assert answer["on"] == f"torch {torch.__version__}, CPU"


@pytest.mark.parametrize("arm", ["torch", "copy"])
@pytest.mark.parametrize("case", [SMALL[0], SMALL[8]], ids=lambda case: case.op)
def test_a_captured_call_is_timed_until_it_is_dropped(worker: Any, arm: str, case: Case) -> None:
    fields = dataclasses.asdict(case)
    worker.answer({"do": "capture", "arm": arm, "case": fields})
    assert worker.answer({"do": "replay", "arm": arm})["seconds"] > 0
    worker.answer({"do": "drop"})
    with pytest.raises(KeyError):
        worker.answer({"do": "replay", "arm": arm})


def test_an_arm_with_another_result_than_torch_is_refused(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(norm_arms.ARMS, "wrong", lambda op, tensors: lambda: tensors.x)
    with pytest.raises(ValueError, match="of its length away from torch's"):
        worker.answer({"do": "prepare", "arm": "wrong", "case": dataclasses.asdict(SMALL[0])})


def test_a_peer_without_an_op_says_so() -> None:
    with pytest.raises(LookupError, match="it has no batch_norm"):
        norm_arms._among({"layer_norm": norm_arms.layer_norm}, "batch_norm_bwd")


def test_calls_rotate_through_tensors_of_their_own_in_the_memory_order_of_the_case(worker: Any) -> None:
    case = Case("batch_norm_bwd", (2, 3, 4, 5), "float16", Bar(rival=1.0), channels_last=True)
    first, second = worker._draw(case, 2)
    assert first.x.shape == first.grad.shape == case.shape
    assert first.x.is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(first.x, second.x)
    assert second.x.data_ptr() - first.x.data_ptr() == case.values
    assert first.weight is second.weight


# ---------------------------------------------------------------------------------------------------------- the run


ANSWERS = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    answer = {"seconds": 1e-6 * len(request.get("arm", "")), "on": "here", "kernel": "held_row"}
    if request.get("arm") == "liger" and request.get("case", {}).get("op") == "rms_norm":
        sys.exit("CUDA error")
    if request["do"] == "replay" and request["arm"] == "quack":
        answer = {"error": "ValueError: too narrow"}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def processes() -> Iterator[dict[str, list[peers.Peer]]]:
    names = ("copy", "tileops", "torch", "liger", "quack")
    arms = {name: [peers.Peer([sys.executable, "-S", "-c", ANSWERS])] for name in names}
    yield arms
    for one in arms.values():
        one[0].close()


@pytest.fixture
def asked() -> argparse.Namespace:
    return norms.options_of(["--device", "cpu", "--rounds", "3"])


def test_a_peer_that_fails_on_a_case_says_why_there_and_is_timed_on_the_next(processes: Any) -> None:
    cases = [Case("rms_norm", (4, 64), "float32", Bar(rival=1.0)), Case("layer_norm", (4, 64), "float32", Bar(1.1))]
    run = norms.Run(cases, processes)
    run.prepare()
    for case in cases:
        run.measure(case, 3)
    first, second = map(run.record, cases)
    assert first["times"]["liger"] == {"problem": "its process ended: CUDA error"}
    assert first["times"]["tileops"] == {"microseconds": [pytest.approx(7)] * 3}
    assert second["times"]["liger"] == {"microseconds": [pytest.approx(5)] * 3}
    assert second["times"]["quack"] == {"problem": "ValueError: too narrow"}
    assert second["kernel"] == "held_row"
    assert json.loads(json.dumps(second))["bar"] == {"copy": 1.1, "rival": None, "margin": 0.0}


def test_measuring_prints_a_table_and_writes_the_file_after_each_op(
    processes: Any, asked: argparse.Namespace, tmp_path: Path
) -> None:
    asked.json = tmp_path / "found.json"
    run = norms.Run([SMALL[0]], processes)
    run.prepare()
    console = norms.Console(width=300, file=io.StringIO())
    norms.measured(run, asked, console, begun=-math.inf)
    assert "not measured" in console.file.getvalue()
    norms.measured(run, asked, console, begun=math.inf)
    assert "1.400 of at most 1.00 × torch eager: MISSED" in console.file.getvalue()
    (record,) = json.loads(asked.json.read_text())["cases"]
    assert record["op"] == "layer_norm"


# ------------------------------------------------------------------------------------------------------- the results


def record(ours: float | None, bar: Bar, **times: float) -> dict[str, Any]:
    given = {"tileops": ours, **times}
    measured = {
        arm: {"problem": "none"} if time is None else {"microseconds": [time, time, time]}
        for arm, time in given.items()
    }
    return {"op": "layer_norm", "name": "4×64", "bar": dataclasses.asdict(bar), "times": measured}


def test_a_bar_is_met_where_both_of_its_parts_are() -> None:
    bar = Bar(copy=1.1, rival=1.0)
    assert norm_results.is_met(record(10.9, bar, copy=10.0, torch=30.0, liger=11.0)) is True
    assert norm_results.is_met(record(11.1, bar, copy=10.0, torch=30.0, liger=12.0)) is False
    assert norm_results.is_met(record(10.9, bar, copy=10.0, torch=30.0, liger=10.8)) is False
    assert norm_results.is_met(record(None, bar, copy=10.0, torch=30.0)) is None


def test_a_margin_is_in_microseconds_beyond_the_best_rival() -> None:
    assert norm_results.is_met(record(2.2, Bar(rival=1.0, margin=0.3), torch=4.0, liger=2.0)) is True
    assert norm_results.is_met(record(2.4, Bar(rival=1.0, margin=0.3), torch=4.0, liger=2.0)) is False
    assert norm_results.is_met(record(2.4, Bar(rival=1.0, margin=0.3))) is None


def test_a_bar_allows_the_least_of_its_parts_in_microseconds() -> None:
    assert norm_results.allowed(record(1.0, Bar(copy=1.1, rival=1.0, margin=0.5), copy=10.0, torch=9.0)) == 9.5
    assert norm_results.allowed(record(1.0, Bar(copy=1.5, rival=1.0), copy=4.0)) == 6.0
    assert norm_results.allowed(record(1.0, Bar(rival=1.0), copy=4.0)) is None


def test_the_lead_is_the_geometric_mean_over_the_best_rivals() -> None:
    records = [record(1.0, Bar(), torch=4.0, copy=0.5), record(1.0, Bar(), torch=1.0, liger=9.0), record(None, Bar())]
    assert norm_results.lead(records) == pytest.approx(2.0)


# ---------------------------------------------------------------------------------------------------------- the page


def test_the_page_and_its_figures_are_those_of_the_results() -> None:
    report = json.loads(norm_page.RESULTS.read_text(encoding="utf-8"))
    files = norm_page.files_of(report, norm_page.PAGE.read_text(encoding="utf-8"))
    assert {path for path in files if path.suffix == ".svg"} == set((norm_page.DOCS / norm_page.FIGURES).glob("*.svg"))
    for path, text in files.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run tests/benchmarks/norm_page.py"


def test_a_ratio_beyond_the_scale_lies_on_its_end() -> None:
    assert norm_page._x(1e9) == norm_page.RIGHT
    assert norm_page.LEFT < norm_page._x(1.0) < norm_page._x(1.1)


# -------------------------------------------------------------------------------------------------------- row counts

COUNTS = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    wrong = request["arm"] == "slow" and request["rows"] > 2
    print(json.dumps({"error": "KeyError: 3"} if wrong else {"seconds": 0.0}), flush=True)
"""


@pytest.mark.parametrize(("arm", "counts", "problem"), [("tileops", 5, ""), ("slow", 2, "KeyError: 3")])
def test_row_counts_are_called_until_one_fails(arm: str, counts: int, problem: str, tmp_path: Path) -> None:
    options = row_counts.options_of(["--counts", "5", "--device", "cpu"])
    found = row_counts.Taken("layer_norm", arm)
    peer = peers.Peer([sys.executable, "-S", "-c", COUNTS])
    try:
        row_counts.call_in_turn(peer, found, options)
    except peers.PeerError as error:
        found.problem = str(error)
    finally:
        peer.close()
    assert (found.counts, found.problem) == (counts, problem)
    assert found.seconds > 0
