"""Ask one implementation about one call, and survive the answer."""

from __future__ import annotations

import functools
import warnings
from typing import Any, cast

from tileops.backend.registration import Implementation
from tileops.call_spec import CallSpec
from tileops.errors import KernelFaultWarning
from tileops.kernels.kernel_base import available
from tileops.verdict import Answer, Verdict


def verdict_of(implementation: Implementation, call: CallSpec) -> Verdict:
    """What one implementation says to one call: availability first, then applicability."""
    answer, reason = available(implementation.cls, call, implementation.owner)
    if answer is Answer.SERVES:
        reason = _refusal(implementation, call)
        answer = Answer.SERVES if reason is None else Answer.REFUSES
    return Verdict(implementation.full_key, implementation.cls, implementation.owner, answer, reason)


def _refusal(implementation: Implementation, call: CallSpec) -> str | None:
    """The implementation's refusal. A `refusal` that fails refuses, and its author's distribution is named."""
    try:
        reason = cast("Any", implementation.cls.refusal(call))
    except Exception as error:
        reason = f"its refusal raised {type(error).__name__}: {error}"
    else:
        if reason is None or (isinstance(reason, str) and reason.strip()):
            return reason
        reason = f"its refusal returned {reason!r}, neither None nor a sentence"
    _warn_of_fault(implementation, reason.partition(":")[0])
    return reason


@functools.lru_cache(maxsize=1024)
def _warn_of_fault(implementation: Implementation, fault: str) -> None:
    """Warn of a faulty class, once for each kind of fault."""
    shipped = implementation.owner.distribution or implementation.owner.name
    where = f"{implementation.cls.__module__}.{implementation.cls.__qualname__}, {shipped}"
    message = f"{implementation.full_key} ({where}): {fault}; it counts as a refusal"
    warnings.warn(message, KernelFaultWarning, stacklevel=6)
