"""What tuning found, on disk: one file for each entry, under everything that the finding depends on.

A record that cannot be read, or is of something else, is as good as none: the default is built. Deleting the folder
forgets every tuning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch

from tileops.backend.units import Implementation
from tileops.call_spec import CallSpec
from tileops.device import device_name
from tileops.kernels.configurations import Configuration

CACHE_VARIABLE: Final = "TILEOPS_CACHE_DIR"
"""Names the folder in which the library keeps what it found out. Set and empty: nothing is kept, nothing is read."""


def records_folder() -> Path | None:
    """Where records are: in the folder that the variable names, else in the user's cache folder."""
    stated = os.environ.get(CACHE_VARIABLE)
    if stated == "":
        return None
    if stated is not None:
        return Path(stated) / "tuning"
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - it raises nothing
    return Path(caches) / "tileops" / "tuning"


# ------------------------------------------------------------------------------------------------------- identity


class Unrecordable(Exception):  # noqa: N818 - no error: it carries the reason for which nothing is recorded
    """Something in an identity that only this process can compare."""


def identity_of(interface: type[Any], implementation: Implementation, call: CallSpec, build: Hashable) -> Any:
    """What a record must be of to serve a build, as JSON: software, board, implementation, build identity.

    Raises:
        Unrecordable: The build identity holds an object that no file can name.
    """
    return {
        "versions": _versions(),
        "board": {"type": call.device.type, "name": device_name(call.device), **dataclasses.asdict(call.facts)},
        "interface": _name(interface),
        "key": implementation.full_key,
        "class": _name(implementation.cls),
        "distribution": implementation.owner.distribution,
        "build": _as_json(build),
    }


@functools.lru_cache(maxsize=1)
def _versions() -> dict[str, str | None]:
    return {"torch": torch.__version__, **{name: _version(name) for name in ("tileops-core", "tilelang")}}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _name(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _as_json(value: object) -> Any:
    """A value of a build identity, the same in every process. A device is its type: the board is named beside it."""
    if isinstance(value, enum.Enum):
        return {"enum": f"{_name(type(value))}.{value.name}"}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if isinstance(value, torch.device):
        return {"device": value.type}
    if isinstance(value, (tuple, frozenset)):
        parts = [_as_json(part) for part in cast("tuple[object, ...]", value)]
        return parts if isinstance(value, tuple) else {"set": sorted(parts, key=_text)}
    if isinstance(value, type):
        return {"class": _name(cast("type[Any]", value))}
    if dataclasses.is_dataclass(value):
        fields = {field.name: _as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {_name(type(value)): fields}
    raise Unrecordable(f"the build identity holds a {type(value).__qualname__}, which no file can name")


def _text(value: Any) -> str:
    """JSON in which equal values have equal texts."""
    return json.dumps(value, sort_keys=True)


# ---------------------------------------------------------------------------------------------- reading and writing


def record_path(identity: Any) -> Path | None:
    """The file of a record; None where none is kept."""
    folder = records_folder()
    return None if folder is None else folder / f"{hashlib.sha256(_text(identity).encode()).hexdigest()[:32]}.json"


def read_record(identity: Any) -> list[Any]:
    """What is on record for the kernels of an entry, in their order; nothing where no sound record is found."""
    path = record_path(identity)
    if path is None:
        return []
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
        record = json.loads(path.read_text("utf-8"))
        if _text(record["identity"]) == _text(identity):
            return list(record["kernels"])
    return []


def write_record(identity: Any, kernels: Sequence[Any]) -> Path | None:
    """Put a record in its place, whole, whoever else reads or writes it; its path, None where none is kept.

    Raises:
        OSError: The folder cannot be written.
    """
    path = record_path(identity)
    if path is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, written = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 - the file is open already
            json.dump({"identity": identity, "kernels": list(kernels)}, file, indent=1)
        os.replace(written, path)  # noqa: PTH105 - mkstemp gives a str
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(written)  # noqa: PTH108
        raise
    return path


class TakeRecorded:
    """Takes, for each kernel of a build, the configuration on record; the default where there is none.

    Nothing is read before a kernel with configurations asks.

    Args:
        identity: Gives what the record must be of.
    """

    def __init__(self, identity: Callable[[], Any]) -> None:
        self._identity = identity
        self.took_another = False

    @functools.cached_property
    def _kernels(self) -> list[Any]:
        folder = records_folder()
        if folder is None or not os.path.isdir(folder):  # noqa: PTH112 - it raises nothing
            return []  # who never tuned does not pay for an identity: versions and the board's name take milliseconds
        try:
            return read_record(self._identity())
        except Unrecordable:
            return []

    def __call__(self, place: int, cls: type[Any], configurations: Sequence[Configuration]) -> int:
        """The position of the winner on record, where that is of this class and these configurations."""
        found = self._kernels[place] if place < len(self._kernels) else None
        taken = winner_of(found, cls, configurations)
        self.took_another |= taken > 0
        return taken


def as_record(cls: type[Any], configurations: Sequence[Configuration], winner: int) -> dict[str, Any]:
    """A kernel's part of a record."""
    return {"class": _name(cls), "configurations": [dict(one) for one in configurations], "winner": winner}


def winner_of(recorded: object, cls: type[Any], configurations: Sequence[Configuration]) -> int:
    """The winner in a kernel's part of a record; the default where that is of another class or other configurations."""
    if isinstance(recorded, dict):
        winner = cast("dict[str, object]", recorded).get("winner")
        if type(winner) is int and 0 <= winner < len(configurations):
            sound = _text(recorded) == _text(as_record(cls, configurations, winner))
            return winner if sound else 0
    return 0
