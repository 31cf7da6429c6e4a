"""A layer norm on CPU, written in TileLang: float32 rows of any length.

It shows what a kernel of a backend looks like: a class that says which calls it serves, and a program that is
compiled when the first such call arrives. `tilelang_row_program.py` holds the program.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Final, final

import torch
from tileops.kernels.layer_norm import LayerNorm, LayerNormCall
from torch import Tensor

__all__ = ["TileLangRowLayerNorm", "toolchain_missing"]

ELEMENT_BYTES: Final = 4

ELEMENTS_PER_THREAD: Final = 1 << 20
"""The fewest elements worth another thread: a third of a millisecond, where waking one may take a tenth."""

PARTS_PER_THREAD: Final = 4

LANES: Final = (64, 32, 128)
"""Partial sums of a row. Sixty-four are eight AVX2 or four AVX-512 vectors, enough to hide the latency of an addition;
which number is best depends on the CPU, so the others are there for whoever tunes."""


@final
class TileLangRowLayerNorm(LayerNorm):
    """One compiled program for each length of a row; rows are shared out among torch's number of threads.

    Each row is computed by one thread, so that results do not depend on how many there are.
    """

    devices = frozenset({"cpu"})

    @classmethod
    def refusal(cls, call: LayerNormCall) -> str | None:
        """float32 throughout: TileLang's C has no bfloat16, and computes float16 without vectors."""
        if call.dtype is not torch.float32:
            return f"x is {_shown(call.dtype)}; serves float32"
        for name, dtype in (("weight", call.weight_dtype), ("bias", call.bias_dtype)):
            if dtype not in (None, torch.float32):
                return f"{name} is {_shown(dtype)}; serves float32 or none"
        if call.n >= 1 << 31:
            return f"row of {call.n} elements; serves fewer than 2**31"
        return None

    @classmethod
    def entry_for(cls, call: LayerNormCall) -> tuple[Hashable, Callable[[], TileLangRowLayerNorm]]:
        """What is compiled in, and nothing else: calls with other batch sizes share one kernel."""
        return (call.n, call.eps, call.weight_dtype, call.bias_dtype), lambda: cls(call)

    @classmethod
    def configurations(cls, call: LayerNormCall) -> tuple[dict[str, int], ...]:
        """Programs of equal results up to rounding."""
        return tuple({"lanes": lanes} for lanes in LANES)

    def __init__(self, call: LayerNormCall | None = None) -> None:
        if call is None:
            raise TypeError("TileLangRowLayerNorm is compiled for one length of row; give it a call")
        super().__init__(call)
        # Imported here: TileLang takes seconds to import, and only a program that needs this kernel pays.
        from tileops_backend_example.tilelang_row_program import compile_row_norm

        self._n = call.n
        has_weight, has_bias = call.weight_dtype is not None, call.bias_dtype is not None
        self._launch = compile_row_norm(call.n, call.eps, has_weight, has_bias, **self.configuration)

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """See `LayerNorm.forward`."""
        y = torch.empty_like(x)
        elements = x.numel()
        rows = elements // self._n
        # Small calls never ask for the number of threads: their budget is a microsecond.
        useful = min(elements // ELEMENTS_PER_THREAD, rows)
        threads = 1 if useful < 2 else min(useful, torch.get_num_threads())
        if threads == 1:
            self._run_rows(x, weight, bias, y, 0, rows)
        else:
            self._share_rows(x, weight, bias, y, threads)
        return y

    def _share_rows(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor, threads: int) -> None:
        """Run all rows, in parts that this thread and `threads - 1` of the pool take as they get to it.

        With parts dealt out beforehand, one thread that wakes up late would keep all the others waiting.
        """
        rows = x.numel() // self._n
        part = -(-rows // (threads * PARTS_PER_THREAD))
        waiting = deque(range(0, rows, part))

        def work() -> None:
            while waiting:
                try:
                    first = waiting.popleft()
                except IndexError:  # Another thread took the last one.
                    return
                self._run_rows(x, weight, bias, y, first, min(part, rows - first))

        helpers = [_pool().submit(work) for _ in range(threads - 1)]
        work()
        for helper in helpers:
            # One that has not started by now has nothing to do.
            if not helper.cancel():
                helper.result()

    def _run_rows(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor, first: int, count: int
    ) -> None:
        """Run `count` rows from `first` on.

        It takes tensors rather than addresses: a thread of the pool then keeps their memory alive, also when
        an interrupt has made the caller leave.
        """
        offset = first * self._n * ELEMENT_BYTES
        self._launch(
            x.data_ptr() + offset,
            None if weight is None else weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr() + offset,
            count,
        )


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """The threads that all kernels of this module share. They start as they are needed, and never wait."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="tileops-example")


if hasattr(os, "register_at_fork"):
    # Threads do not survive a fork: the child makes its own pool.
    os.register_at_fork(after_in_child=_pool.cache_clear)


def _shown(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def toolchain_missing() -> str | None:
    """Why the program cannot be compiled here, as a clause; None where it can. Imports nothing."""
    if os.name != "posix":
        return "its flags are for g++ and clang++ on a POSIX system"
    if find_spec("tilelang") is None:
        return "tilelang is not installed"
    # Where TileLang looks, in its order.
    chosen = os.environ.get("CXX") or os.environ.get("CC")
    if chosen and shutil.which(chosen) is None:
        return f"the C++ compiler that CXX or CC names, {chosen!r}, is not on PATH"
    if not chosen and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        return "no C++ compiler: none of g++, clang++, c++ is on PATH, and CXX is not set"
    return None
