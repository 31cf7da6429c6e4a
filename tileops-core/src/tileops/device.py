"""What the library knows about a device, and who reads it.

A miss asks for the facts of the call's device; a hit never does. Facts are values: selection can be asked
about a device that is not there (`known_board("h200")`), so what an H200 would run is tested on a laptop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import platform
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import torch

NO_ARCH: Final = -1
"""The architecture of a device that has none: no set and no range of architectures contains it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """The facts of one device that selection and building may use.

    Args:
        arch: Architecture number; on CUDA major * 10 + minor of the compute capability, −1 where the
            device type has no such number.
        sm_count: Streaming multiprocessors; 0 where the device has none.
        smem_budget: Bytes of shared memory that one block may opt in to; 0 where there is none.
        calibration: The calibrated board the device belongs to (a key of the known boards), or None.
    """

    arch: int = NO_ARCH
    sm_count: int = 0
    smem_budget: int = 0
    calibration: str | None = None


@dataclasses.dataclass(frozen=True)
class Board:
    """A board whose facts are known without having it.

    Args:
        name: What `--device` and `call.on` accept.
        marker: The part of the driver's device name, in lower case, that every variant of the board shares.
        facts: Its facts; `calibration` is the board's name.
        source: Where the numbers come from.
    """

    name: str
    marker: str
    facts: DeviceFacts
    source: str


def _board(name: str, arch: int, sm_count: int, smem_kib: int, source: str, *, marker: str | None = None) -> Board:
    facts = DeviceFacts(arch=arch, sm_count=sm_count, smem_budget=smem_kib * 1024, calibration=name)
    return Board(name, name if marker is None else marker, facts, source)


# Shared memory per block, opt-in: CUDA C++ Programming Guide, table "Technical Specifications per Compute
# Capability" (8.0: 163 KiB, 8.6 and 8.9: 99, 9.0 and 10.0: 227, 12.0: 99). SM counts: the white paper named.
KNOWN_BOARDS: Final[dict[str, Board]] = {
    board.name: board
    for board in (
        _board("a100", 80, 108, 163, "NVIDIA A100 Tensor Core GPU Architecture white paper"),
        _board("rtx3090", 86, 82, 99, "NVIDIA Ampere GA102 white paper", marker="rtx 3090"),
        _board("l40s", 89, 142, 99, "NVIDIA L40S data sheet"),
        _board("rtx4090", 89, 128, 99, "NVIDIA Ada GPU Architecture white paper", marker="rtx 4090"),
        _board("h100", 90, 132, 227, "NVIDIA H100 Tensor Core GPU Architecture white paper, SXM5"),
        _board("h200", 90, 132, 227, "NVIDIA H200 data sheet; read on the device"),
        _board("b200", 100, 148, 227, "NVIDIA Blackwell Architecture technical brief"),
        _board("rtx5090", 120, 170, 99, "NVIDIA RTX Blackwell GPU Architecture white paper", marker="rtx 5090"),
    )
}


class UnknownBoardError(LookupError):
    """A board that is not among the known ones. Its text lists those."""


def known_board(name: str) -> Board:
    """The board called `name`; raises an `UnknownBoardError` that lists the known ones."""
    board = KNOWN_BOARDS.get(name.lower())
    if board is None:
        raise UnknownBoardError(f"no known board is called {name!r}; known: {', '.join(KNOWN_BOARDS)}")
    return board


def _calibration_of(device_name: str, sm_count: int, arch: int) -> str | None:
    """The known board of a device: the driver's name holds its marker and the counts agree."""
    lowered = device_name.lower()
    for board in KNOWN_BOARDS.values():
        if board.marker in lowered and (board.facts.sm_count, board.facts.arch) == (sm_count, arch):
            return board.name
    return None


def _read_cuda(device: torch.device) -> DeviceFacts:
    properties = cast("Any", torch.cuda.get_device_properties(device))
    if torch.version.hip is not None:
        # On a ROCm build major.minor numbers AMD's architectures; no CUDA set may contain them.
        return DeviceFacts(sm_count=properties.multi_processor_count)
    arch = properties.major * 10 + properties.minor
    sm_count = properties.multi_processor_count
    return DeviceFacts(
        arch=arch,
        sm_count=sm_count,
        smem_budget=properties.shared_memory_per_block_optin,
        calibration=_calibration_of(properties.name, sm_count, arch),
    )


def _read_cpu(device: torch.device) -> DeviceFacts:
    del device
    return DeviceFacts()


FactsReader = Callable[[torch.device], DeviceFacts]
_IN_TREE_READERS: Final[dict[str, tuple[FactsReader, str]]] = {
    "cuda": (_read_cuda, "tileops-core"),
    "cpu": (_read_cpu, "tileops-core"),
}
_readers: dict[str, tuple[FactsReader, str]] = dict(_IN_TREE_READERS)


def set_facts_readers(readers: dict[str, tuple[FactsReader, str]]) -> None:
    """Make `readers` serve beside ours: by device type, the reader and who ships it.

    Called with what backends registered, whenever that changes.
    """
    _readers.clear()
    _readers.update({**readers, **_IN_TREE_READERS})
    device_facts.cache_clear()


@functools.lru_cache(maxsize=64)
def device_facts(device: torch.device) -> DeviceFacts:
    """The facts of `device`, from the reader of its type; the empty facts where nobody reads them.

    A reader that raises, or answers with something else than `DeviceFacts`, warns once and counts as none:
    implementations that need an architecture are then unavailable, the others serve.
    """
    reader, shipped = _readers.get(device.type, (None, ""))
    if reader is None:
        return DeviceFacts()
    try:
        facts = _checked(reader(device))
    except Exception as error:
        name = f"{reader.__module__}.{reader.__qualname__}, {shipped}"
        warn_user(
            f"the facts of {device} could not be read by {name}: {type(error).__name__}: {error}; kernels that need "
            "an architecture are unavailable there",
            RuntimeWarning,
        )
        return DeviceFacts()
    return facts


def _checked(facts: object) -> DeviceFacts:
    if not isinstance(facts, DeviceFacts):
        raise TypeError(f"it returned {type(facts).__qualname__}, not DeviceFacts")
    return facts


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the line of the user's program that led here: the nearest caller that is not of this library."""
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "tileops":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _index_of(device: torch.device) -> int | None:
    """The device's index; None for `torch.device("cuda")`, which torch's annotation leaves out."""
    return cast("int | None", device.index)


def with_index(device: torch.device) -> torch.device:
    """`device` with an explicit index: one device has one name in every table.

    A device type without a current device, or one that is not there, keeps the name it has.
    """
    if _index_of(device) is not None or device.type in ("cpu", "meta"):
        return device
    try:
        return torch.device(device.type, torch.get_device_module(device).current_device())
    except (AssertionError, AttributeError, RuntimeError):
        return device


def device_name(device: torch.device) -> str:
    """What a device is called by its driver; a CPU by its model, with the number of its cores."""
    if device.type == "cpu":
        return f"{_cpu_model()}, {os.cpu_count()} cores"
    try:
        return str(torch.get_device_module(device).get_device_name(device))
    except Exception:  # a device type whose module has no such function, or a driver that does not answer
        return device.type


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def default_device_type() -> str:
    """The device type that tensors are meant for where nobody says: the accelerator's, else the CPU's."""
    # A build of torch for CUDA names cuda its accelerator also where no GPU is: it must be asked whether one is.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else accelerator.type


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream. Asked on a miss only."""
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def made_current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which `device` is the current device of its type. Kernels are built in it."""
    if device.type == "cpu" or _index_of(device) is None:
        return contextlib.nullcontext()
    with contextlib.suppress(RuntimeError):
        guard = getattr(torch.get_device_module(device), "device", None)
        if guard is not None:
            return guard(device)
    return contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class ArchRange:
    """Every architecture from `lowest` on; hashable, answers `arch in …`, prints as it is written.

    For kernels that use nothing specific to one architecture. A kernel that needs features of an `a` target
    (wgmma, say) names its architectures as a set.
    """

    lowest: int

    def __contains__(self, arch: object) -> bool:
        return isinstance(arch, int) and arch >= self.lowest

    def __repr__(self) -> str:
        return f"at_least({self.lowest})"


def at_least(arch: int) -> ArchRange:
    """The open range of architectures from `arch` on, for `supported_archs`."""
    if arch < 0:
        raise ValueError(f"at_least takes an architecture such as 80 or 90, not {arch}")
    return ArchRange(arch)
