"""How everything here is timed: interleaved rounds, the garbage collector off, ratios of minima or medians.

A machine that others use too is slower now and then, never faster than it is. Two things are therefore timed in
turns, many times, and compared by the fastest round of each; whichever began a round comes last in the next.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import timeit
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Arm = Callable[[], float]
"""Runs once and returns the seconds of one call."""

GROUPS = 5
"""Groups of rounds that each give a ratio of their own, two where rounds are few: how far these lie apart is the
spread."""


@dataclass(frozen=True)
class Ratio:
    """One thing's time over another's.

    Args:
        value: The ratio.
        spread: Half the distance between the largest and the smallest ratio of the groups of rounds, as a share
            of the value.
        seconds: The time of one call of each arm.
    """

    value: float
    spread: float
    seconds: dict[str, float]


def repeated(statement: str, names: Mapping[str, Any], *, setup: str = "pass", number: int = 0) -> Arm:
    """An arm that runs `statement` as often as takes about a millisecond, with no call around it.

    Args:
        statement: What is timed.
        names: What its names mean.
        setup: Run before each round, untimed.
        number: How often it runs in a round; 0 for as often as takes a millisecond.
    """
    timer = timeit.Timer(statement, setup, globals=dict(names))
    number = number or _number_for(timer, seconds=1e-3)
    return lambda: timer.timeit(number) / number


def _number_for(timer: timeit.Timer, seconds: float) -> int:
    timer.timeit(1)  # the first may build what all others find, and would pass for a millisecond's worth
    number = 1
    while timer.timeit(number) < seconds:
        number *= 2
    return number


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """No garbage collection in the block: one pass takes longer than what is timed."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def order_of(arms: list[str], turn: int) -> list[str]:
    """The order of the arms in one round: each begins as often as every other."""
    first = turn % len(arms)
    return arms[first:] + arms[:first]


def interleaved(arms: Mapping[str, Arm], rounds: int) -> dict[str, list[float]]:
    """The seconds of each arm in each round; one round before them counts for nothing."""
    for arm in arms.values():
        arm()
    taken: dict[str, list[float]] = {name: [] for name in arms}
    with without_gc():
        for turn in range(rounds):
            for name in order_of(list(arms), turn):
                taken[name].append(arms[name]())
    return taken


def ratio_of(
    taken: Mapping[str, list[float]], over: str, under: str, fold: Callable[[list[float]], float] = min
) -> Ratio:
    """The ratio of arm `over` to arm `under`, from the rounds that both were in.

    Args:
        taken: What `interleaved` returned.
        over: The arm that is judged.
        under: The arm that it is compared with.
        fold: `min`, or `statistics.median` where a minimum would be luck.
    """
    count = max(1, min(GROUPS, len(taken[over]) // 3))
    groups = [slice(first, None, count) for first in range(count)]
    each = [fold(taken[over][group]) / fold(taken[under][group]) for group in groups]
    value = fold(taken[over]) / fold(taken[under])
    seconds = {name: fold(values) for name, values in taken.items()}
    return Ratio(value, (max(each) - min(each)) / 2 / value, seconds)


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def shown_time(seconds: float) -> str:
    """A time as tables show it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
