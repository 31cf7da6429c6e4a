"""Ask one implementation about one call, and survive the answer."""

from __future__ import annotations

from typing import Any, Final, cast

from tileops.backend.units import Implementation
from tileops.call_spec import CallSpec
from tileops.device import warn_user
from tileops.errors import KernelFaultWarning
from tileops.kernels.kernel_base import available
from tileops.scopes import Scope
from tileops.verdict import Answer, Verdict


def verdict_of(implementation: Implementation, call: CallSpec, scope: Scope) -> Verdict:
    """What one implementation comes to for one call: availability first, then the scope, then applicability."""
    owner, key = implementation.owner.name, implementation.key
    answer, reason = available(implementation.cls, call, implementation.owner)
    if answer is Answer.SERVES:
        answer, reason = scope.admits(owner, key)
    if answer is Answer.SERVES:
        reason = _refusal(implementation, call)
        answer = Answer.SERVES if reason is None else Answer.REFUSES
    favour = scope.favour(owner, key) if answer is Answer.SERVES else None
    return Verdict(implementation.full_key, implementation.cls, implementation.owner, answer, reason, favour)


def _refusal(implementation: Implementation, call: CallSpec) -> str | None:
    """The implementation's refusal. A `refusal` that fails refuses, and its author's distribution is named."""
    try:
        reason = cast("Any", implementation.cls.refusal(call))
    except Exception as error:
        fault = type(error).__name__
        reason = f"its refusal raised {fault}: {error}"
    else:
        if reason is None or (isinstance(reason, str) and reason.strip()):
            return reason
        fault = type(reason).__name__
        reason = f"its refusal returned {reason!r}, neither None nor a sentence"
    _warn_of_fault(implementation, fault, reason)
    return reason


_warned: Final[set[tuple[Implementation, str]]] = set()


def _warn_of_fault(implementation: Implementation, fault: str, reason: str) -> None:
    """Warn of a faulty class, once for each kind of fault."""
    if (implementation, fault) in _warned:
        return
    _warned.add((implementation, fault))
    shipped = implementation.owner.distribution or implementation.owner.name
    where = f"{implementation.cls.__module__}.{implementation.cls.__qualname__}, {shipped}"
    message = f"{implementation.full_key} ({where}): {reason}; it counts as a refusal"
    warn_user(message, KernelFaultWarning)
