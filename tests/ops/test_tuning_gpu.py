"""Tuning on a GPU: the winner gives the default's results, and a second process begins with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tileops
import torch
from tileops import LayerNormFwdOp, RMSNormFwdOp
from tileops.ops import timing, tuning_records
from tileops.ops.signature import asked_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("backends"),
]

IN_ANOTHER_PROCESS = """
import torch
from tileops import LayerNormFwdOp

x = torch.randn(4, 4096, device="cuda", dtype=torch.bfloat16)
LayerNormFwdOp((4096,))(x)
(entry,) = LayerNormFwdOp._entries.values()
print(dict(entry.configuration))
"""


def entry_of(op: Any, *tensors: Any) -> Any:
    return op.kernel_for(*asked_for(op, tensors))


@pytest.mark.parametrize("op", [LayerNormFwdOp((4096,)), RMSNormFwdOp((4096,)), RMSNormFwdOp((128,))], ids=repr)
def test_every_configuration_is_right_and_the_winner_is_what_calls_get(
    op: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tuning_records.CACHE_VARIABLE, str(tmp_path))
    tileops.clear()
    x = torch.randn(1 << 22, device="cuda").view(-1, *op.normalized_shape).bfloat16()
    default = op(x)
    tuned = op.tune(x)
    (kernel,) = tuned.kernels
    assert all(trial.reason is None for trial in kernel.trials), str(tuned)
    assert dict(entry_of(op, x).configuration) == dict(kernel.winner)
    torch.testing.assert_close(op(x), default, rtol=1.6e-2, atol=1.6e-2)
    tileops.clear()
    assert dict(entry_of(op, x).configuration) == dict(kernel.winner)


def test_a_second_process_builds_what_the_first_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning_records.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(timing.Stopwatch, "ratios", lambda self, runs: [1.0, *[0.5] * (len(runs) - 1)])
    x = torch.randn(4, 4096, device="cuda", dtype=torch.bfloat16)
    (kernel,) = LayerNormFwdOp((4096,)).tune(x).kernels
    assert kernel.taken == 1
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-2] == str(dict(kernel.winner))


def test_a_tuned_call_is_captured_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning_records.CACHE_VARIABLE, str(tmp_path))
    op, x = LayerNormFwdOp((4096,)), torch.randn(8, 4096, device="cuda", dtype=torch.bfloat16)
    op.tune(x)
    expected, graph = op(x), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(x)
    graph.replay()
    assert torch.equal(y, expected)


def test_nothing_is_tuned_while_a_graph_is_captured() -> None:
    op, x = LayerNormFwdOp((4096,)), torch.randn(8, 4096, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add(1)  # torch warns of a graph without a node
        with pytest.raises(tileops.CaptureError, match="tune before the capture"):
            op.tune(x)
