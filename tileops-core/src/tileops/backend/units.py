"""Units: what one owner registers, taken whole or not at all.

Everything that is registered belongs to an owner, the distribution that registered it or `local`: kernels,
detectors and builders of targets, readers of device facts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch

from tileops.catalogue import find_op
from tileops.device import FactsReader
from tileops.errors import RegistrationError
from tileops.kernels.declarations import check_kernel_class
from tileops.kernels.kernel_base import Kernel
from tileops.verdict import Owner

LOCAL: Final = Owner("local")
"""The owner of what a program registers itself."""

BUILTIN: Final = "BUILTIN"
"""As `target=`, or as the default target: no target takes the op over, kernel selection serves it."""

DeviceClaim = Callable[[torch.device], bool]
"""Says of a device whether a target is for it."""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A kernel class under a key: one candidate of its interfaces.

    Args:
        key: The key as its owner wrote it.
        cls: The class.
        owner: Who registered it.
    """

    key: str
    cls: type[Kernel[Any]]
    owner: Owner

    @property
    def full_key(self) -> str:
        """The key as every table and message writes it: `held_row`, `acme:row`."""
        return self.owner.full_key(self.key)


@dataclasses.dataclass(frozen=True)
class Builder:
    """What builds a target's kernel for one op.

    Args:
        op: The op's name.
        target: The target's name.
        build: Called `build(*TensorSpec | None in signature order, **params)`; returns a callable.
        owner: Who registered it.
        per_op: Whether each op object has a kernel of its own, instead of one for all equal ops.
    """

    op: str
    target: str
    build: Callable[..., Any]
    owner: Owner
    per_op: bool = False


@dataclasses.dataclass(frozen=True)
class Detector:
    """What says which devices a target is for.

    Args:
        target: The target's name.
        detect: Called `detect(device)`.
        owner: Who registered it.
    """

    target: str
    detect: DeviceClaim
    owner: Owner


@dataclasses.dataclass(frozen=True)
class Unit:
    """What one owner registered: taken whole or not at all.

    Args:
        owner: The owner.
        kernels: Its implementations, with the op each is for.
        builders: Its builders.
        detectors: Its detectors.
        readers: Its readers of device facts, by device type.
        notes: What it says about itself.
        observed: What its import did to the process besides registering.
    """

    owner: Owner
    kernels: tuple[tuple[str, Implementation], ...] = ()
    builders: tuple[Builder, ...] = ()
    detectors: tuple[Detector, ...] = ()
    readers: tuple[tuple[str, FactsReader], ...] = ()
    notes: tuple[str, ...] = ()
    observed: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing at all was registered."""
        return not (self.kernels or self.builders or self.detectors or self.readers)

    def with_kernel(self, op: str, key: str, cls: type[Kernel[Any]]) -> Unit:
        """This unit and one more implementation; itself where the very same is in it already."""
        _check_name("an op", op, "the name of its class, such as 'LayerNormFwdOp'")
        for known_op, known in self.kernels:
            if (known_op, known.key) == (op, key):
                if known.cls is cls:
                    return self
                raise RegistrationError(
                    f"{op} has {self.owner.full_key(key)!r} already, {_name(known.cls)}; {_name(cls)} needs another "
                    f"key, or unregister_kernel_type({op!r}, {key!r}) first"
                )
        _check_against_op(op, key, cls)
        return dataclasses.replace(self, kernels=(*self.kernels, (op, Implementation(key, cls, self.owner))))

    def with_builder(self, op: str, target: str, build: Callable[..., Any], *, per_op: bool = False) -> Unit:
        """This unit and one more builder; itself where the very same is in it already."""
        _check_name("an op", op, "the name of its class, such as 'LayerNormFwdOp'")
        _check_target(target, f"the builder of target {target!r} for {op}", build)
        builder = Builder(op, target, build, self.owner, per_op)
        return self if builder in self.builders else self._extended(builders=(*self.builders, builder))

    def with_detector(self, target: str, detect: DeviceClaim) -> Unit:
        """This unit and one more detector; itself where the very same is in it already."""
        _check_target(target, f"the detector of target {target!r}", detect)
        detector = Detector(target, detect, self.owner)
        return self if detector in self.detectors else self._extended(detectors=(*self.detectors, detector))

    def with_reader(self, device_type: str, read: FactsReader) -> Unit:
        """This unit and one more reader of device facts; itself where the very same is in it already."""
        _check_name("a device type", device_type, "torch's name for it, such as 'npu'")
        if not callable(read):
            raise RegistrationError(f"the reader of the facts of {device_type!r} is {read!r}, which nobody can call")
        if device_type in ("cuda", "cpu"):
            raise RegistrationError(f"the facts of {device_type!r} are read by tileops itself")
        reader = (device_type, read)
        return self if reader in self.readers else self._extended(readers=(*self.readers, reader))

    def _extended(self, **longer: tuple[Any, ...]) -> Unit:
        """This unit with a longer table, in which nothing is claimed twice."""
        extended = dataclasses.replace(self, **longer)
        claims = tuple(extended.claims())
        twice = next((claim for claim in claims if claims.count(claim) > 1), None)
        if twice is not None:
            raise RegistrationError(f"{twice} already")
        return extended

    def claims(self) -> Iterator[str]:
        """What nobody else may register, each as the beginning of the sentence that says so."""
        yield from (f"target {builder.target!r} has a builder for {builder.op}" for builder in self.builders)
        yield from (f"target {detector.target!r} has a detector" for detector in self.detectors)
        yield from (f"the facts of {device_type!r} have a reader" for device_type, _ in self.readers)

    def with_note(self, note: str) -> Unit:
        """This unit and one more note."""
        _check_name("a note", note, "a sentence")
        return self if note in self.notes else dataclasses.replace(self, notes=(*self.notes, note))

    def named(self) -> Iterator[tuple[str, str]]:
        """What can be named, by op: the keys of its kernels, and its targets."""
        yield from ((op, implementation.key) for op, implementation in self.kernels)
        yield from ((builder.op, builder.target) for builder in self.builders)

    def lines(self) -> tuple[str, ...]:
        """What is registered, as lines for a reader."""
        kernels = (f"{op}: {implementation.full_key}" for op, implementation in self.kernels)
        builders = (f"{builder.op}: target {builder.target}" for builder in self.builders)
        detectors = (f"detector of target {detector.target}" for detector in self.detectors)
        readers = (f"device facts of {device_type}" for device_type, _ in self.readers)
        return (*kernels, *builders, *detectors, *readers)


def _check_name(what: str, given: object, wanted: str) -> None:
    if not isinstance(given, str) or not given:
        raise RegistrationError(f"{given!r} is not {what}: give {wanted}")


def _check_against_op(op: str, key: str, cls: type[Kernel[Any]]) -> None:
    """Check the class against its op. One that this release does not have is checked when it appears."""
    known = find_op(op)
    if known is not None:
        check_kernel_class(key, cls, known.interfaces.values())


def _check_target(target: object, what: str, function: object) -> None:
    """Refuse a target that cannot be given as `target=`, and what cannot be called."""
    if not isinstance(target, str) or not target or target == BUILTIN:
        raise RegistrationError(f"a target cannot be called {target!r}; give a name such as 'acme'")
    if not callable(function):
        raise RegistrationError(f"{what} is {function!r}, which nobody can call")


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def check_claims(unit: Unit, units: Iterable[Unit]) -> None:
    """Raise where `unit` claims what somebody else has: a builder's or a detector's target, a device type."""
    taken = {claim: other.owner for other in units if other.owner != unit.owner for claim in other.claims()}
    for claim in unit.claims():
        if claim in taken:
            raise RegistrationError(f"{claim} already, from {taken[claim].distribution or taken[claim].name}")
