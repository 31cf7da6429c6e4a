"""The rule about configurations: each is right, since tuning may take any of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tileops.call_spec import CallSpec
from tileops.kernels.configurations import Choice, shown
from tileops.testing.broken_rule import RuleBroken, named, shown_error
from tileops.testing.running import built, built_in, disagreement, run
from tileops.testing.samples import Limits, largest, runnable, tensors_of
from tileops.testing.subjects import Subject

CONFIGURATIONS: Final = "every configuration builds and agrees with the reference"


def check_configurations(subject: Subject, limits: Limits) -> None:
    """Each configuration that a kernel lists, beside the default, builds and is right.

    It is built for the first sample and the largest alone: a compiler may take seconds.
    """
    calls = runnable(subject, limits)
    for call in dict.fromkeys((calls[0], largest(calls, subject.interface, limits))):
        choices = built(subject, call).choices
        for place, at in _beside_defaults(choices):
            wrong = _fault(subject, call, place, at)
            if wrong:
                found = f"in {shown(choices[place].configurations[at])} of {choices[place].cls.__qualname__} {wrong}"
                change = "mend the kernel in that configuration, or do not list it for such calls"
                raise RuleBroken(CONFIGURATIONS, named(subject.implementation), found, change, call)


def _beside_defaults(choices: tuple[Choice, ...]) -> Iterator[tuple[int, int]]:
    """Each configuration but the defaults: the place of its kernel in the entry, and its own among that one's."""
    for place, choice in enumerate(choices):
        yield from ((place, at) for at in range(1, len(choice.configurations)))


def _fault(subject: Subject, call: CallSpec, place: int, at: int) -> str:
    """What is wrong where one kernel of the entry is built in another configuration; empty where nothing is."""
    tensors = tensors_of(subject.interface, call)
    try:
        entry = built_in(subject, call, lambda other, _cls, _listed: at if other == place else 0).entry
        outcome = run(subject.interface, entry, tensors)
    except Exception as error:
        return f"it raises {shown_error(error)}"
    return disagreement(subject.interface, call, tensors, outcome)
