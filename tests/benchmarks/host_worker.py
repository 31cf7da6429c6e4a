"""One process that host_time.py times: JSON lines in, JSON lines out.

It is started as `host_worker.py DEVICE DTYPE [FOLDER]`, FOLDER being a peer's, and answers each line

    {"arm": "liger", "op": "layer_norm", "rows": 8, "n": 4096, "calls": 2000}

with `{"seconds": …, "on": "torch …"}`, the host time of all calls. The first request for an op and a shape makes
the call, compares its result with torch's and warms it up, untimed. `serving.py` says the rest.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import serving
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
        """The answer to one request."""
        with torch.no_grad():
            call = self._call(request["calls"], request["arm"], request["op"], request["rows"], request["n"])
            return {"seconds": self._time(call, request["calls"]), "on": serving.machine(self.device)}

    def _call(self, calls: int, *key: Any) -> Call:
        if key not in self._calls:
            call = self._make(*key)
            for _ in range(min(WARM_UP, calls)):
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


def main() -> None:
    """Answer what stdin asks until it ends."""
    device, dtype, *folders = sys.argv[1:]
    serving.serve_stdin(Worker(device, dtype).answer, folders)


if __name__ == "__main__":
    main()
