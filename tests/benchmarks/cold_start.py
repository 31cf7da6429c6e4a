"""Budgets of a process that begins: importing, finding backends, and the first call. Each in fresh processes."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from record import Budget, Record
from tileops.backend.discovery import GROUP, installed_backends
from tileops_backend_example.tilelang_row import toolchain_missing
from timing import Arm, interleaved, ratio_of, repeated

IMPORT = Budget(
    "import",
    "Importing tileops, tileops.ops and tileops.backend where torch is imported, over importing torch",
    most=0.02,
    noise=0.3,
    usual=0.0075,
)
NO_COMPILER = Budget("no compiler", "Compilers that those imports import", most=0, unit="modules")
SCAN = Budget(
    "scan",
    "Finding the backends among 100 installed distributions, over importlib.metadata.entry_points(group=…)",
    most=2.0,
    noise=0.3,
    usual=0.65,
)
FIRST_CALL = Budget(
    "first call",
    "The first call of a process that finds its kernel in TileLang's disk cache, over loading that kernel alone",
    most=3.0,
    noise=0.25,
    usual=2.3,
)

PROCESSES = 6
"""Fresh processes of each kind."""

# Processor time: an import or a first call is work of one thread, and a process that waits its turn does none.
TORCH = """
import time
begin = time.process_time()
import torch
print(time.process_time() - begin)
"""
OURS = """
import time, torch
begin = time.process_time()
import tileops, tileops.ops, tileops.backend
print(time.process_time() - begin)
"""
COMPILERS = """
import sys, tileops, tileops.ops, tileops.backend
print(*(name for name in ("tilelang", "tvm") if name in sys.modules))
"""
FIRST = """
import time, torch, tilelang, tileops.norm
x, weight, bias = torch.randn(8, 256), torch.ones(256), torch.zeros(256)
op = tileops.norm.LayerNormFwdOp(256)
begin = time.process_time()
op(x, weight, bias)
print(time.process_time() - begin)
assert op.explain(x, weight, bias).key == "example:row"
"""
BARE = """
import time, torch, tilelang, tileops.norm
from tileops_backend_example.tilelang_row import LANES
from tileops_backend_example.tilelang_row_program import compile_row_norm
begin = time.process_time()
compile_row_norm(256, 1e-5, True, True, LANES[0])
print(time.process_time() - begin)
"""


def printed(code: str, **environment: str) -> str:
    """What a fresh process prints last. As in an installation, modules are compiled to bytecode once."""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", **environment}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"a measured process failed:\n{run.stderr}")
    return run.stdout.strip().rpartition("\n")[2]


def process(code: str, **environment: str) -> Arm:
    """An arm that runs `code` in a fresh process, which prints the seconds."""
    return lambda: float(printed(code, **environment))


def imports() -> list[Record]:
    """Time both imports in processes of their own, and look for compilers."""
    taken = interleaved({"tileops": process(OURS), "torch": process(TORCH)}, PROCESSES)
    found = printed(COMPILERS).split()
    return [
        IMPORT.of_ratio(ratio_of(taken, "tileops", "torch")),
        NO_COMPILER.measured(len(found), detail=", ".join(found) or "neither tilelang nor tvm"),
    ]


def first_call() -> list[Record]:
    """Fill a disk cache, then make the first call of fresh processes, and load the kernel alone in others."""
    missing = toolchain_missing()
    if missing is None and not _is_installed("tileops-backend-example"):
        missing = "tileops-backend-example is not installed"
    if missing is not None:
        return [FIRST_CALL.skipped(missing)]
    with tempfile.TemporaryDirectory() as cache:
        environment = {"TILELANG_CACHE_DIR": cache, "TILEOPS_BACKENDS": "example"}
        arms = {"first call": process(FIRST, **environment), "bare load": process(BARE, **environment)}
        return [FIRST_CALL.of_ratio(ratio_of(interleaved(arms, PROCESSES), "first call", "bare load"))]


def _is_installed(distribution: str) -> bool:
    return any(importlib.metadata.distributions(name=distribution))


def scan() -> list[Record]:
    """Time both ways to read 100 distributions of one folder, file caches warm and Python's own dropped."""
    with tempfile.TemporaryDirectory() as folder:
        _install_fakes(Path(folder))
        names = {
            "ours": installed_backends,
            "theirs": lambda: importlib.metadata.entry_points(group=GROUP),
            "forget": _forget,
        }
        arms = {
            "scan": repeated("ours()", names, setup="forget()", number=1),
            "entry_points": repeated("theirs()", names, setup="forget()", number=1),
        }
        with _only_path(folder):
            found = len(installed_backends())
            assert found == BACKENDS, f"{found} backends found"
            return [SCAN.of_ratio(ratio_of(interleaved(arms, 40), "scan", "entry_points"))]


DISTRIBUTIONS, BACKENDS = 100, 4


def _install_fakes(folder: Path) -> None:
    """Metadata of 100 distributions as an environment has them: half with scripts, a few backends among them."""
    for number in range(DISTRIBUTIONS):
        is_backend = number < BACKENDS
        name = f"tileops_backend_fake{number}" if is_backend else f"distribution{number}"
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n\n{'A sentence. ' * 400}")
        if is_backend:
            (info / "entry_points.txt").write_text(f"[{GROUP}]\nfake{number} = {name}\n")
        elif number % 2:
            (info / "entry_points.txt").write_text(f"[console_scripts]\n{name} = {name}:main\n")


@contextlib.contextmanager
def _only_path(folder: str) -> Iterator[None]:
    """Nothing but `folder` on the import path; what the measured functions import is imported before."""
    installed_backends()
    list(importlib.metadata.entry_points(group=GROUP))
    with mock.patch.object(sys, "path", [folder]):
        yield


def _forget() -> None:
    """Drop what is remembered of folders: a process scans once."""
    importlib.metadata.MetadataPathFinder().invalidate_caches()  # no class method before Python 3.12
