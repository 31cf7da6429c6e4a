"""Targets: a backend's name for a set of kernels that takes over whole ops, and which target a call is offered to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from tileops.backend.loading import load
from tileops.backend.registration import (
    BUILTIN,
    Builder,
    Detector,
    registry,
    update_registry,
    when_registry_changes,
)
from tileops.catalogue import meant
from tileops.device import warn_user
from tileops.errors import AmbiguousTargetError, KernelFaultWarning, UnknownTargetError
from tileops.verdict import Owner


class TensorSpec(NamedTuple):
    """What a builder learns of one input tensor. Holds no tensor.

    Args:
        device: Its device, with its index.
        dtype: Its dtype.
        shape: Its sizes, in elements.
    """

    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor | None) -> TensorSpec | None:
        """The spec of `tensor`; None for an absent input."""
        return None if tensor is None else cls(tensor.device, tensor.dtype, tuple(tensor.shape))


@dataclasses.dataclass(frozen=True)
class Offer:
    """A target that a call is offered to.

    Args:
        builder: What builds the target's kernel for the op.
        why: Why this target, as a clause: "target= names it".
        named: Whether somebody named it. Then nothing else serves the call where it declines.
    """

    builder: Builder
    why: str
    named: bool

    @property
    def title(self) -> str:
        """The target and who ships it: `target 'acme' (tileops-backend-acme 1.0)`."""
        return _title(self.builder.target, self.builder.owner)


# ------------------------------------------------------------------------------------------- what users ask and set


def registered_targets(op: str | None = None) -> list[str]:
    """The names of all targets, or of those that can take the op called `op` over; sorted."""
    load()
    builders = (builder.target for builder in registry().builders() if op in (None, builder.op))
    detectors = (detector.target for detector in registry().detectors() if op is None)
    return sorted({*builders, *detectors})


def set_default_target(target: str | None) -> None:
    """Make `target` take over every op of the process that names no target itself, before any detector is asked.

    Args:
        target: A target's name; `BUILTIN` where no target shall take anything over; None where detection decides.

    Raises:
        UnknownTargetError: Nobody registered the target.
    """
    if target not in (None, BUILTIN):
        _check_known("set_default_target", target)
    update_registry(lambda old: dataclasses.replace(old, default_target=target))


def default_target() -> str | None:
    """The target of ops that name none, or `BUILTIN`; None where detection decides."""
    return registry().default_target


# -------------------------------------------------------------------------------------------- which target, and why


def may_be_taken_over(op: str) -> bool:
    """Whether a call of the op called `op` that names no target could be offered to one, on whatever device."""
    now = registry()
    if not now.loaded:
        return True  # nobody has looked yet
    if now.default_target is not None:
        return now.default_target != BUILTIN
    detected = {detector.target for detector in now.detectors()}
    return any(builder.op == op and builder.target in detected for builder in now.builders())


def offer_of(op: str, named: str | None, device: torch.device | None) -> Offer | None:
    """The target that a call is offered to; None where kernel selection serves it.

    Args:
        op: The op class's name.
        named: The op's `target=`.
        device: The call's device; None for one that is not there, which no detector is asked about.

    Raises:
        UnknownTargetError: Nobody registered the target that is named, or it has nothing for the op.
        AmbiguousTargetError: Several targets claim the device.
    """
    load()
    chosen = registry().default_target if named is None else named
    if chosen == BUILTIN:
        return None
    if chosen is not None:
        why = "set_default_target names it" if named is None else "target= names it"
        return Offer(_builder_of(op, chosen), why, named=True)
    return None if device is None else _detected(op, device)


def _builder_of(op: str, target: str) -> Builder:
    """The builder of `target` for the op called `op`; raises an `UnknownTargetError` that lists the known ones."""
    builders = registry().builders()
    found = next((builder for builder in builders if (builder.op, builder.target) == (op, target)), None)
    if found is not None:
        return found
    _check_known(op, target)
    raise UnknownTargetError(f"target {target!r} has nothing for {op}; it takes over: {_ops_of(target)}")


def _check_known(asker: str, target: str | None) -> None:
    known = tuple(registered_targets())
    if target not in known:
        listed = ", ".join(known) or "none is registered"
        hint = meant(str(target), (*known, BUILTIN))
        raise UnknownTargetError(f"{asker}: no target is called {target!r}; known targets: {listed}{hint}")


def _ops_of(target: str) -> str:
    return ", ".join(sorted({one.op for one in registry().builders() if one.target == target})) or "nothing"


# --------------------------------------------------------------------------------------------------------- detection


def _detected(op: str, device: torch.device) -> Offer | None:
    """The target that claims `device` and can take the op over."""
    claims = {detector.target: detector for detector in claims_on(device)}
    able = [builder for builder in registry().builders() if builder.op == op and builder.target in claims]
    if len(able) > 1:
        raise AmbiguousTargetError(_conflict(op, device, [claims[builder.target] for builder in able]))
    return Offer(able[0], f"its detector claims {device}", named=False) if able else None


def _conflict(op: str, device: torch.device, claims: Iterable[Detector]) -> str:
    """The error of two targets that claim one device: who they are, and what settles it."""
    ordered = sorted(claims, key=lambda detector: detector.target)
    titles = " and ".join(_title(detector.target, detector.owner) for detector in ordered)
    first = ordered[0]
    return (
        f"{op}: {titles} each claim {device}; choose one: {op}(…, target={first.target!r}), "
        f"tileops.backend.set_default_target({first.target!r}), or leave the other's backend out"
    )


def unable_claims(op: str, device: torch.device) -> tuple[str, ...]:
    """The lines of an error that say which targets claim `device` and have nothing for the op called `op`."""
    able = {builder.target for builder in registry().builders() if builder.op == op}
    return tuple(
        f"{_title(detector.target, detector.owner)} claims {device} and registers no kernel builder for {op}; "
        f"it takes over: {_ops_of(detector.target)}"
        for detector in claims_on(device)
        if detector.target not in able
    )


def _title(target: str, owner: Owner) -> str:
    return f"target {target!r} ({owner.distribution or owner.name})"


_claims: dict[torch.device, tuple[Detector, ...]] = {}
_warned: Final[set[tuple[Detector, str]]] = set()


def forget_claims() -> None:
    """Ask every detector again. A detection that began before stores into a table that nobody reads."""
    global _claims  # noqa: PLW0603 - the one place that swaps it
    _claims = {}


when_registry_changes(forget_claims)


def claims_on(device: torch.device) -> tuple[Detector, ...]:
    """The detectors that claim `device`: asked once, and again when something is registered."""
    claims = _claims
    found = claims.get(device)
    if found is None:
        found = claims[device] = tuple(detector for detector in registry().detectors() if _claims_it(detector, device))
    return found


def _claims_it(detector: Detector, device: torch.device) -> bool:
    """Whether a target is for `device`. A detector that raises claims nothing, and its distribution is named, once."""
    try:
        return bool(detector.detect(device))
    except Exception as error:
        if (detector, type(error).__name__) not in _warned:
            _warned.add((detector, type(error).__name__))
            warn_user(
                f"the detector of {_title(detector.target, detector.owner)} raised {type(error).__name__}: {error}; "
                f"it claims nothing on {device}",
                KernelFaultWarning,
            )
        return False
