"""One process that host_time.py times: JSON lines in, JSON lines out.

It is started as `host_worker.py DEVICE DTYPE [FOLDER]`, FOLDER being a peer's, and answers each line

    {"arm": "liger", "op": "layer_norm", "rows": 8, "n": 4096, "calls": 2000}

with `{"seconds": …, "on": "torch …"}`, the host time of all calls, or with `{"error": "…"}`. The first request for
an op and a shape makes the call, compares its result with torch's and warms it up, untimed. Whatever libraries
print goes to stderr.
"""

from __future__ import annotations

import json
import os
import site
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

if sys.path and Path(sys.path[0]) == Path(__file__).parent:
    sys.path.append(sys.path.pop(0))  # a peer's folder comes first

import torch
from host_arms import Call, arm
from timing import without_gc

BATCH = 250
"""Calls between two synchronisations: a launch queue holds about a thousand, and a full one makes calls wait."""

WARM_UP = 50


class Worker:
    """Makes and times the calls that requests name."""

    def __init__(self, device: str, dtype: str) -> None:
        self.device = torch.device(device)
        self.dtype = getattr(torch, dtype)
        self._calls: dict[tuple[str, str, int, int], Call] = {}
        self._synchronise: Callable[[], Any] = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request; a failure is an answer too."""
        try:
            with torch.no_grad():
                call = self._call(request["arm"], request["op"], request["rows"], request["n"])
                return {"seconds": self._time(call, request["calls"]), "on": self._machine()}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _machine(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        return f"torch {torch.__version__}, {name}"

    def _call(self, *key: Any) -> Call:
        if key not in self._calls:
            call = self._make(*key)
            for _ in range(WARM_UP):
                call()
            self._calls[key] = call
        return self._calls[key]

    def _make(self, name: str, op: str, rows: int, n: int) -> Call:
        """The call, once its result agrees with torch's."""
        like = {"device": self.device, "dtype": self.dtype}
        x = torch.randn(rows, n, **like)
        weight, bias = (torch.nn.Parameter(torch.randn(n, **like)) for _ in range(2))
        call = arm(name, op)(x, weight, bias)
        expected = arm("torch", op)(x, weight, bias)()
        torch.testing.assert_close(call(), expected, rtol=2e-2, atol=2e-2)
        return call

    def _time(self, call: Call, calls: int) -> float:
        """The host's time for `calls` calls, without what the device does after the last of a batch."""
        seconds = 0.0
        with without_gc():
            for first in range(0, calls, BATCH):
                batch = range(min(BATCH, calls - first))
                self._synchronise()
                begin = time.perf_counter()
                for _ in batch:
                    call()
                seconds += time.perf_counter() - begin
            self._synchronise()
        return seconds


def serve(worker: Worker, lines: Iterable[str]) -> Iterator[str]:
    """The answers to the requests, one a line."""
    for line in lines:
        yield json.dumps(worker.answer(json.loads(line)))


def main() -> None:
    """Answer what stdin asks until it ends."""
    device, dtype, *folders = sys.argv[1:]
    for folder in folders:
        site.addsitedir(folder)  # for its .pth files: Python reads none in a folder of PYTHONPATH
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for answer in serve(Worker(device, dtype), sys.stdin):
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main()
