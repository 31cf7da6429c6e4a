"""What a backend's import does to the process besides registering. It is reported, in the backend's record."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator
from typing import Final

import torch

_COMPILERS: Final = frozenset({"tilelang", "triton", "tvm"})


@contextlib.contextmanager
def observing() -> Generator[list[str]]:
    """Yield a list that holds, when the block has ended, a line for each change.

    Only what one backend's import changes in practice, is cheap to ask, and other threads leave alone.
    """
    before, variables, changes = _state(), dict(os.environ), list[str]()
    yield changes
    changes += [f"changes {name} from {before[name]} to {now} while it loads" for name, now in _state().items()
                if now != before[name]]  # fmt: skip
    changed = sorted({name for name, _ in os.environ.items() ^ variables.items()})
    if changed:
        changes.append(f"sets variables of the environment while it loads: {', '.join(changed)}")


def _state() -> dict[str, object]:
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "torch's grad mode": torch.is_grad_enabled(),
        "whether CUDA is initialised": torch.cuda.is_initialized(),
        "the compilers that are imported": sorted(_COMPILERS & sys.modules.keys()),
    }
