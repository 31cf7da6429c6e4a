"""One process that norms.py times: its requests say what to do with one arm of one case.

It is started as `device_worker.py DEVICE [FOLDER]`, FOLDER being a peer's; `serving.py` says how it answers.

| do | answer |
|---|---|
| build | after our kernels for all `cases` are compiled, several at a time |
| prepare | after one call, which compiles and is compared with torch: the `kernel` that ran, and `on` what |
| capture | after calls over rotating tensors are a CUDA graph |
| replay | `seconds`, the device's for one call |
| drop | after all of a case is freed |
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import norm_arms
import serving
import torch
from norm_arms import Call, Tensors
from norm_cases import Bar, Case
from peers import OURS
from torch import Tensor

COPY = "copy"
ROTATED = 1.25
"""Inputs and outputs of all calls together, over the cache of the device."""

LEAST_SECONDS = 1.5e-3
"""What a graph takes, at least: a thousand times what a clock of the device resolves."""

MOST_ERROR = 2e-2
"""The distance from torch's result, as a share of its length: some steps of bfloat16, in every element."""

KEPT = 3 << 30
"""Bytes that a process keeps from one case to the next: to give them back takes longer than many a case."""

COMPILERS = 16
"""Kernels of ours that are compiled at once."""

BYTES_A_SECOND, LAUNCH_SECONDS = 4e12, 2e-6
"""About what a board does: they decide how often a graph repeats its calls, and no result."""

Replay = Callable[[], float]
"""Runs captured calls and returns the seconds of one."""


class Worker:
    """Prepares, captures and times calls."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._replays: dict[str, Replay] = {}
        self._drawn: tuple[Case, list[Tensors]] | None = None
        self._stream = torch.cuda.Stream() if self.device.type == "cuda" else None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request. A device that a failure left unusable ends the process."""
        try:
            return getattr(self, f"_{request.pop('do')}")(**request)
        except Exception as error:
            self._leave_if_broken(error)
            raise

    def _leave_if_broken(self, error: Exception) -> None:
        try:
            if self._stream is not None:
                torch.cuda.synchronize()
        except RuntimeError:
            first, _, _ = str(error).partition("\n")
            sys.exit(f"{type(error).__name__}: {first}")

    def _build(self, cases: list[dict[str, Any]]) -> dict[str, Any]:
        with ThreadPoolExecutor(COMPILERS) as pool:
            list(pool.map(self._compile, map(case_of, cases)))
        return {}

    def _compile(self, case: Case) -> None:
        try:
            op, arguments = norm_arms.ours(case.op, self._draw(case, 1)[0])
            op.prepare(*arguments)
        except Exception:
            return  # the request that prepares the case meets it too, and says so

    def _prepare(self, arm: str, case: dict[str, Any]) -> dict[str, Any]:
        kernel = "" if arm == COPY else self._checked(arm, case_of(case))
        self._give_back()
        return {"kernel": kernel, "on": serving.machine(self.device)}

    def _checked(self, arm: str, case: Case) -> str:
        """Make one call and compare its result with torch's; the implementation that ran, where it is ours."""
        (tensors,) = self._draw(case, 1)
        with torch.no_grad():
            call = norm_arms.arm(arm)(case.op, tensors)
            check(call(), norm_arms.torch_arm(case.op, tensors)())
        return kernel_of(case.op, tensors) if arm == OURS else ""

    def _capture(self, arm: str, case: dict[str, Any]) -> dict[str, Any]:
        wanted = case_of(case)
        sets = self._sets(wanted)
        repeats = math.ceil(LEAST_SECONDS / sets / (wanted.moved / BYTES_A_SECOND + LAUNCH_SECONDS))
        if self._stream is None:
            self._replays[arm] = on_host(list(self._calls(arm, wanted, sets)))
            return {}
        with torch.no_grad(), torch.cuda.stream(self._stream):
            self._replays[arm] = captured(list(self._calls(arm, wanted, sets)), repeats)
        return {}

    def _sets(self, case: Case) -> int:
        """How many calls have tensors of their own: more than the cache of the device holds, two at least."""
        if self._stream is None:
            return 2
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        return max(2, math.ceil(ROTATED * cache / case.moved))

    def _calls(self, arm: str, case: Case, sets: int) -> Iterator[Call]:
        if arm == COPY:
            words = torch.zeros(sets, case.moved // 2 // 4, dtype=torch.int32, device=self.device)
            return (one.clone for one in words)
        if self._drawn is None or self._drawn[0] != case:
            self._drawn = case, self._draw(case, sets)
        return (norm_arms.arm(arm)(case.op, tensors) for tensors in self._drawn[1])

    def _draw(self, case: Case, sets: int) -> list[Tensors]:
        """Tensors for so many calls. Those of x's size lie side by side, call after call."""
        dtype = getattr(torch, case.dtype)
        kept = torch.float32 if case.op.startswith("batch_norm") else dtype
        large = {name: self._side_by_side(case, sets, dtype) for name in case.large}
        weight, bias = (torch.randn(case.channels, device=self.device, dtype=kept) for _ in range(2))
        mean, variance = torch.zeros(case.channels, device=self.device), torch.ones(case.channels, device=self.device)
        return [
            Tensors(weight=weight, bias=bias, mean=mean, variance=variance, **dict(zip(large, those_of_one_call)))
            for those_of_one_call in zip(*large.values())
        ]

    def _side_by_side(self, case: Case, sets: int, dtype: torch.dtype) -> Iterator[Tensor]:
        channels, *spatial = case.shape[1:]
        shape = (case.shape[0], *spatial, channels) if case.channels_last else case.shape
        values = torch.randn(sets, *shape, device=self.device, dtype=dtype)
        return iter(values.movedim(-1, 2) if case.channels_last else values)

    def _replay(self, arm: str) -> dict[str, Any]:
        return {"seconds": self._replays[arm]()}

    def _drop(self) -> dict[str, Any]:
        self._replays.clear()
        self._drawn = None
        self._give_back()
        return {}

    def _give_back(self) -> None:
        if self._stream is not None and torch.cuda.memory_reserved() > KEPT:
            torch.cuda.empty_cache()


def case_of(fields: dict[str, Any]) -> Case:
    """The case that a request names."""
    return Case(**{**fields, "shape": tuple(fields["shape"]), "bar": Bar(**fields["bar"])})


def kernel_of(op: str, tensors: Tensors) -> str:
    """The implementation of ours that serves the call."""
    of_ours, arguments = norm_arms.ours(op, tensors)
    return of_ours.explain(*arguments).key


def check(results: Any, expected: Any) -> None:
    """Raise where a result is not torch's."""
    for one, right in zip(tensors_in(results), tensors_in(expected)):
        distance = (one.double() - right.double()).norm() / right.double().norm()
        if not distance < MOST_ERROR:
            raise ValueError(f"its result is {distance:.2g} of its length away from torch's")


def tensors_in(results: Any) -> list[Tensor]:
    """The tensors of a result, in order."""
    return [one for one in (results if isinstance(results, tuple) else (results,)) if one is not None]


def on_host(calls: list[Call]) -> Replay:
    """Times calls by the clock of the host."""

    def replay() -> float:
        begin = time.perf_counter()
        with torch.no_grad():
            for call in calls:
                call()
        return (time.perf_counter() - begin) / len(calls)

    return replay


def captured(calls: list[Call], repeats: int) -> Replay:
    """Captures calls on the current stream, `repeats` times over; times them by the clock of the device.

    The results of all calls are there at once: so they rotate too, and none is written while it is in the cache.
    """
    for call in calls[:2]:
        call()
    torch.cuda.current_stream().synchronize()
    graph, results = torch.cuda.CUDAGraph(), list[Any]([None] * len(calls))
    graph.capture_begin()
    for _ in range(repeats):
        for at, call in enumerate(calls):
            results[at] = call()
    graph.capture_end()

    def replay() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # another process had the device
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / (len(calls) * repeats)

    return replay


def main() -> None:
    """Answer what stdin asks until it ends."""
    device, *folders = sys.argv[1:]
    serving.serve_stdin(Worker(device).answer, folders)


if __name__ == "__main__":
    main()
