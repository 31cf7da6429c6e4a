"""The rules about what a kernel class says: its declarations, `refusal`, `entry_for`, precedence.

They ask about devices that need not be there: the facts of boards are stated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tileops.backend.units import Implementation
from tileops.call_spec import CallSpec
from tileops.device import ArchRange
from tileops.errors import DeclarationError
from tileops.kernels.configurations import listed_configurations
from tileops.kernels.declarations import check_kernel_class
from tileops.ops.implementations import implementations
from tileops.ops.selecting import select
from tileops.testing.broken_rule import NotTried, RuleBroken, named, shown_error
from tileops.testing.global_state import changes, read_state
from tileops.testing.samples import Limits, askable
from tileops.testing.subjects import Subject
from tileops.testing.surroundings import elsewhere, out_of_reach
from tileops.testing.variations import alternatives, changed
from tileops.verdict import IN_TREE, Failure, Selection

FACTS: Final = "declared facts are honoured"
PURE: Final = "refusal, entry_for and configurations are pure and total"
AMBIGUITY: Final = "nothing is ambiguous among the backend's own implementations and the in-tree ones"


# ------------------------------------------------------------------------------------------------ declared facts


def check_declared_facts(subject: Subject) -> None:
    """What the class declares is well formed, and names device types and architectures that can exist."""
    for mistake, change in _mistaken_facts(subject):
        raise RuleBroken(FACTS, named(subject.implementation), mistake, change)


def _mistaken_facts(subject: Subject) -> Iterator[tuple[str, str]]:
    cls = subject.cls
    try:
        check_kernel_class(subject.implementation.key, cls, subject.op.interfaces.values())
    except DeclarationError as error:
        yield str(error), "the declaration that the sentence names"
        return
    for device_type in sorted(cls.devices):
        if not _is_device_type(device_type):
            yield f"torch knows no device type {device_type!r}", "write the type in devices as torch.device takes it"
    archs = () if isinstance(cls.supported_archs, ArchRange) else cast("Iterable[int]", cls.supported_archs or ())
    for arch in archs:
        if "cuda" in cls.devices and not 30 <= arch < 1000:
            yield f"supported_archs holds {arch}", "write major * 10 + minor: 90 for compute capability 9.0"


def _is_device_type(device_type: str) -> bool:
    try:
        torch.device(device_type)
    except RuntimeError:
        return False
    return True


# ------------------------------------------------------------------------------------------ pure and total answers


def check_purity(subject: Subject, limits: Limits) -> None:
    """Ask `refusal`, and of served calls `entry_for` and `configurations`, about the samples and about specs generated from them."""
    bases = askable(subject)
    if not bases:
        raise NotTried("it is available for no sample call, on no board that is known")
    values = alternatives(bases)
    each = (changed(bases[0], **{name: value}) for name, known in values.items() for value in known)
    for call in (*bases, *each):
        if call is not None:
            _check_answers(subject, call)
    _on_generated_specs(bases, values, limits, lambda call: _check_answers(subject, call))


def _on_generated_specs(
    bases: Sequence[CallSpec],
    values: Mapping[str, Sequence[Any]],
    limits: Limits,
    check: Callable[[CallSpec], None],
) -> None:
    """Check specs in which up to three fields of a base are changed together."""

    @settings(
        max_examples=limits.specs, deadline=None, database=None, derandomize=True, report_multiple_bugs=False,
        suppress_health_check=tuple(cast("Iterable[HealthCheck]", HealthCheck)),
    )  # fmt: skip
    @given(st.data())
    def on_one(data: st.DataObject) -> None:
        base = data.draw(st.sampled_from(bases))
        names = data.draw(st.lists(st.sampled_from(sorted(values)), max_size=3, unique=True)) if values else []
        call = changed(base, **{name: data.draw(_values(values[name])) for name in names})
        assume(call is not None)
        check(cast("CallSpec", call))

    on_one()


def _values(known: Sequence[Any]) -> st.SearchStrategy[Any]:
    """The known values of a field; of sizes also every other up to the longest axis that memory could hold."""
    if all(isinstance(value, int) and not isinstance(value, bool) for value in known):
        return st.sampled_from(known) | st.integers(min(known), 1 << 40)
    return st.sampled_from(known)


def _check_answers(subject: Subject, call: CallSpec) -> None:
    before = read_state()
    refused = _answer(subject, call, "refusal")
    if refused is not None and not (isinstance(refused, str) and refused.strip()):
        found, change = f"refusal returned {refused!r}", "return None where the call is served, else a sentence"
        raise _impure(subject, call, found, change)
    if refused is None:
        _answer(subject, call, "entry_for")
        _answer(subject, call, "configurations")
    moved = changes(before, read_state())
    if moved:
        raise _impure(subject, call, f"the answer changed global state: {moved}", "leave it as it is")


def _answer(subject: Subject, call: CallSpec, method: str) -> Any:
    """What `method` answers; the same twice, the second time with other global state."""
    first = _asked(subject, call, method)
    with elsewhere():
        second = _asked(subject, call, method)
    if first != second:
        found = f"{method} answered {first!r}, and then {second!r} with another environment and default dtype"
        raise _impure(subject, call, found, "read nothing but the call and what the class declares")
    return first


def _asked(subject: Subject, call: CallSpec, method: str) -> Any:
    """One answer: of `entry_for` the identity, of `configurations` what can be put on record."""
    answer = None
    with out_of_reach() as reached:
        try:
            answer = getattr(subject.cls, method)(call)
            if method == "entry_for":
                answer = _identity(answer)
            if method == "configurations":
                answer = listed_configurations(subject.cls, call)
        except Exception as error:
            if not reached:
                change = "answer every call, also one that no sample is like: refusal says why it is not served"
                raise _impure(subject, call, f"{method} raised {shown_error(error)}", change) from error
    if reached:
        raise _impure(subject, call, f"{method}: {reached[0]}", "read the call's fields, call.arch, call.sm_count")
    return answer


def _identity(answer: Any) -> Any:
    identity, factory = answer
    hash(identity)
    if identity != identity:  # noqa: PLR0124 - a NaN, or what holds one, is never found again
        raise ValueError(f"the identity {identity!r} does not equal itself")
    if not callable(factory):
        raise TypeError(f"the factory {factory!r} cannot be called")
    return identity


def _impure(subject: Subject, call: CallSpec, found: str, change: str) -> RuleBroken:
    return RuleBroken(PURE, named(subject.implementation), found, change, call)


# --------------------------------------------------------------------------------------------------- precedence


def check_ambiguity(subject: Subject) -> None:
    """No sample call is served by the implementation and by an own or in-tree one, with none preferred."""
    backend = subject.implementation.owner.name
    for selection in _ambiguous(subject, {backend, IN_TREE}):
        others = [key for key in selection.contenders if key != subject.implementation.full_key]
        found = f"{' and '.join(selection.contenders)} serve this call and none is preferred"
        raise RuleBroken(AMBIGUITY, named(subject.implementation), found, _settled(subject, others), selection.call)


def _settled(subject: Subject, others: Sequence[str]) -> str:
    in_tree = all(key in subject.op.kernel_types for key in others)
    name = "IN_TREE" if in_tree and subject.implementation.owner.name != IN_TREE else repr(others[0].rpartition(":")[2])
    return f"let it state preferred_over = frozenset({{{name}}}), or refuse the call"


def overlaps(subjects: Sequence[Subject]) -> tuple[str, ...]:
    """Where a backend's implementations overlap with those of other installed backends, and what settles it."""
    lines = dict[tuple[str, ...], str]()
    for subject in subjects:
        backend = subject.implementation.owner.name
        for selection in _ambiguous(subject, None):
            keys = selection.contenders
            if any(
                verdict.owner.name not in (backend, IN_TREE) for verdict in selection.verdicts if verdict.key in keys
            ):
                lines.setdefault(
                    (subject.op.__name__, *keys),
                    f"{subject.op.__name__}: {' and '.join(keys)} serve {selection.call}; "
                    f'a user settles it by: with tileops.selection(prefer="{backend}"): …',
                )
    return tuple(lines.values())


def _ambiguous(subject: Subject, owners: set[str] | None) -> Iterator[Selection]:
    """The selections of sample calls that are ambiguous between the subject and others of these owners."""
    candidates = [
        one for one in implementations(subject.op, subject.interface_name) if owners is None or one.owner.name in owners
    ]
    for call in askable(subject):
        selection = _selection(subject, candidates, call)
        if selection.failure is Failure.AMBIGUOUS and subject.implementation.full_key in selection.contenders:
            yield selection


def _selection(subject: Subject, candidates: Sequence[Implementation], call: CallSpec) -> Selection:
    return select(subject.op.__name__, subject.interface_name, candidates, call)
