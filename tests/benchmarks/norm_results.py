"""What the results of norms.py say: ratios, the best rival, whether a bar is met.

A record is one case as `h200.json` holds it:

    {"op": "layer_norm", "shape": [4096, 4096], "dtype": "bfloat16", "channels_last": false, "name": "4096×4096",
     "moved": 67108864, "bar": {"copy": 1.1, "rival": 1.02, "margin": 0.0}, "kernel": "held_row",
     "times": {"tileops": {"microseconds": [17.9, 18.0, 18.1]}, "quack": {"problem": "…"}}}

with the lower quartile, the median and the upper quartile of one call's time on the device.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from peers import OURS, TITLES

FLOOR = "copy"
Record = Mapping[str, Any]


def median(record: Record, arm: str) -> float | None:
    """Microseconds of one call; None where there are none."""
    times = record["times"].get(arm, {}).get("microseconds")
    return None if times is None else times[1]


def rivals(record: Record) -> dict[str, float]:
    """The medians of all but ours and the copy."""
    others = {arm: median(record, arm) for arm in record["times"] if arm not in (OURS, FLOOR)}
    return {arm: time for arm, time in others.items() if time is not None}


def best_rival(record: Record) -> str | None:
    """The fastest of them."""
    found = rivals(record)
    return min(found, key=found.__getitem__) if found else None


def over(record: Record, arm: str, base: str | None) -> float | None:
    """The ratio of two medians; None where one of them is missing."""
    time, under = median(record, arm), None if base is None else median(record, base)
    return None if time is None or under is None else time / under


def verdicts(record: Record) -> list[tuple[str, bool | None]]:
    """Each part of the bar as a sentence, and whether it is met; None where it was not measured."""
    bar, best = record["bar"], best_rival(record)
    found: list[tuple[str, bool | None]] = []
    if bar["copy"] is not None:
        ratio = over(record, OURS, FLOOR)
        found.append((f"{_judged(ratio)} of at most {bar['copy']:.2f} × copy", _met(ratio, bar["copy"])))
    if bar["rival"] is not None:
        ratio = over(record, OURS, best)
        most, said = (
            bar["rival"],
            f"{_judged(ratio)} of at most {bar['rival']:.2f} × {TITLES.get(best, best) or 'the best rival'}",
        )
        if bar["margin"]:
            said += f" + {bar['margin']} µs"
            most += bar["margin"] / rivals(record)[best] if best else 0.0
        found.append((said, _met(ratio, most)))
    return found


def allowed(record: Record) -> float | None:
    """The microseconds that the bar allows; None where what it compares with was not measured."""
    bar, copy, best = record["bar"], median(record, FLOOR), best_rival(record)
    parts: list[float] = []
    if bar["copy"] is not None and copy is not None:
        parts.append(bar["copy"] * copy)
    if bar["rival"] is not None and best is not None:
        parts.append(bar["rival"] * rivals(record)[best] + bar["margin"])
    return min(parts, default=None)


def is_met(record: Record) -> bool | None:
    """Whether the whole bar is met; None where a part was not measured and none is missed."""
    states = [state for _, state in verdicts(record)]
    return False if False in states else None if None in states else True


def _met(ratio: float | None, most: float) -> bool | None:
    return None if ratio is None else ratio <= most


def _judged(ratio: float | None) -> str:
    """A ratio beside its bar: one digit more than bars have."""
    return "–" if ratio is None else f"{ratio:.3f}"


def shown(ratio: float | None) -> str:
    """A ratio as tables show it."""
    return "–" if ratio is None else f"{ratio:.2f}"


def lead(records: Iterable[Record]) -> float | None:
    """The geometric mean of the best rival's time over ours."""
    ratios = [over(record, OURS, best_rival(record)) for record in records]
    known = [1 / ratio for ratio in ratios if ratio is not None]
    return statistics.geometric_mean(known) if known else None


def by_op(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records of each op, in order."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["op"], []).append(record)
    return found
