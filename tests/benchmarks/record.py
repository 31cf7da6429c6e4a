"""What a budget reports: a sentence, the measured ratio or count, the budget, the noise, and what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from timing import Ratio, shown_time


@dataclass(frozen=True)
class Budget:
    """What is promised.

    Args:
        name: A short name.
        sentence: What is measured, and against what.
        most: The largest value that meets it.
        noise: How far the value moves between runs, and between the machines and Pythons that it was measured on,
            as a share of it.
        unit: "×" of a ratio, else what is counted.
        usual: The value when it was last looked at, on a quiet machine with 2 cores; None for the budget itself.
    """

    name: str
    sentence: str
    most: float
    noise: float = 0.0
    unit: str = "×"
    usual: float | None = None

    def measured(self, value: float, *, spread: float = 0.0, detail: str = "") -> Record:
        """A record of one value."""
        return Record(self, value, spread, detail)

    def of_ratio(self, ratio: Ratio) -> Record:
        """A record of a ratio of two times."""
        detail = ", ".join(f"{name} {shown_time(seconds)}" for name, seconds in ratio.seconds.items())
        return Record(self, ratio.value, ratio.spread, detail)

    def skipped(self, reason: str) -> Record:
        """A record of what could not be measured here."""
        return Record(self, None, 0.0, reason)


@dataclass(frozen=True)
class Record:
    """What was measured for one budget.

    Args:
        budget: The budget.
        value: The ratio or count; None where it could not be measured.
        spread: How far the value moved within this run, as a share of it.
        detail: The times or counts behind it, or why there are none.
    """

    budget: Budget
    value: float | None
    spread: float
    detail: str

    @property
    def state(self) -> str:
        """`met`, `noise` (above the budget by no more than its noise), `missed`, `regressed`, or `skipped`.

        Within the budget, what lies above the usual value by more than the noise has regressed.
        """
        if self.value is None:
            return "skipped"
        beyond = 1 + self.budget.noise
        if self.value > self.budget.most:
            return "noise" if self.value <= self.budget.most * beyond else "missed"
        usual = self.budget.most if self.budget.usual is None else self.budget.usual
        return "met" if self.value <= usual * beyond else "regressed"

    def as_json(self) -> dict[str, object]:
        """The record as JSON holds it."""
        measured = {"value": self.value, "spread": self.spread, "state": self.state, "detail": self.detail}
        return {**dataclasses.asdict(self.budget), **measured}


Measure = Callable[[], list[Record]]
"""Measures one budget, or several that one run gives."""
