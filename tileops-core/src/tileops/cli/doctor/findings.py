"""What `tileops backends doctor` finds, and how it is shown."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.padding import Padding


class Severity(enum.Enum):
    """How much a finding matters."""

    ERROR = "error"
    """Something does not work, or would not work for everybody."""

    WARNING = "warning"
    """It works here and now, and may not elsewhere or later."""

    HINT = "hint"
    """It works; this would be better."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that could be better.

    Args:
        severity: How much it matters.
        where: The file and line, the distribution or the backend that it is about.
        what: What is the matter, as a clause.
        mend: What to do, as a clause.
    """

    severity: Severity
    where: str
    what: str
    mend: str

    def as_json(self) -> dict[str, str]:
        """The finding as a JSON object."""
        return {"severity": self.severity.value, "where": self.where, "what": self.what, "mend": self.mend}


def error(where: str, what: str, mend: str) -> Finding:
    """A finding that has to be mended."""
    return Finding(Severity.ERROR, where, what, mend)


def warning(where: str, what: str, mend: str) -> Finding:
    """A finding that should be."""
    return Finding(Severity.WARNING, where, what, mend)


def hint(where: str, what: str, mend: str) -> Finding:
    """A finding that may be."""
    return Finding(Severity.HINT, where, what, mend)


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Each finding once: errors first, then by file and line."""
    order = list(Severity)

    def key(found: Finding) -> tuple[int, str, int]:
        file, _, line = found.where.rpartition(":")
        return order.index(found.severity), file or found.where, int(line) if line.isdigit() else 0

    return tuple(sorted(dict.fromkeys(findings), key=key))


def has_errors(findings: Sequence[Finding]) -> bool:
    """Whether one of them is an error."""
    return any(found.severity is Severity.ERROR for found in findings)


_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.HINT: "dim"}


def show_findings(console: Console, title: str, findings: Sequence[Finding]) -> None:
    """Print what was examined, each finding with its mend, and how many there are."""
    console.print(title, style="bold", markup=False)
    for found in findings:
        console.print(Padding(f"{found.severity.value}: {found.where}: {found.what}", (0, 0, 0, 2)),
                      style=_STYLES[found.severity], markup=False)  # fmt: skip
        console.print(Padding(found.mend, (0, 0, 0, 4)), markup=False)
    console.print(f"  {_counted(findings)}", markup=False)


def _counted(findings: Sequence[Finding]) -> str:
    counts = [(sum(found.severity is severity for found in findings), severity.value) for severity in Severity]
    return (
        ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count) or "nothing to mend"
    )
