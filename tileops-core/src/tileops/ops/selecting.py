"""The selection algorithm: one pure function."""

from __future__ import annotations

from collections.abc import Sequence

from tileops.backend.precedence import beats, precedence
from tileops.backend.units import Implementation
from tileops.call_spec import CallSpec
from tileops.ops.asking import verdict_of
from tileops.scopes import NO_SCOPE, Scope
from tileops.verdict import IN_TREE, Answer, Failure, Selection, Verdict


def select(
    op: str, interface: str, implementations: Sequence[Implementation], call: CallSpec, scope: Scope = NO_SCOPE
) -> Selection:
    """Select the implementation that serves `call`.

    Drop the unavailable, drop what the scope leaves out, drop those that refuse; of what the scope prefers first,
    take the one that nothing else is preferred over. Pure, and independent of the order of `implementations`.
    """
    ordered = sorted(implementations, key=_reading_order)
    verdicts = tuple(verdict_of(implementation, call, scope) for implementation in ordered)
    serving = scope.foremost([one for one, verdict in zip(ordered, verdicts) if verdict.serves])
    over = precedence(ordered)
    unbeaten = [one for one in serving if not any(beats(other, one, over) for other in serving)]
    contenders = tuple(implementation.full_key for implementation in unbeaten)
    key = contenders[0] if len(contenders) == 1 else None
    failure = _failure(verdicts, contenders)
    said = tuple(map(str, scope.statements))
    return Selection(op, interface, call, verdicts, key, failure, contenders, scope=said)


def _reading_order(implementation: Implementation) -> tuple[bool, str]:
    """In-tree first, then by key: the order of verdicts, which decides nothing."""
    return implementation.owner.name != IN_TREE, implementation.full_key


def _failure(verdicts: Sequence[Verdict], contenders: Sequence[str]) -> Failure | None:
    if len(contenders) == 1:
        return None
    if contenders:
        return Failure.AMBIGUOUS
    elsewhere = all(verdict.answer is Answer.OTHER_DEVICE for verdict in verdicts)
    return Failure.NO_DEVICE if elsewhere else Failure.NOT_SERVED
