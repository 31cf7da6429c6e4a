"""How long runs take on a device, beside each other."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor

Run = Callable[[], Any]

ROUNDS: Final = 15
"""Rounds in which each is timed once; the median of them counts."""

FEWEST_ROUNDS: Final = 3
"""Rounds that are timed however long they take."""

BUDGET: Final = 10.0
"""Seconds after which no further round begins."""

SAMPLE: Final = 1e-3
"""Seconds that one timing takes at least: a hundred times what an event or a clock is off by."""

MOST_COPIES: Final = 16
"""Copies of the arguments, which runs take in turn. Large ones are then read from memory; small ones come from a cache,
as they do where the op before has just written them."""

CACHE_BYTES: Final = 64 << 20
"""Bytes that a device's caches hold, where it does not say: more than an H200's 50 MiB, which it does."""


def copied(arguments: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """New tensors of the same values."""
    return tuple(None if tensor is None else tensor.detach().clone() for tensor in arguments)


def copies_beyond_cache(arguments: Sequence[Tensor | None], device: torch.device) -> list[tuple[Tensor | None, ...]]:
    """Copies of the arguments that hold twice what the device's caches do; no more than `MOST_COPIES`."""
    taken = sum(tensor.numel() * tensor.element_size() for tensor in arguments if tensor is not None)
    wanted = math.ceil(2 * _cache_bytes(device) / max(taken, 1))
    return [copied(arguments) for _ in range(min(wanted, MOST_COPIES))]


def _cache_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return CACHE_BYTES
    properties = cast("Any", torch.cuda.get_device_properties(device))
    return getattr(properties, "L2_cache_size", 0) or CACHE_BYTES


class Stopwatch:
    """Times runs on one device, which is current.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def over(self, call: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> Run:
        """A run that calls `call` with each of the `arguments` in turn.

        On CUDA a graph, where the calls can be captured: the time of the host is no part of it then.
        """

        def run() -> None:
            for each in arguments:
                call(*each)

        return run if self._pool is None else self._captured(call, arguments) or run

    def _captured(self, call: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> Run | None:
        """The calls as a graph; None where they cannot be captured. All graphs share memory: none runs beside another."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                results = [call(*each) for each in arguments]  # kept meanwhile: each call writes memory of its own
        except Exception:
            return None
        del results
        return graph.replay

    def ratios(self, runs: Sequence[Run]) -> list[float]:
        """How long each takes, as a multiple of the first: medians of rounds in which they take turns."""
        first = max(self.seconds(runs[0]) for _ in range(2))
        times = min(max(math.ceil(SAMPLE / max(first, 1e-9)), 1), 1 << 10)
        began, rounds = time.perf_counter(), list[list[float]]()
        while len(rounds) < FEWEST_ROUNDS or (len(rounds) < ROUNDS and time.perf_counter() - began < BUDGET):
            rounds.append([self.seconds(run, times) for run in runs])
        return [statistics.median(each[at] / each[0] for each in rounds) for at in range(len(runs))]

    def seconds(self, run: Run, times: int = 1) -> float:
        """How long `times` runs take."""
        if self._device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(times):
                run()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3
        self._finish()
        began = time.perf_counter()
        for _ in range(times):
            run()
        self._finish()
        return time.perf_counter() - began

    @functools.cached_property
    def _finish(self) -> Callable[[], object]:
        """Waits for the device."""
        if self._device.type == "cpu":
            return lambda: None
        return getattr(torch.get_device_module(self._device), "synchronize", lambda: None)
