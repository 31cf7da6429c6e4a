"""Kernels, the interfaces they implement, and the entries that calls reach.

A `KernelInterface` is itself a `Kernel`, so an implementation only subclasses the interface. An implementation
says which calls it serves by five declarations (`devices`, `supported_archs`, `refusal`, `general`,
`preferred_over`) and how it is built by `entry_for` and `configurations`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar, cast

import torch
from torch import Tensor

from tileops.call_spec import CallSpec
from tileops.kernels.configurations import NO_CONFIGURATION, Configuration, configuration_of
from tileops.record import quicken
from tileops.verdict import IN_TREE, Answer, Owner

Call = TypeVar("Call", bound=CallSpec)


class Kernel(Generic[Call]):
    """One kernel: what it declares, how it is built, how it is called.

    A class that declares nothing serves every call on CUDA devices of every architecture and has no precedence
    over anything.

    Args of the constructor: the call it is built for, or nothing. The constructor is private to the class and
    its `entry_for`; it may be slow, and runs with the call's device current.
    """

    devices: ClassVar[frozenset[str]] = frozenset({"cuda"})
    """Availability: the device types it runs on."""

    supported_archs: ClassVar[Container[int] | None] = None
    """Availability: the architectures it runs on, a set or `at_least(90)`; None for all."""

    general: ClassVar[bool] = False
    """Precedence: below every implementation that is not general. At most one for each interface, device type
    and backend."""

    preferred_over: ClassVar[frozenset[str]] = frozenset()
    """Precedence: the keys it wins over where both serve. A bare key means every implementation with that key
    among the backend's own and the in-tree ones; `IN_TREE` every in-tree implementation; `acme:row` another
    backend's. Of a general implementation only `IN_TREE` is taken: the in-tree general alone."""

    configuration: Configuration = NO_CONFIGURATION
    """What it is built in, of what its class lists for its call; empty where that is nothing."""

    def __init__(self, call: Call | None = None) -> None:
        self.call = call
        self.configuration = configuration_of(type(self), call)

    @classmethod
    def refusal(cls, call: Call) -> str | None:
        """Applicability: None where it serves the call, else why not.

        Pure: it reads the call and the class, no tensor, no device, no global.

        Returns:
            A clause with the number met and the number served: `"row of 100 elements; serves multiples of 8"`.
        """
        del call
        return None

    @classmethod
    def entry_for(cls, call: Call) -> tuple[Hashable, Callable[[], Any]]:
        """The build identity of `call`, and a factory for its entry. Pure, like `refusal`.

        Calls that give equal identities share what the first one's factory built, so the identity holds every
        fact that the build depends on. The default takes the call itself.

        Returns:
            `(identity, factory)`; the factory returns a kernel, or an `Entry` over several.
        """
        return call, lambda: cls(call)

    @classmethod
    def configurations(cls, call: Call) -> Sequence[Configuration]:
        """The ways in which a kernel for `call` can be built, the default first. Pure, like `refusal`.

        All of them have the contract of `forward`; they differ in speed. `op.tune` tries each. A kernel is built in
        `self.configuration`, which `Kernel.__init__` sets: the default, or the winner of a tuning. Calls of equal
        identity list the same.

        Returns:
            A mapping of names to None, bool, int, float or str for each; nothing where there is one way only.
        """
        del call
        return ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run. The interface states the contract."""
        raise NotImplementedError(f"{type(self).__qualname__} has no forward")

    def repeated(self, *args: Any) -> Callable[..., Any]:
        """What later calls like one with these arguments go to: the kernel, or a function with its contract.

        Those calls have arguments of the same classes, dtypes, devices, ranks and memory orders, the same absent ones,
        and the sizes that the op's `call_sizes` fixes: the function need not ask about them again.
        """
        del args
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calling a kernel is calling its `forward`."""
        return self.forward(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let `kernel(x)` reach `forward` with no frame between."""
        super().__init_subclass__(**kwargs)
        if "__call__" not in cls.__dict__:
            cls.__call__ = cls.forward


class Entry:
    """What a factory returns when one call runs several kernels.

    Args:
        run: Called like the interface's `forward`, with its contract.
        kernels: The kernels it runs, each listed once.
    """

    __slots__ = ("kernels", "run")

    def __init__(self, run: Callable[..., Any], kernels: Sequence[Kernel[Any]]) -> None:
        self.run = run
        self.kernels = tuple(dict.fromkeys(kernels))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all of it: the contract of the interface's `forward`."""
        return self.run(*args, **kwargs)


def kernels_of(entry: object) -> tuple[Kernel[Any], ...]:
    """The kernels that an entry runs, each once: a kernel is the entry whose only kernel is itself."""
    return entry.kernels if isinstance(entry, Entry) else (cast("Kernel[Any]", entry),)


class KernelInterface(Kernel[Call]):
    """A place where an op calls a kernel, which fixes the call contract there.

    A subclass names its call spec type in `request` and documents the contract in the docstring of `forward`:
    for each tensor the shape, dtype, layout, device, what it may alias, and whether it is written.
    """

    request: ClassVar[type[CallSpec]]
    """The type of its call specs."""

    writes: ClassVar[frozenset[str]] = frozenset()
    """The arguments of `forward` that a kernel may write."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make the interface's call specs cheap to build: their class is decorated by now."""
        super().__init_subclass__(**kwargs)
        request = cls.__dict__.get("request")
        if isinstance(request, type):
            quicken(request)

    @classmethod
    def reference(cls, call: Call, *tensors: Tensor | None) -> Any:
        """The contract in plain torch, in the precision of its inputs: the oracle of every test.

        Given the arguments of a call, its results have the shapes and dtypes of the contract; given the same
        in float64, the values that results are compared with.

        Args:
            call: The call, for its parameters.
            tensors: The arguments of `forward`. Nothing is written: what `forward` writes is returned last.
        """
        raise NotImplementedError(f"{cls.__qualname__} has no reference")

    @classmethod
    def sample_calls(cls, device: torch.device) -> tuple[Call, ...]:
        """Calls on `device` that cover the interface's regions and their boundaries."""
        raise NotImplementedError(f"{cls.__qualname__} has no sample calls")

    @classmethod
    def sample_tensors(cls, call: Call, generator: torch.Generator) -> tuple[Tensor | None, ...]:
        """Arguments of `forward` for `call`, on its device: awkward row counts, large means."""
        raise NotImplementedError(f"{cls.__qualname__} has no sample tensors")

    @classmethod
    def tolerance(cls, dtype: torch.dtype) -> tuple[float, float]:
        """The relative and absolute error that results in `dtype` may have against float64."""
        return TOLERANCES[dtype]


TOLERANCES: Final[dict[torch.dtype, tuple[float, float]]] = {
    # About two units in the last place of the result, which is rounded once, from float32. In float32 samples the
    # mean reaches 1000 deviations and is itself rounded by 6e-5 of one: torch's own kernels come within 2e-4. In
    # float64 it is rounded by 1e-13, and torch.var_mean comes within 7e-13.
    torch.float64: (1e-12, 5e-12),
    torch.float32: (1e-5, 5e-4),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}


def available(cls: type[Kernel[Any]], call: CallSpec, owner: Owner) -> tuple[Answer, str | None]:
    """Whether `cls` can run on the call's device, and why not."""
    device_type = call.device.type
    if device_type not in cls.devices:
        return Answer.OTHER_DEVICE, f"runs on {listed(cls.devices)}, not on {device_type}"
    if device_type == "cuda" and owner.name == IN_TREE and _on_rocm(call):
        return Answer.OTHER_DEVICE, "runs on NVIDIA GPUs; this build of torch drives AMD's"
    if cls.supported_archs is not None and call.arch not in cls.supported_archs:
        return Answer.OTHER_ARCH, f"is built for architectures {_archs(cls.supported_archs)}; this one is {call.arch}"
    return Answer.SERVES, None


def _on_rocm(call: CallSpec) -> bool:
    return call.stated_on is None and torch.version.hip is not None


def listed(names: Iterable[object]) -> str:
    """Names as messages list them: in order, `nothing` where there are none."""
    return ", ".join(sorted(map(str, names))) or "nothing"


def _archs(archs: Any) -> str:
    shown = cast("Iterable[object]", archs)
    return listed(shown) if isinstance(archs, (set, frozenset, tuple, list)) else repr(shown)
