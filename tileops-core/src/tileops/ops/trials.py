"""What tuning tried and what it found, as values with their rendering."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tileops.kernels.configurations import Configuration, shown
from tileops.verdict import Selection


@dataclasses.dataclass(frozen=True)
class Trial:
    """One configuration of a kernel, as it was tried.

    Args:
        configuration: The configuration.
        ratio: Time of the call with it, as a multiple of the call's time with the default; None where it was dropped.
        reason: Why it was dropped, as a clause; None where it was not.
    """

    configuration: Configuration
    ratio: float | None
    reason: str | None = None

    def __str__(self) -> str:
        """The configuration and what came of it."""
        outcome = f"dropped: {self.reason}" if self.ratio is None else f"{self.ratio:.2f} × the default's time"
        return f"{shown(self.configuration)}: {outcome}"


@dataclasses.dataclass(frozen=True)
class TunedKernel:
    """A kernel of the entry, with what was tried of it.

    Args:
        cls: Its class.
        trials: What was tried: every configuration that its class lists for the call, the default first.
        taken: The position of the one that it is built in from now on.
    """

    cls: type[Any]
    trials: tuple[Trial, ...]
    taken: int

    @property
    def winner(self) -> Configuration:
        """The configuration that it is built in from now on."""
        return self.trials[self.taken].configuration

    def lines(self) -> list[str]:
        """The kernel as a reader sees it: a line for its class, and one for each trial."""
        said = [f"  {trial}" + (": taken" if at == self.taken else "") for at, trial in enumerate(self.trials)]
        return [self.cls.__qualname__, *said]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What `op.tune` tried and found.

    Args:
        selection: The selection of the call: the kernel that serves it, or the target.
        tensors: The arguments of the kernel, as text. The configurations were timed with them.
        kernels: The kernels of the entry that list configurations, with what was tried; empty where none does.
        record: The file that keeps the winners for later processes; None where none does.
        remark: Why nothing was tried, or why nothing is kept; None where both were done.
    """

    selection: Selection
    tensors: tuple[str, ...] = ()
    kernels: tuple[TunedKernel, ...] = ()
    record: Path | None = None
    remark: str | None = None

    @property
    def headline(self) -> str:
        """The outcome in one line."""
        where = f"{self.selection.op}.{self.selection.interface}"
        if not self.kernels:
            return f"nothing was tuned: {where}"
        changed = any(one.taken > 0 for one in self.kernels)
        outcome = "is tuned" if changed else "stays as it is, which is the fastest of what was tried"
        return f"{self.selection.key} {outcome}: {where}"

    def __str__(self) -> str:
        """All of it: outcome, call, tensors, every trial, and where the winners are kept."""
        lines = [self.headline, f"  call: {self.selection.call}"]
        lines += [f"  tensors: {', '.join(self.tensors)}"] if self.tensors else []
        lines += [f"  {line}" for kernel in self.kernels for line in kernel.lines()]
        lines += [] if self.remark is None else [f"  {self.remark}"]
        lines += [] if self.record is None else [f"  kept in {self.record}"]
        return "\n".join(lines)
