"""Processes that run functions together, as torchrun's do, and stay for the next test."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

SECONDS = 300
"""How long a test may take on a busy machine. A process that failed leaves the others waiting for it."""


class RankError(AssertionError):
    """What went wrong on a process, with its traceback."""


class Ranks:
    """Some processes of one group, each with its number.

    Args:
        world: How many.
        backend: `gloo` on CPUs or `nccl`, which gives each process a GPU.
    """

    def __init__(self, world: int, backend: str) -> None:
        self.world = world
        self.backend = backend
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function of `on_ranks` on every process; what each returns."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((name, args, kwargs))
        answers: list[Any] = []
        for connection in self._connections:
            answered = connection.poll(1 if any(failed for failed, _ in answers) else SECONDS)
            answers.append(connection.recv() if answered else ("no answer", None))
        failures = [f"rank {rank}: {failed}" for rank, (failed, _) in enumerate(answers) if failed]
        if failures:
            self.stop()  # they may wait for each other for ever
            raise RankError("\n".join(failures))
        return [result for _, result in answers]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = tempfile.mktemp(prefix="tileops-ranks-")  # noqa: S306 - torch makes the file, and minds who was first
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, self.world, self.backend, store), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections = [], []


def serve(connection: Connection, rank: int, world: int, backend: str, store: str) -> None:
    """Answer one request after another."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"  # they need no network
    import on_ranks
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    with contextlib.suppress(EOFError):
        for name, args, kwargs in _requests(connection):
            try:
                connection.send((None, getattr(on_ranks, name)(*args, **kwargs)))
            except BaseException:
                connection.send((traceback.format_exc(), None))


def _requests(connection: Connection) -> Iterator[Any]:
    while True:
        yield connection.recv()
