"""Which calls a kernel is asked about and run with: derived from the samples that its interface offers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tileops.call_spec import CallSpec
from tileops.device import KNOWN_BOARDS, ArchRange, DeviceFacts
from tileops.kernels.kernel_base import TOLERANCES, Kernel, KernelInterface, available
from tileops.testing.broken_rule import NotTried
from tileops.testing.subjects import Subject
from tileops.testing.variations import with_dtype
from tileops.verdict import Answer


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much the conformance tests try of each kernel.

    Args:
        samples: Sample calls that it is built for and run with, chosen so that they differ as much as they can.
            A kernel that is compiled for seconds wants few.
        elements: Elements that the arguments of a sample may hold together; larger samples are left out.
        specs: Generated call specs that `refusal` and `entry_for` are asked about.
    """

    samples: int = 12
    elements: int = 1 << 20
    specs: int = 100


# ------------------------------------------------------------------------------------------------------- asking


def sample_calls(interface: type[KernelInterface[Any]], device: torch.device) -> tuple[CallSpec, ...]:
    """The interface's sample calls on `device`, as tables hold them."""
    try:
        calls = interface.sample_calls(device)
    except NotImplementedError as missing:
        raise NotTried(f"{missing}: an interface without samples cannot be tried") from None
    return tuple(call.normalised() for call in calls)


def askable(subject: Subject) -> tuple[CallSpec, ...]:
    """The sample calls that dispatch would ask the implementation about: it is available there.

    A device need not be there: on CUDA the facts of every known board are stated, on device types that only a
    backend knows those of the architectures that the class names.
    """
    cls, owner = subject.cls, subject.implementation.owner
    calls = (call for device_type in sorted(cls.devices) for call in calls_on(subject.interface, cls, device_type))
    return tuple(call for call in calls if available(cls, call, owner)[0] is Answer.SERVES)


def calls_on(interface: type[KernelInterface[Any]], cls: type[Kernel[Any]], device_type: str) -> Iterator[CallSpec]:
    """The sample calls on a device type, with stated facts where it has some."""
    device = _device(device_type)
    if device is None:
        return
    calls = sample_calls(interface, device)
    if device_type == "cpu":
        yield from calls
    for facts in () if device_type == "cpu" else _facts(cls, device_type):
        yield from (call.on(facts) for call in calls)


def _device(device_type: str) -> torch.device | None:
    """The first device of a type; None of a type that torch has not heard of in this process."""
    try:
        return torch.device(device_type) if device_type == "cpu" else torch.device(device_type, 0)
    except RuntimeError:
        return None


def _facts(cls: type[Kernel[Any]], device_type: str) -> Iterable[Any]:
    if device_type == "cuda":
        return KNOWN_BOARDS
    archs = cls.supported_archs
    if archs is None:
        return [DeviceFacts()]
    numbers = (archs.lowest,) if isinstance(archs, ArchRange) else cast("Iterable[int]", archs)
    return [DeviceFacts(arch=arch) for arch in numbers]


# ------------------------------------------------------------------------------------------------------ running


def is_here(device_type: str) -> bool:
    """Whether this machine has a device of that type."""
    if device_type in ("cpu", "cuda"):
        return device_type == "cpu" or torch.cuda.is_available()
    try:
        return bool(torch.get_device_module(device_type).is_available())
    except (AttributeError, RuntimeError):
        return False


def runnable(subject: Subject, limits: Limits) -> tuple[CallSpec, ...]:
    """The sample calls that the implementation is built for and run with on this machine, in every dtype it serves.

    Raises:
        NotTried: There are none, and why.
    """
    here = [device_type for device_type in sorted(subject.cls.devices) if is_here(device_type)]
    if not here:
        raise NotTried(f"it runs on {', '.join(sorted(subject.cls.devices))}, and this machine has no such device")
    calls = [call for device_type in here for call in _served(subject, torch.device(device_type))]
    if not calls:
        raise NotTried(f"it serves none of the sample calls of {subject.interface.__qualname__} on {', '.join(here)}")
    chosen = most_different(calls, subject.interface, limits)
    if not chosen:
        raise NotTried(f"no sample call that it serves has tensors of up to {limits.elements} elements")
    return chosen


def _served(subject: Subject, device: torch.device) -> Iterator[CallSpec]:
    """The sample calls on `device`, and their like in other dtypes, that the implementation serves."""
    calls = sample_calls(subject.interface, device)
    for call in dict.fromkeys((*calls, *_in_further_dtypes(calls))):
        if serves(subject, call):
            yield call


def _in_further_dtypes(calls: Sequence[CallSpec]) -> Iterator[CallSpec]:
    """Samples in the dtypes that no sample has and an implementation may serve all the same."""
    sampled = {value for call in calls for value in _values_of(call) if isinstance(value, torch.dtype)}
    further = [dtype for dtype in TOLERANCES if dtype not in sampled] if sampled else []
    return (with_dtype(call, dtype) for dtype in further for call in calls)


def serves(subject: Subject, call: CallSpec) -> bool:
    """Whether the implementation is available for the call and does not refuse it."""
    cls = subject.cls
    if available(cls, call, subject.implementation.owner)[0] is not Answer.SERVES:
        return False
    try:
        return cls.refusal(call) is None
    except Exception:
        return False  # as dispatch takes it; the rule that refusals are total says so


def _values_of(call: CallSpec) -> tuple[Any, ...]:
    """The values of a spec's fields."""
    return tuple(getattr(call, field.name) for field in dataclasses.fields(call))


def most_different(
    calls: Sequence[CallSpec], interface: type[KernelInterface[Any]], limits: Limits
) -> tuple[CallSpec, ...]:
    """At most `limits.samples` of the calls: each in turn the one with the most values that none before it had.

    Calls for which the interface has no tensors, and those with too many elements, are left out.
    """
    seen, chosen, rest = set[tuple[str, Any]](), list[CallSpec](), list(calls)
    while rest and len(chosen) < limits.samples:
        call = max(rest, key=lambda one: len(_facts_of(one) - seen))
        rest.remove(call)
        if fits(interface, call, limits):
            chosen.append(call)
            seen |= _facts_of(call)
    return tuple(chosen)


def largest(calls: Sequence[CallSpec], interface: type[KernelInterface[Any]], limits: Limits) -> CallSpec:
    """The call whose sample tensors have the most elements."""
    return max(calls, key=lambda call: _elements(interface, call, limits.elements))


def _facts_of(call: CallSpec) -> frozenset[tuple[str, Any]]:
    return frozenset((field.name, getattr(call, field.name)) for field in dataclasses.fields(call))


# ------------------------------------------------------------------------------------------------------ tensors


def tensors_of(interface: type[KernelInterface[Any]], call: CallSpec, seed: int = 0) -> tuple[Tensor | None, ...]:
    """The interface's sample tensors for a call."""
    return interface.sample_tensors(call, torch.Generator().manual_seed(seed))


@functools.lru_cache(maxsize=4096)
def _elements(interface: type[KernelInterface[Any]], call: CallSpec, limit: int) -> int:
    """Elements of a call's sample tensors together."""
    with _SmallTensors(limit):
        return sum(tensor.numel() for tensor in tensors_of(interface, call) if tensor is not None)


class _TooLarge(Exception):  # noqa: N818 - no error: it ends the making of tensors
    pass


class _SmallTensors(TorchFunctionMode):
    """Ends whoever asks torch for a new tensor of more than `limit` elements, before there is one."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = (*args, *(kwargs or {}).values())
        if not any(isinstance(value, Tensor) for value in given):
            tuples = [cast("tuple[object, ...]", value) for value in given if isinstance(value, tuple)]
            sizes = tuples[0] if tuples else args
            if math.prod(size for size in sizes if isinstance(size, int)) > self._limit:
                raise _TooLarge
        return func(*args, **(kwargs or {}))


def fits(interface: type[KernelInterface[Any]], call: CallSpec, limits: Limits) -> bool:
    """Whether the interface has sample tensors for the call, and few enough elements in them.

    A call that was derived from a sample may be one that the interface has none for: it means nothing there.
    """
    try:
        return _elements(interface, call, limits.elements) <= limits.elements
    except Exception:
        return False
