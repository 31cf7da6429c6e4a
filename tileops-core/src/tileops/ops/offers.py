"""Which target a call is offered to: the one that is named, the process default, or one that claims the device.

Scopes act on targets as on kernels: a target has its backend's name and its own, `acme:npu`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from tileops.backend.loading import load
from tileops.backend.registration import registry
from tileops.backend.targets import builder_of, claims_on, ops_of, title_of
from tileops.backend.units import BUILTIN, Builder
from tileops.errors import AmbiguousTargetError, ScopeError
from tileops.scopes import Scope, in_effect
from tileops.verdict import Selection

OpClass = type[Any]
"""An op class. `Op` itself lies above this module."""


@dataclasses.dataclass(frozen=True)
class Offer:
    """A target that a call is offered to.

    Args:
        builder: What builds the target's kernel for the op.
        why: Why this target, as a clause: "target= names it".
        named: Whether somebody named it. Then nothing else serves the call where it declines.
        scope: What the program says about whose kernels are taken.
    """

    builder: Builder
    why: str
    named: bool
    scope: Scope

    @property
    def title(self) -> str:
        """The target and who ships it: `target 'acme' (tileops-backend-acme 1.0)`."""
        return title_of(self.builder.target, self.builder.owner)

    @property
    def may_yield(self) -> bool:
        """Whether the program may prefer a kernel to this target."""
        return not self.named and _rank(self.scope, self.builder) > 0

    def yields_to(self, kernels: Selection) -> str | None:
        """Why the call goes to a kernel that the program prefers to this target; None where there is no such one."""
        if not self.may_yield:
            return None
        for verdict in kernels.verdicts:
            bare = verdict.key.removeprefix(f"{verdict.owner.name}:")
            if verdict.key in kernels.contenders and self.scope.rank(verdict.owner.name, bare) < _rank(
                self.scope, self.builder
            ):
                return f"{self.title} gives way to {verdict.key}: {verdict.favour}"
        return None


def _rank(scope: Scope, builder: Builder) -> int:
    return scope.rank(builder.owner.name, builder.target)


def may_be_taken_over(op: str) -> bool:
    """Whether a call of the op called `op` that names no target could be offered to one, on whatever device."""
    now = registry()
    if not now.loaded:
        return True  # nobody has looked yet
    if now.default_target is not None:
        return now.default_target != BUILTIN
    detected = {detector.target for detector in now.detectors()}
    return any(builder.op == op and builder.target in detected for builder in now.builders())


def offer_of(cls: OpClass, named: str | None, device: torch.device | None) -> Offer | None:
    """The target that a call is offered to; None where kernel selection serves it.

    Args:
        cls: The op class.
        named: The op's `target=`.
        device: The call's device; None for one that is not there, which no detector is asked about.

    Raises:
        UnknownTargetError: Nobody registered the target that is named, or it has nothing for the op.
        ScopeError: A scope leaves out the target that the op names.
        AmbiguousTargetError: Several targets claim the device.
    """
    load()
    scope, default = in_effect(cls), registry().default_target
    if named not in (None, BUILTIN):
        offer = Offer(builder_of(cls.__name__, named), "target= names it", named=True, scope=scope)
        reason = _left_out(offer.builder, scope)
        if reason is not None:
            raise ScopeError(f"{cls.__name__}: {offer.why}, {offer.title}, and it is {reason}")
        return offer
    if BUILTIN in (named, default):
        return None
    if default is not None:
        builder = builder_of(cls.__name__, default)
        if _left_out(builder, scope) is None:
            return Offer(builder, "set_default_target names it", named=True, scope=scope)
    return None if device is None else _detected(cls.__name__, device, scope)


def _left_out(builder: Builder, scope: Scope) -> str | None:
    """Why a scope leaves the target out; None where it does not."""
    return scope.admits(builder.owner.name, builder.target)[1]


# --------------------------------------------------------------------------------------------------------- detection


def _detected(op: str, device: torch.device, scope: Scope) -> Offer | None:
    """The target that claims `device` and can take the op over; of several, the one that the program prefers."""
    admitted = [builder for builder in _claiming(op, device) if _left_out(builder, scope) is None]
    ranks = [_rank(scope, builder) for builder in admitted]
    foremost = [builder for builder, rank in zip(admitted, ranks) if rank == min(ranks)]
    if not foremost:
        return None
    if len(foremost) > 1:
        raise AmbiguousTargetError(_conflict(op, device, foremost))
    favour = scope.favour(foremost[0].owner.name, foremost[0].target)
    why = f"its detector claims {device}" + ("" if favour is None else f", {favour}")
    return Offer(foremost[0], why, named=False, scope=scope)


def _claiming(op: str, device: torch.device) -> list[Builder]:
    """The builders for the op of targets that claim `device`, in order of the targets' names."""
    targets = {detector.target for detector in claims_on(device)}
    able = [builder for builder in registry().builders() if builder.op == op and builder.target in targets]
    return sorted(able, key=lambda builder: builder.target)


def _conflict(op: str, device: torch.device, able: Sequence[Builder]) -> str:
    """The error of targets that claim one device: who they are, and what settles it."""
    titles = " and ".join(title_of(builder.target, builder.owner) for builder in able)
    first, owner = able[0].target, able[0].owner
    name = owner.name if [builder.owner for builder in able].count(owner) == 1 else owner.full_key(first)
    return (
        f"{op}: {titles} each claim {device}; choose one: {op}(…, target={first!r}), "
        f'with tileops.selection(prefer="{name}"): …, or for the process '
        f"tileops.backend.set_default_target({first!r})"
    )


def passed_by(cls: OpClass, device: torch.device) -> tuple[str, ...]:
    """The lines that say which targets claim `device` for the op and are left out by what the program says."""
    scope = in_effect(cls)
    left_out = ((builder, _left_out(builder, scope)) for builder in _claiming(cls.__name__, device))
    return tuple(
        f"{title_of(builder.target, builder.owner)} claims {device} and is {reason}"
        for builder, reason in left_out
        if reason is not None
    )


def unable_claims(op: str, device: torch.device) -> tuple[str, ...]:
    """The lines of an error that say which targets claim `device` and have nothing for the op called `op`."""
    able = {builder.target for builder in registry().builders() if builder.op == op}
    return tuple(
        f"{title_of(detector.target, detector.owner)} claims {device} and registers no kernel builder for {op}; "
        f"it takes over: {ops_of(detector.target)}"
        for detector in claims_on(device)
        if detector.target not in able
    )
