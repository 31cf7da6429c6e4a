"""Tensors in files: read the user's, write the results. Nothing that a file holds is executed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from tileops.cli.arguments import UsageError

UNNAMED: Final = ""
"""The name of the one tensor of a file that has no names."""


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; a file of one unnamed tensor gives it the empty name.

    Reads `.npy`, `.npz`, `.pt` (with `weights_only`, so that no code runs) and `.safetensors`.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise UsageError(f"{path} is of a kind that is not read; give one of: {', '.join(_READERS)}")
    if not path.is_file():
        raise UsageError(f"{path} does not exist; give the path of a tensor file")
    try:
        return reader(path)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{path} cannot be read as {path.suffix}: {type(error).__name__}: {first_line(error)}"
        ) from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors` to a new file beside `path`, then let it take the place of `path`: all or nothing."""
    check_writable(path, len(tensors))
    beside = path.with_name(f".{path.name}.part")
    try:
        with beside.open("wb") as file:
            _WRITERS[path.suffix.lower()](file, {name: tensor.detach().cpu() for name, tensor in tensors.items()})
        beside.replace(path)
    except (OSError, TypeError) as error:
        beside.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {first_line(error)}") from error


def check_writable(path: Path, count: int) -> None:
    """Refuse, before anything runs, a path that the results could not be written to."""
    if path.suffix.lower() not in _WRITERS:
        raise UsageError(f"--out {path} is of a kind that is not written; give one of: {', '.join(_WRITERS)}")
    if not path.parent.is_dir():
        raise UsageError(f"--out {path}: there is no folder {path.parent}; make it first")
    if path.suffix.lower() == ".npy" and count > 1:
        raise UsageError(f"--out {path} holds one tensor and the op returns {count}; give .npz, .pt or .safetensors")


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _read_npy(path: Path) -> dict[str, Tensor]:
    return {UNNAMED: torch.from_numpy(np.load(path, allow_pickle=False))}


def _read_npz(path: Path) -> dict[str, Tensor]:
    with np.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict)


def _read_pt(path: Path) -> dict[str, Tensor]:
    held: Any = torch.load(path, map_location="cpu", weights_only=True)
    named: dict[Any, Any] = {UNNAMED: held} if isinstance(held, Tensor) else held
    if not _is_mapping(named) or not all(isinstance(value, Tensor) for value in named.values()):
        raise UsageError(f"{path} holds {type(held).__name__}; give one tensor, or a mapping of names to tensors")
    return {str(name): value for name, value in named.items()}


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(path)


def _write_npy(file: Any, tensors: Mapping[str, Tensor]) -> None:
    np.save(file, next(iter(tensors.values())).numpy(), allow_pickle=False)


def _write_npz(file: Any, tensors: Mapping[str, Tensor]) -> None:
    arrays: Any = {name: tensor.numpy() for name, tensor in tensors.items()}
    np.savez(file, **arrays)


def _write_pt(file: Any, tensors: Mapping[str, Tensor]) -> None:
    torch.save(next(iter(tensors.values())) if len(tensors) == 1 else dict(tensors), file)


def _write_safetensors(file: Any, tensors: Mapping[str, Tensor]) -> None:
    file.write(safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}))


_READERS: Final[dict[str, Callable[[Path], dict[str, Tensor]]]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".pt": _read_pt,
    ".safetensors": _read_safetensors,
}
_WRITERS: Final[dict[str, Callable[[Any, Mapping[str, Tensor]], None]]] = {
    ".npy": _write_npy,
    ".npz": _write_npz,
    ".pt": _write_pt,
    ".safetensors": _write_safetensors,
}
