"""Targets: a backend's name for a set of kernels that takes over whole ops; who they are and what they claim."""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple

import torch
from torch import Tensor

from tileops.backend.loading import load
from tileops.backend.registration import registry, update_registry, when_registry_changes
from tileops.backend.units import BUILTIN, Builder, Detector
from tileops.catalogue import meant
from tileops.device import warn_user
from tileops.errors import KernelFaultWarning, UnknownTargetError
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
    if target is not None and target != BUILTIN:
        _check_known("set_default_target", target)
    update_registry(lambda old: dataclasses.replace(old, default_target=target))


def default_target() -> str | None:
    """The target of ops that name none, or `BUILTIN`; None where detection decides."""
    return registry().default_target


def builder_of(op: str, target: str) -> Builder:
    """The builder of `target` for the op called `op`; raises an `UnknownTargetError` that lists the known ones."""
    builders = registry().builders()
    found = next((builder for builder in builders if (builder.op, builder.target) == (op, target)), None)
    if found is not None:
        return found
    _check_known(op, target)
    raise UnknownTargetError(f"target {target!r} has nothing for {op}; it takes over: {ops_of(target)}")


def _check_known(asker: str, target: str) -> None:
    known = tuple(registered_targets())
    if target not in known:
        listed = ", ".join(known) or "none is registered"
        raise UnknownTargetError(
            f"{asker}: no target is called {target!r}; known targets: {listed}{meant(target, known)}"
        )


def ops_of(target: str) -> str:
    """The ops that a target takes over, as messages list them."""
    return ", ".join(sorted({one.op for one in registry().builders() if one.target == target})) or "nothing"


def title_of(target: str, owner: Owner) -> str:
    """A target and who ships it: `target 'acme' (tileops-backend-acme 1.0)`."""
    return f"target {target!r} ({owner.distribution or owner.name})"


# --------------------------------------------------------------------------------------------------------- detection

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
                f"the detector of {title_of(detector.target, detector.owner)} raised {type(error).__name__}: {error}; "
                f"it claims nothing on {device}",
                KernelFaultWarning,
            )
        return False
