"""What measures the budgets measures rightly: timing, records, counting, and the protocol of peers."""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # these are scripts, which import each other as neighbours

import bounded_tables  # noqa: E402
import budgets  # noqa: E402
import cold_start  # noqa: E402
import compiled_graphs  # noqa: E402
import definitions  # noqa: E402
import hit_path  # noqa: E402
import host_arms  # noqa: E402
import host_time  # noqa: E402
import host_worker  # noqa: E402
import peers  # noqa: E402
import serving  # noqa: E402
import timing  # noqa: E402
from record import Budget  # noqa: E402

BUDGETS = [
    value
    for module in (hit_path, bounded_tables, definitions, cold_start, compiled_graphs)
    for value in vars(module).values()
    if isinstance(value, Budget)
]
A_RATIO = Budget("name", "A sentence about two things", most=2.0, noise=0.1)


# ---------------------------------------------------------------------------------------------------- timing


def test_a_thing_takes_as_long_as_itself() -> None:
    arms = {name: timing.repeated("sum(values)", {"values": range(100)}) for name in ("one", "other")}
    assert timing.ratio_of(timing.interleaved(arms, 60), "one", "other").value == pytest.approx(1, abs=0.3)


def test_twice_the_work_takes_about_twice_as_long() -> None:
    arms = {
        "twice": timing.repeated("f(); f()", {"f": lambda: sum(range(200))}),
        "once": timing.repeated("f()", {"f": lambda: sum(range(200))}),
    }
    assert timing.ratio_of(timing.interleaved(arms, 60), "twice", "once").value == pytest.approx(2, rel=0.4)


def test_a_first_run_that_takes_longer_does_not_make_the_rounds_short() -> None:
    waits, runs = [0.01], list[int]()

    def run() -> None:
        runs.append(1)
        if waits:
            time.sleep(waits.pop())

    arm = timing.repeated("run()", {"run": run})
    before = len(runs)
    arm()
    assert len(runs) - before > 100


def test_rounds_are_interleaved_and_every_arm_begins_as_often_as_the_others() -> None:
    ran: list[str] = []

    def arm(name: str) -> timing.Arm:
        return lambda: float(ran.append(name) is None)

    taken = timing.interleaved({name: arm(name) for name in "abc"}, 6)
    assert "".join(ran) == "abc" + 2 * "abcbcacab"
    assert {name: len(values) for name, values in taken.items()} == {"a": 6, "b": 6, "c": 6}


def test_no_garbage_is_collected_while_timing_and_the_collector_comes_back() -> None:
    import gc

    taken = timing.interleaved({"is on": lambda: float(gc.isenabled())}, 3)
    assert taken["is on"] == [0.0] * 3
    assert gc.isenabled()


def test_a_ratio_compares_the_fastest_rounds_and_says_how_far_groups_of_rounds_lie_apart() -> None:
    steady = timing.ratio_of({"a": [2.0] * 20, "b": [1.0, 9.0] * 10}, "a", "b")
    assert (steady.value, steady.seconds) == (2.0, {"a": 2.0, "b": 1.0})
    moving = timing.ratio_of({"a": [2.0, 4.0] * 3, "b": [1.0] * 6}, "a", "b")
    assert moving.value == 2.0
    assert moving.spread == pytest.approx(0.5)
    assert timing.ratio_of({"a": [1.0, 3.0, 9.0], "b": [1.0] * 3}, "a", "b", statistics.median).value == 3.0


def test_a_node_takes_what_many_take_more_than_one() -> None:
    """A compiled graph has costs of its own, which are no node's."""
    taken = {"eager 1": [3.0, 5.0] * 9, f"eager {compiled_graphs.NODES}": [3.0 + 2 * (compiled_graphs.NODES - 1)] * 18}
    taken |= {"inductor 1": [70.0] * 18, f"inductor {compiled_graphs.NODES}": [70.0 + compiled_graphs.NODES - 1] * 18}
    ratio = compiled_graphs._of_a_node(taken, "inductor")
    assert ratio.value == pytest.approx(0.5)
    assert ratio.seconds == {"node": pytest.approx(1), "F.layer_norm": pytest.approx(2)}


# --------------------------------------------------------------------------------------------------- records


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: budget.name)
def test_every_budget_has_a_sentence_of_its_own(budget: Budget) -> None:
    assert len(budget.sentence.split()) >= 4
    assert budget.sentence[0].isupper()
    assert not budget.sentence.endswith(".")
    assert 0 <= budget.noise <= 0.5
    assert budget.usual is None or budget.usual <= budget.most
    assert [other.name for other in BUDGETS].count(budget.name) == 1


@pytest.mark.parametrize(("value", "state"), [(2.0, "met"), (2.1, "noise"), (2.3, "missed"), (None, "skipped")])
def test_a_record_is_missed_only_beyond_its_noise(value: float | None, state: str) -> None:
    record = A_RATIO.skipped("no compiler") if value is None else A_RATIO.measured(value)
    assert record.state == state


def test_json_holds_what_the_table_shows(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    records = [A_RATIO.measured(1.5, spread=0.01, detail="a 3 ns, b 2 ns"), A_RATIO.skipped("no compiler")]
    monkeypatch.setattr(budgets, "MEASURES", {"both": lambda: records})
    file = tmp_path / "budgets.json"
    assert budgets.main(["--json", str(file)]) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    assert set(report) == {"python", "torch", "machine", "budgets"}
    assert report["budgets"][0] == {
        "name": "name", "sentence": "A sentence about two things", "most": 2.0, "noise": 0.1, "unit": "×", "usual": None,
        "value": 1.5, "spread": 0.01, "state": "met", "detail": "a 3 ns, b 2 ns",
    }  # fmt: skip
    assert [row["state"] for row in report["budgets"]] == ["met", "skipped"]
    assert "no compiler" in capsys.readouterr().out


def test_a_record_within_the_budget_has_regressed_beyond_the_noise_of_its_usual_value() -> None:
    budget = Budget("name", "A sentence about two things", most=2.0, noise=0.1, usual=1.0)
    assert [budget.measured(value).state for value in (0.9, 1.09, 1.2, 2.1, 2.3)] == [
        "met",
        "met",
        "regressed",
        "noise",
        "missed",
    ]


@pytest.mark.parametrize(("value", "status"), [(2.1, 0), (2.3, 1)])
def test_check_fails_on_a_miss_beyond_the_noise_alone(monkeypatch: Any, value: float, status: int) -> None:
    monkeypatch.setattr(budgets, "MEASURES", {"one": lambda: [A_RATIO.measured(value)]})
    assert budgets.main(["--check"]) == status
    assert budgets.main([]) == 0


def test_an_unknown_name_is_refused_with_the_known_ones(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        budgets.main(["speed"])
    assert "op-call" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------- counting


def test_frames_of_ours_are_counted_generated_methods_included() -> None:
    from tileops.kernels.layer_norm import LayerNormCall

    assert hit_path.frames_of(lambda: LayerNormCall(torch.device("cpu"), 8, torch.float32)) == ["__init__"]
    assert hit_path.frames_of(lambda: json.dumps({})) == []


def test_what_a_hit_may_not_do_raises() -> None:
    from tileops import device
    from tileops.ops import tables

    with hit_path.forbidding():
        for what, act in {
            "a lock": tables._lock.acquire,
            "an environment read": lambda: os.environ.get("HOME"),
            "logging": lambda: logging.getLogger("x").warning("x"),
            "a device query": lambda: device.device_facts(torch.device("cpu")),
        }.items():
            with pytest.raises(hit_path.ForbiddenError, match=what):
                act()
    assert device.device_facts(torch.device("cpu")).arch == -1
    with tables._lock:
        pass


def test_a_hit_is_measured_in_every_way_to_call(no_backends: None) -> None:
    [frames] = hit_path.frames()
    [forbidden] = hit_path.forbidden()
    assert frames.value is not None
    assert frames.value > 1
    assert "parameters under no_grad" in frames.detail
    assert forbidden.budget.unit == "hits"


def test_misses_are_counted_and_a_hit_is_none(no_backends: None) -> None:
    from tileops.kernels.layer_norm import LayerNorm
    from tileops.norm import LayerNormFwdOp

    misses = bounded_tables.Misses("LayerNormFwdOp", LayerNorm)
    with hit_path.registered("LayerNormFwdOp", hit_path.Nothing), misses.counting(), torch.no_grad():
        op = LayerNormFwdOp(8)
        for rows in (1, 2, 3):
            op(torch.randn(rows, 8))
        assert misses.count == 1
        LayerNormFwdOp(16)(torch.randn(1, 16))
        assert misses.count == 2


def test_the_scan_finds_the_fake_backends() -> None:
    [record] = cold_start.scan()
    assert record.value is not None
    assert record.value > 0


# ----------------------------------------------------------------------------------------------------- peers

FAKE_PEER = """
import torch.nn.functional as F

def layer_norm(x, weight, bias):
    return lambda: F.layer_norm(x, (x.shape[-1],), weight, bias)

def rms_norm(x, weight, bias):
    return lambda: x
"""

ANSWERS = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request["op"] == "rms_norm":
        sys.exit("out of memory")
    print(json.dumps({"seconds": 1e-6 * request["calls"] * len(request["arm"]), "on": "torch 0"}), flush=True)
"""


@pytest.fixture
def asked() -> argparse.Namespace:
    return host_time.options_of(["--device", "cpu", "--rounds", "3", "--calls", "10"])


def test_a_worker_answers_with_seconds_and_refuses_a_wrong_result(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "host_peer.py").write_text(FAKE_PEER)
    monkeypatch.syspath_prepend(tmp_path)
    worker = host_worker.Worker("cpu", "float32")
    requests = [{"arm": "fake", "op": op, "rows": 2, "n": 8, "calls": 600} for op in ("layer_norm", "rms_norm")]
    begin = time.perf_counter()
    right, wrong = map(json.loads, serving.serve(worker.answer, map(json.dumps, requests)))
    assert 0 < right["seconds"] < time.perf_counter() - begin
    assert right["on"].startswith("torch ")
    assert wrong["error"].startswith("AssertionError: Tensor-likes are not close")


def test_a_worker_says_that_a_peer_is_not_there() -> None:
    request = {"arm": "quack", "op": "layer_norm", "rows": 2, "n": 8, "calls": 1}
    (answer,) = serving.serve(host_worker.Worker("cpu", "float32").answer, [json.dumps(request)])
    assert json.loads(answer) == {"error": "ModuleNotFoundError: No module named 'quack'"}


def test_the_floor_allocates_and_launches_with_and_without_a_bias() -> None:
    x, weight, bias = torch.randn(2, 8), torch.randn(8), torch.randn(8)

    def launch(*given: Any) -> None:
        *inputs, y, eps = given
        y.copy_(sum(inputs) + eps)

    assert torch.equal(host_arms._launching(launch, 0.5, x, weight, bias)(), x + weight + bias + 0.5)
    assert torch.equal(host_arms._launching(launch, 0.5, x, weight)(), x + weight + 0.5)


def test_peers_are_asked_in_turns_and_one_that_dies_costs_the_others_nothing(asked: argparse.Namespace) -> None:
    processes = {name: peers.Peer([sys.executable, "-c", ANSWERS]) for name in ("floor", "tileops", "torch")}
    try:
        results = host_time.measured(processes, "layer_norm", asked)
        dead = host_time.measured(processes, "rms_norm", asked)
    finally:
        for peer in processes.values():
            peer.close()
    assert [len(result.seconds) for result in results.values()] == [3, 3, 3]
    assert host_time.over(results, "tileops", "floor") == pytest.approx(7 / 5)
    assert "1.40 ≤ 1.2 × floor: missed; 1.40 < 1 × torch: missed" in host_time.verdict(results)
    assert {result.problem for result in dead.values()} == {"its process ended: out of memory"}
    report = host_time.report_of([*results.values(), *dead.values()], asked)
    assert json.loads(json.dumps(report))["results"][0] == {
        "op": "layer_norm", "arm": "floor", "seconds": [pytest.approx(5e-6)] * 3, "problem": "", "on": "torch 0",
        "median": pytest.approx(5e-6),
    }  # fmt: skip


def test_a_folder_of_a_peer_comes_first_on_its_import_path(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", "behind")
    code = "import json, os, sys; sys.stdin.readline(); print(json.dumps({'error': os.environ['PYTHONPATH']}))"
    peer = peers.Peer([sys.executable, "-c", code], str(tmp_path))
    try:
        with pytest.raises(peers.PeerError, match=f"^{tmp_path}{os.pathsep}behind$"):
            peer.answer(op="layer_norm")
    finally:
        peer.close()


def test_a_peer_that_ended_before_it_was_asked_says_its_last_words_and_is_closed() -> None:
    peer = peers.Peer([sys.executable, "-c", "import sys; sys.exit('symbol lookup error')"])
    peer._process.wait()
    with pytest.raises(peers.PeerError, match="^its process ended: symbol lookup error$"):
        peer.answer(op="layer_norm")
    peer.close()


def test_a_worker_reads_the_pth_files_of_the_folder_of_a_peer(tmp_path: Path) -> None:
    (tmp_path / "host.pth").write_text("below\n")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "host_peer.py").write_text(FAKE_PEER)
    worker = str(Path(host_worker.__file__))
    peer = peers.Peer([sys.executable, worker, "cpu", "float32", str(tmp_path)], str(tmp_path))
    try:
        assert peer.answer(arm="fake", op="layer_norm", rows=2, n=8, calls=1)["seconds"] > 0
    finally:
        peer.close()


def test_a_peer_is_given_by_name_and_folder(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        host_time.options_of(["--peer", "liger"])
    assert "write NAME=PATH" in capsys.readouterr().err
