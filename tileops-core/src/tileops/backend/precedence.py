"""Precedence: which of two implementations is taken where both serve. A partial order, without numbers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tileops.backend.units import Implementation
from tileops.errors import DeclarationError
from tileops.kernels.kernel_base import KernelInterface
from tileops.verdict import IN_TREE

Precedence = Mapping[Implementation, frozenset[Implementation]]


def precedence(implementations: Sequence[Implementation]) -> Precedence:
    """For each implementation the ones that its `preferred_over` reaches, through any number of steps."""
    return _precedence(tuple(implementations))


@functools.lru_cache(maxsize=256)
def _precedence(implementations: tuple[Implementation, ...]) -> Precedence:
    direct = {one: named_by(one, implementations) for one in implementations}
    return {one: frozenset(_reached(one, direct)) for one in implementations}


def beats(one: Implementation, other: Implementation, over: Precedence) -> bool:
    """Whether `one` is taken where both serve: a general one is below all others, then preferences decide.

    Two that reach each other, which only different owners can bring about, do not beat each other.
    """
    if one.cls.general != other.cls.general:
        return other.cls.general
    return other in over[one] and one not in over[other]


def named_by(implementation: Implementation, candidates: Iterable[Implementation]) -> list[Implementation]:
    """Which of `candidates` the `preferred_over` of `implementation` names.

    A bare key means every implementation with that key among the owner's own and the in-tree ones, itself
    excepted; `acme:row` that backend's; `IN_TREE` every in-tree one, of a general implementation the in-tree
    general alone.
    """
    return [other for other in candidates if other is not implementation and _names(implementation, other)]


def _names(implementation: Implementation, other: Implementation) -> bool:
    stated, owner = implementation.cls.preferred_over, other.owner.name
    if owner == IN_TREE and IN_TREE in stated and (other.cls.general or not implementation.cls.general):
        return True
    if owner in (implementation.owner.name, IN_TREE) and other.key in stated:
        return True
    return f"{owner}:{other.key}" in stated


def _reached(start: Implementation, direct: Mapping[Implementation, list[Implementation]]) -> set[Implementation]:
    reached: set[Implementation] = set()
    steps = list(direct[start])
    while steps:
        step = steps.pop()
        if step not in reached:
            reached.add(step)
            steps += direct[step]
    return reached


def check_precedence(
    interface: type[KernelInterface[Any]], own: Iterable[Implementation], others: Iterable[Implementation]
) -> None:
    """Raise a `DeclarationError` for what one owner's implementations of an interface show together.

    A contradiction with somebody else's is nobody's mistake: those two are ambiguous where both serve.

    Args:
        interface: The interface.
        own: The owner's implementations.
        others: The in-tree ones, which bare keys may name too; empty where they are the owner's.
    """
    mine = [implementation for implementation in own if issubclass(implementation.cls, interface)]
    _check_generals(interface, mine)
    over = precedence([*mine, *(other for other in others if other not in mine)])
    for one in mine:
        circle = [other for other in mine if other in over[one] and one in over[other]]
        if circle:
            keys = ", ".join(implementation.full_key for implementation in circle)
            raise DeclarationError(
                f"the preferences of {interface.__qualname__} form a cycle through {keys}; take one preferred_over back"
            )


def _check_generals(interface: type[KernelInterface[Any]], mine: list[Implementation]) -> None:
    generals: dict[str, Implementation] = {}
    for implementation in mine:
        for device_type in implementation.cls.devices if implementation.cls.general else ():
            other = generals.setdefault(device_type, implementation)
            if other is not implementation:
                raise DeclarationError(
                    f"{other.full_key} and {implementation.full_key} are both general for {interface.__qualname__} on "
                    f"{device_type}; at most one can be: let the other state what it refuses"
                )
