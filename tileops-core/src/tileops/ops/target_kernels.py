"""Kernels of targets: what a builder makes for the specs and parameters of a call, and what it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tileops.backend.loading import load
from tileops.backend.registration import when_registry_changes
from tileops.backend.targets import TensorSpec, forget_claims
from tileops.backend.units import Builder
from tileops.device import is_capturing, made_current
from tileops.errors import (
    BackendError,
    BuildError,
    CaptureError,
    DeclarationError,
    Declined,
    SelectionError,
    TargetDeclinedError,
    selection_error,
)
from tileops.ops.checks import laid_out
from tileops.ops.offers import Offer, OpClass, offer_of, passed_by
from tileops.ops.progress import showing_build
from tileops.ops.tables import build_once, remember
from tileops.ops.target_results import settled
from tileops.scopes import active, in_force
from tileops.torch_boundary import note_written, written_positions
from tileops.verdict import Failure, Selection

TARGET_KERNELS: Final = 1 << 12
"""Kernels of targets that one op class remembers: one for each combination of shapes, dtypes and parameters."""

Specs = tuple[TensorSpec | None, ...]


@dataclasses.dataclass
class TargetKernel:
    """What a target runs in place of an op.

    Args:
        run: What the builder returned.
        builder: What built it.
        is_checked: Whether its results were what the op returns.
    """

    run: Callable[..., Any]
    builder: Builder
    is_checked: bool = False


@dataclasses.dataclass(frozen=True)
class _Refusal:
    """A builder's answer that it declines what it was asked with."""

    reason: str


class _Tables:
    """What is known of targets between two changes of what is registered."""

    def __init__(self) -> None:
        self.offers: dict[Any, Offer | None] = {}
        self.yields: dict[Any, bool] = {}
        self._shared: dict[OpClass, dict[Any, TargetKernel | _Refusal]] = {}
        self._own: WeakKeyDictionary[Any, dict[Any, TargetKernel | _Refusal]] = WeakKeyDictionary()

    def answers(self, op: Any, builder: Builder) -> dict[Any, TargetKernel | _Refusal]:
        """The builder's answers: one table for all ops of a class, or one that dies with the op."""
        if builder.per_op:
            return self._own.setdefault(op, {})
        return self._shared.setdefault(cast("OpClass", type(op)), {})


_tables = _Tables()


def forget_target_kernels() -> None:
    """Begin new tables. A call that began before stores into the old ones, which nobody reads."""
    global _tables  # noqa: PLW0603 - the one place that swaps them
    _tables = _Tables()
    forget_claims()


when_registry_changes(forget_target_kernels)


def specs_of(tensors: Sequence[Tensor | None], *, on: torch.device | None = None) -> Specs:
    """What a builder is asked with, in signature order; as if the tensors were on the device `on`, where given."""
    specs = tuple(TensorSpec.of(tensor) for tensor in tensors)
    return specs if on is None else tuple(spec and spec._replace(device=on) for spec in specs)


def target_kernel(op: Any, specs: Specs, kernels: Callable[[], Selection]) -> TargetKernel | None:
    """The kernel of the target that takes this call of `op` over; None where kernel selection serves it.

    Args:
        op: The op.
        specs: The specs of the call's tensors.
        kernels: Asks what kernel selection says to the call: the program may prefer a kernel to the target.

    Raises:
        UnknownTargetError: Nobody registered the target that is named, or it has nothing for the op.
        ScopeError: A scope leaves out the target that the op names.
        AmbiguousTargetError: Several targets claim the call's device.
        TargetDeclinedError: The target that is named declined the call.
        BuildError: The builder failed. Nothing is stored; the next call asks again.
    """
    tables, offer = _offer(op, cast("TensorSpec", specs[0]).device)
    if offer is None or (offer.may_yield and _yields(tables, op, offer, specs, kernels)):
        return None
    answer = _answer(tables, op, offer, specs)
    if isinstance(answer, TargetKernel):
        return answer
    if offer.named:
        raise TargetDeclinedError(
            f"{type(op).__name__}: {_declining(offer, answer)}, and nothing else is asked: {offer.why}"
        )
    return None


def _offer(op: Any, device: torch.device) -> tuple[_Tables, Offer | None]:
    """The target that a call on `device` is offered to, with the tables of one and the same registry."""
    tables, key = _tables, (cast("OpClass", type(op)), op.target, device, active())
    if key not in tables.offers:
        load()
        tables = _tables
        remember(tables.offers, key, offer_of(cast("OpClass", type(op)), op.target, device), TARGET_KERNELS)
    return tables, tables.offers[key]


def _yields(tables: _Tables, op: Any, offer: Offer, specs: Specs, kernels: Callable[[], Selection]) -> bool:
    """Whether the program prefers a kernel that serves this call to the target."""
    key = (cast("OpClass", type(op)), _key(op, offer, specs), active())
    if key not in tables.yields:
        remember(tables.yields, key, offer.yields_to(kernels()) is not None, TARGET_KERNELS)
    return tables.yields[key]


def _answer(tables: _Tables, op: Any, offer: Offer, specs: Specs) -> TargetKernel | _Refusal:
    """What the builder said to these specs and parameters; it is asked once."""
    answers = tables.answers(op, offer.builder)
    key = _key(op, offer, specs)
    answer = answers.get(key)
    if answer is None:
        what = f"{offer.title}, for {op!r},"
        answer = build_once(answers, key, lambda: _build(op, offer, specs), what, most=TARGET_KERNELS)
    return answer


def _key(op: Any, offer: Offer, specs: Specs) -> tuple[Any, ...]:
    """Exactly what the builder is asked with: 1, 1.0 and True are three parameters."""
    key = offer.builder.target, specs, tuple(_typed(value) for value in op.params.values())
    try:
        hash(key)
    except TypeError as error:
        raise DeclarationError(f"{op!r} has a parameter that cannot key a table ({error}); a tuple can") from None
    return key


def _typed(value: object) -> tuple[type[Any], object]:
    if isinstance(value, tuple):
        return tuple, tuple(map(_typed, cast("tuple[object, ...]", value)))
    return type(value), value


def _build(op: Any, offer: Offer, specs: Specs) -> TargetKernel | _Refusal:
    name, device = type(op).__name__, cast("TensorSpec", specs[0]).device
    if is_capturing(device):
        raise CaptureError(
            f"{name}: {offer.title} has no kernel ready for this call, while a CUDA graph is captured; before the "
            "capture, call the op once, or its prepare, with such tensors"
        )
    try:
        with showing_build(f"of {offer.title}"), made_current(device), in_force(None):
            kernel = offer.builder.build(*specs, **op.params)
    except Declined as declined:
        return _Refusal(str(declined) or "no reason given")
    except Exception as error:
        raise BuildError(
            f"{name}: {offer.title} could not build its kernel: {type(error).__name__}: {error}\n"
            "  no other kernel is taken in its place; a builder leaves a call to others by raising "
            "tileops.backend.Declined, and target=BUILTIN leaves all targets out"
        ) from error
    if not callable(kernel):
        raise BuildError(f"{name}: the builder of {offer.title} returned {kernel!r}, which nobody can call")
    return TargetKernel(kernel, offer.builder)


def run_target_kernel(kernel: TargetKernel, op: Any, tensors: Sequence[Tensor | None]) -> Any:
    """Run a target's kernel: inputs arrive contiguous and aligned, arguments that it may write as they are.

    Its results are compared with what the op returns until they were right once, and wherever an input was laid
    out anew: results are then in the memory order that the op promises for the input as it came.
    """
    writes = written_positions(op)
    arguments = laid_out(tensors, writes)
    try:
        results = kernel.run(*arguments)
    except Exception as error:
        _note_who_ran(error, kernel.builder)
        raise
    note_written(*(tensors[position] for position in writes))
    as_they_came = all(argument is tensor for argument, tensor in zip(arguments, tensors))
    if kernel.is_checked and as_they_came:
        return results
    promised = settled(op, tensors, results, kernel.builder)
    kernel.is_checked = as_they_came and promised is results
    return promised


def _note_who_ran(error: Exception, builder: Builder) -> None:
    """Add to an exception of a target's kernel whose it was. Python ≥ 3.11."""
    if hasattr(error, "add_note"):
        shipped = builder.owner.distribution or builder.owner.name
        cast("Any", error).add_note(f"raised in the kernel of target {builder.target!r} for {builder.op} ({shipped})")


# ------------------------------------------------------------------------------------------------------ explaining


def with_target(cls: OpClass, selection: Selection, op: Any = None, specs: Specs | None = None) -> Selection:
    """`selection` of an op's kernels with what targets do to the call, without asking a builder.

    Args:
        cls: The op class.
        selection: What its kernels say to the call.
        op: The op, where there is one: it may name a target.
        specs: The specs of the call's tensors, where there are any: its target may have declined them before.
    """
    call = selection.call
    device = call.device if call.stated_on is None else None
    try:
        offer = offer_of(cls, getattr(op, "target", None), device)
    except BackendError as error:
        return _failed(selection, str(error))
    reason = None if offer is None else offer.yields_to(selection)
    if offer is None or reason is not None:
        lines = passed_by(cls, device) if reason is None and device is not None else (reason,)
        return _remarked(selection, *lines)
    answer = None if specs is None else _tables.answers(op, offer.builder).get(_key(op, offer, specs))
    if not isinstance(answer, _Refusal):
        line = f"{offer.title} takes the op over: {offer.why}"
        return dataclasses.replace(
            selection, key=None, failure=None, contenders=(), remarks=(line,), target=offer.builder.target
        )
    line = _declining(offer, answer)
    if offer.named:
        return _failed(selection, line)
    return _remarked(selection, line)


def _remarked(selection: Selection, *lines: str | None) -> Selection:
    said = tuple(line for line in lines if line is not None)
    return dataclasses.replace(selection, remarks=(*said, *selection.remarks)) if said else selection


def _declining(offer: Offer, answer: _Refusal) -> str:
    return f"{offer.title} declined this call: {answer.reason}"


def _failed(selection: Selection, why: str) -> Selection:
    return dataclasses.replace(selection, key=None, failure=Failure.TARGET, contenders=(), remarks=(why,))


def with_refusal(op: Any, specs: Specs, error: Exception) -> Exception:
    """The error of kernel selection with the target that declined the call before; any other error as it is."""
    if not isinstance(error, SelectionError):
        return error
    told = with_target(cast("OpClass", type(op)), error.selection, op, specs)
    return error if told.failure is None else selection_error(told)
