"""What a rule says of a kernel that breaks it, and of one that it cannot be tried on here."""

from __future__ import annotations

from tileops.backend.units import Implementation
from tileops.call_spec import CallSpec


class RuleBroken(AssertionError):  # noqa: N818 - a verdict; AssertionError says that it is an error
    """A rule is broken. The text says which rule, by whom, for which call, what was found, and what to change.

    Args:
        rule: The rule, as a clause.
        who: The kernel, target or backend that breaks it.
        found: What was found.
        change: What its author has to change.
        call: The call spec that shows it, where one does.
    """

    def __init__(self, rule: str, who: str, found: str, change: str, call: CallSpec | None = None) -> None:
        lines = [f"rule broken: {rule}", f"  by: {who}"]
        lines += [] if call is None else [f"  call: {call}"]
        super().__init__("\n".join([*lines, f"  found: {found}", f"  change: {change}"]))


class NotTried(Exception):  # noqa: N818 - no error: it carries the reason for which a test is skipped
    """A rule cannot be tried here; the reason is its text."""


def named(implementation: Implementation) -> str:
    """An implementation as messages name it: `acme:row  [plug_acme.Row, tileops-backend-acme 1.0]`."""
    cls, owner = implementation.cls, implementation.owner
    origin = f"{cls.__module__}.{cls.__qualname__}" + (f", {owner.distribution}" if owner.distribution else "")
    return f"{implementation.full_key}  [{origin}]"


def shown_error(error: BaseException) -> str:
    """An exception in one line, with the line of code that raised it."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    where = "" if last is None else f" ({last.tb_frame.f_code.co_filename}:{last.tb_lineno})"
    return f"{type(error).__name__}: {error}{where}"
