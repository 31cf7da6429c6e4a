"""What a process shares between everybody in it, as values that can be compared."""

from __future__ import annotations

import locale
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import torch

State = dict[str, Any]


class _Large(NamedTuple):
    """A state that no reader wants to see whole."""

    value: object


_READERS: Final[dict[str, Callable[[], Any]]] = {
    "torch's default dtype": torch.get_default_dtype,
    "torch's default device": torch.get_default_device,
    "torch's number of threads": torch.get_num_threads,
    "torch's number of threads between ops": torch.get_num_interop_threads,
    "torch's grad mode": torch.is_grad_enabled,
    "torch's inference mode": torch.is_inference_mode_enabled,
    "torch's choice of deterministic algorithms": torch.get_deterministic_debug_mode,
    "torch's precision of float32 matrix products": torch.get_float32_matmul_precision,
    "torch's random state": lambda: _Large(torch.get_rng_state().tolist()),
    "torch's current CUDA device": lambda: torch.cuda.current_device() if torch.cuda.is_initialized() else 0,
    "cuDNN's choice of algorithms": lambda: (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
    "Python's random state": lambda: _Large(random.getstate()),
    "the filters of warnings": lambda: list(warnings.filters),
    "sys.path": lambda: list(sys.path),
    "sys.excepthook": lambda: sys.excepthook,
    "sys.stdout": lambda: sys.stdout,
    "sys.stderr": lambda: sys.stderr,
    "the recursion limit": sys.getrecursionlimit,
    "the switch interval of threads": sys.getswitchinterval,
    "threading.excepthook": lambda: threading.excepthook,
    "os.environ": lambda: dict(os.environ),
    "the working directory": os.getcwd,
    "the locale": lambda: locale.setlocale(locale.LC_ALL),
    "the root logger": lambda: [logging.root.level, *logging.root.handlers],
    "logging.disable": lambda: logging.root.manager.disable,
    "the handler of SIGINT": lambda: signal.getsignal(signal.SIGINT),
}


def read_state() -> State:
    """The global state of the process now."""
    return {name: read() for name, read in _READERS.items()}


def changes(before: State, after: State) -> str:
    """What differs, as a clause: `os.environ: OMP_NUM_THREADS '2' became '1'`; empty where nothing does."""
    return "; ".join(f"{name}: {_difference(before[name], after[name])}" for name in _differing(before, after))


def _differing(before: State, after: State) -> Iterator[str]:
    return (name for name, value in before.items() if value != after[name])


def _difference(old: object, new: object) -> str:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return _of_mappings(cast("Mapping[str, object]", old), cast("Mapping[str, object]", new))
    if isinstance(old, list) and isinstance(new, list):
        return _of_lists(cast("list[object]", old), cast("list[object]", new))
    if isinstance(old, _Large):
        return "it is another one"
    return f"{old!r} became {new!r}"


def _of_mappings(old: Mapping[str, object], new: Mapping[str, object]) -> str:
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return ", ".join(f"{name} {old.get(name)!r} became {new.get(name)!r}" for name in names)


def _of_lists(old: Sequence[object], new: Sequence[object]) -> str:
    parts = [f"{value!r} was added" for value in new if value not in old]
    parts += [f"{value!r} was taken out" for value in old if value not in new]
    return ", ".join(parts) or "the order changed"
