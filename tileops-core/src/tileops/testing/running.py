"""Build an entry, run it on an interface's samples, and compare with the interface's reference."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tileops.call_spec import CallSpec
from tileops.kernels.configurations import Choice, Take, take_default, taking
from tileops.kernels.kernel_base import KernelInterface
from tileops.ops.entries import run_factory
from tileops.testing.global_state import changes, read_state
from tileops.testing.subjects import Subject

Tensors = Sequence["Tensor | None"]


@dataclasses.dataclass(frozen=True)
class Built:
    """An entry.

    Args:
        entry: What the factory returned.
        moved: What building it changed of the global state, as a clause; empty where nothing was.
        choices: The kernels of the entry that list configurations.
    """

    entry: Callable[..., Any]
    moved: str
    choices: tuple[Choice, ...]


@functools.lru_cache(maxsize=1024)
def built(subject: Subject, call: CallSpec) -> Built:
    """The entry that the implementation's own factory builds for `call`: no two calls share one."""
    return built_in(subject, call, take_default)


def built_in(subject: Subject, call: CallSpec, take: Take) -> Built:
    """The same in the configurations that `take` says, built anew."""
    _, factory = subject.cls.entry_for(call)
    before = read_state()
    with taking(take) as build:
        entry = run_factory(subject.implementation, call, factory)
    return Built(entry, changes(before, read_state()), build.choices)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one run gave.

    Args:
        arguments: The tensors that it was given, afterwards.
        results: What it returned, by the name that messages use.
        written: The arguments that it may write, by name.
    """

    arguments: tuple[Tensor | None, ...]
    results: dict[str, Tensor]
    written: dict[str, Tensor]

    @property
    def all(self) -> dict[str, Tensor]:
        """Results, then written arguments: in the order of the reference's results."""
        return {**self.results, **{f"{name}, which is written,": tensor for name, tensor in self.written.items()}}


def run(interface: type[KernelInterface[Any]], entry: Callable[..., Any], tensors: Tensors) -> Outcome:
    """Run an entry on copies of `tensors`."""
    arguments = tuple(None if tensor is None else tensor.clone() for tensor in tensors)
    results = entry(*arguments)
    _finish(arguments)
    names = argument_names(interface)
    written = {name: value for name, value in zip(names, arguments) if name in interface.writes and value is not None}
    return Outcome(arguments, listed(results), written)


def _finish(tensors: Tensors) -> None:
    """Wait for the device, so that a fault shows in the run that made it."""
    if any(tensor is not None and tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()


def argument_names(interface: type[KernelInterface[Any]]) -> tuple[str, ...]:
    """The names of the arguments of `forward`."""
    return tuple(inspect.signature(interface.forward).parameters)[1:]


def listed(results: object) -> dict[str, Tensor]:
    """The tensors of a result, absent ones left out, by the name that messages use."""
    several = isinstance(results, (tuple, list))
    values = cast("Sequence[object]", results) if several else [results]
    strange = next((value for value in values if not isinstance(value, (Tensor, type(None)))), None)
    if strange is not None:
        raise TypeError(f"it returned a {type(strange).__qualname__}, where tensors are expected")
    present = [value for value in values if isinstance(value, Tensor)]
    return {f"result {place}" if several else "the result": value for place, value in enumerate(present)}


def widened(tensors: Tensors) -> tuple[Tensor | None, ...]:
    """The tensors in float64, where they are floating point."""
    return tuple(tensor.double() if tensor is not None and tensor.is_floating_point() else tensor for tensor in tensors)


def disagreement(interface: type[KernelInterface[Any]], call: CallSpec, tensors: Tensors, outcome: Outcome) -> str:
    """How an outcome differs from the reference, as a sentence; empty where it agrees within the tolerance."""
    right = list(listed(interface.reference(call, *widened(tensors))).values())
    made = list(listed(interface.reference(call, *tensors)).values())
    came = outcome.all
    if len(came) != len(right):
        return f"it gives {len(came)} tensors ({', '.join(came)}); the reference gives {len(right)}"
    found = (_difference(interface, name, *each) for (name, *each) in zip(came, came.values(), right, made))
    return next(filter(None, found), "")


def _difference(interface: type[KernelInterface[Any]], name: str, came: Tensor, right: Tensor, made: Tensor) -> str:
    for what in ("shape", "dtype", "device"):
        if getattr(came, what) != getattr(made, what):
            return f"{name} has {what} {_shown(getattr(came, what))}; the reference gives {_shown(getattr(made, what))}"
    if not came.is_floating_point():
        return "" if torch.equal(came, made) else f"{name} differs from the reference"
    relative, absolute = interface.tolerance(came.dtype)
    right = right.double()  # a gradient of a float32 weight is in float32, also beside an x in float64
    far = ~torch.isclose(came.double(), right, rtol=relative, atol=absolute, equal_nan=True)
    if not far.any():
        return ""
    worst = int(((came.double() - right).abs().nan_to_num(torch.inf) * far).argmax())
    values = f"{came.reshape(-1)[worst].item()!r} where it gives {right.reshape(-1)[worst].item()!r}"
    return (
        f"{name} differs from the reference in float64 in {int(far.sum())} of {far.numel()} elements, at most in element "
        f"{worst}: {values} (relative {relative:g} and absolute {absolute:g} are allowed)"
    )


def _shown(value: object) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bits in the same shape."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    left, right = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(left, right)


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors lie in one storage."""
    return one.numel() > 0 and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
