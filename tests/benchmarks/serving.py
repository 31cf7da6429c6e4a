"""A process's side of `peers.py`: JSON lines in, JSON lines out.

Whatever is asked is answered, a failure with `{"error": "…"}`. Whatever libraries print goes to stderr.
To import this module moves the folder of the scripts behind a peer's on the import path.
"""

from __future__ import annotations

import json
import os
import site
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

if sys.path and Path(sys.path[0]) == Path(__file__).parent:
    sys.path.append(sys.path.pop(0))

Answer = Callable[[dict[str, Any]], dict[str, Any]]
"""From a request to its answer."""


def serve(answer: Answer, lines: Iterable[str]) -> Iterator[str]:
    """The answers to the requests, one a line."""
    for line in lines:
        try:
            answered = answer(json.loads(line))
        except Exception as error:
            answered = {"error": f"{type(error).__name__}: {error}"}
        yield json.dumps(answered)


def serve_stdin(answer: Answer, folders: Sequence[str]) -> None:
    """Answer what stdin asks until it ends.

    Args:
        answer: Answers one request.
        folders: A peer's, of which .pth files are read: Python reads none in a folder of PYTHONPATH.
    """
    for folder in folders:
        site.addsitedir(folder)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in serve(answer, sys.stdin):
        print(line, file=answers, flush=True)


def machine(device: Any) -> str:
    """The torch and the device of this process."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"torch {torch.__version__}, {name}"
