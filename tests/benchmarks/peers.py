"""Processes that answer requests, one for each peer: its libraries, and its faults, are its own.

`serving.py` is the other side. host_time.py and norms.py time what these processes run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OURS, TORCH, COMPILE = "tileops", "torch", "compile"
TITLES = {TORCH: "torch eager", COMPILE: "torch.compile"}


class PeerError(Exception):
    """A peer that cannot be timed."""


class Peer:
    """A process that answers requests; what became of it where it does not.

    Args:
        command: What is run; `serving.py` says how it answers.
        folder: Put first on its import path.
        environment: What its environment has besides.
    """

    def __init__(
        self, command: Sequence[str], folder: str | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self._command = command
        self._environment = {**os.environ, **(environment or {})}
        if folder is not None:
            behind = self._environment.get("PYTHONPATH")
            self._environment["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, behind)))
        self._start()

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed with the peer
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=self._log, env=self._environment, encoding="utf-8"
        )

    def answer(self, **request: Any) -> dict[str, Any]:
        """What it answers.

        Raises:
            PeerError: It could not do what was asked, or its process ended; the next request starts another.
        """
        if self._log.closed:
            self._start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            words = self._last_words()
            self.close()
            raise PeerError(f"its process ended: {words}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"].partition("\n")[0])
        return answer

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        return (self._log.read().strip() or "without a word").rpartition("\n")[2]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # a request that an ended process has not read
                    stream.close()


def parser_of(description: str, own: Sequence[str]) -> argparse.ArgumentParser:
    """The options of every program that asks peers.

    Args:
        description: What the program does.
        own: The arms that need no folder.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the program out")
    parser.add_argument("--peer", action="append", default=[], type=_peer, metavar="NAME=PATH", help="a peer's folder")
    without = f"leave out, of: {', '.join(own)}"
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help=without)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def _peer(given: str) -> tuple[str, str]:
    name, _, folder = given.partition("=")
    if not folder:
        raise argparse.ArgumentTypeError(f"{given}: write NAME=PATH")
    return name, folder
