"""`Op`, the base of all ops: how a call is checked, looked up and run.

`select` (`selecting.py`) is the whole rule of who serves a call. `Op.kernel_for` is its memory: a hit is one
look-up, and only a miss asks anybody anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final, overload

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from tileops.autograd import saved_by_name
from tileops.backend.loading import load
from tileops.backend.registration import registry, when_registry_changes
from tileops.backend.units import BUILTIN, Implementation
from tileops.call_spec import CallSpec, as_code
from tileops.catalogue import add_op
from tileops.device import Board, DeviceFacts, default_device_type, is_capturing
from tileops.errors import CaptureError, DeclarationError, selection_error
from tileops.kernels.kernel_base import Kernel, KernelInterface
from tileops.ops.checks import check_strided, laid_out
from tileops.ops.entries import drop_entries, entry_of, note_who_ran
from tileops.ops.implementations import check_kernel_types, implementations
from tileops.ops.offers import may_be_taken_over, unable_claims
from tileops.ops.repeats import NO_REPEATS, Repeats, with_call
from tileops.ops.requests import check_request, refuse_unkeyable
from tileops.ops.selecting import select
from tileops.ops.signature import argument_names, arguments_in_order, asked_for, parameter_names
from tileops.ops.tables import remember
from tileops.ops.target_kernels import (
    forget_target_kernels,
    run_target_kernel,
    specs_of,
    target_kernel,
    with_refusal,
    with_target,
)
from tileops.ops.trials import Tuning
from tileops.ops.tuning import tune
from tileops.record import key_of
from tileops.scopes import active, in_effect, opening
from tileops.sharding import ShardingRule
from tileops.torch_boundary import (
    TorchOp,
    call_through,
    declare,
    refuse_nested,
    with_gradient,
    written_positions,
)
from tileops.torch_guards import ALIGNMENT, Sizes, needs_dispatcher
from tileops.torch_schema import Route
from tileops.verdict import Selection

LOOK_UPS: Final = 1 << 14
"""Resolved calls that one op class remembers; a spec and its slot take about half a kilobyte."""

_op_classes: Final[list[type[Op]]] = []


class Op:
    """An operator: it picks a kernel interface by meaning; dispatch picks the kernel.

    An author writes the constructor's parameters (kept as attributes of the same names), `interfaces`,
    `kernel_types`, `forward`, `check` and `empty_results`, and nothing else.

    Args:
        target: A target that takes this op over, instead of kernel selection; `BUILTIN` where none shall.
    """

    interfaces: ClassVar[Mapping[str, type[KernelInterface[Any]]]] = MappingProxyType({})
    """The kernel interfaces, by the names that `forward` calls them by."""

    kernel_types: ClassVar[Mapping[str, type[Kernel[Any]]]] = MappingProxyType({})
    """The in-tree implementations, by key. A key belongs to every interface that its class subclasses."""

    results: ClassVar[tuple[str, ...]] = ("output",)
    """The names of what `forward` returns, for reports and files."""

    torch_ops: ClassVar[Mapping[str, TorchOp]] = MappingProxyType({"": TorchOp()})
    """The torch ops, by the suffix of their names; one, unless calls differ in what they write or return."""

    any_layout: ClassVar[bool] = False
    """Whether `forward` takes tensors of any layout. Else it gets contiguous ones that begin at a multiple of 16
    bytes: a copy where a tensor is another, unless the op writes it."""

    backward: ClassVar[type[Op] | None] = None
    """The op class whose calls give the gradients of this op's; None where it has none. A `BackwardOp`."""

    sharding: ClassVar[ShardingRule | None] = None
    """How the op runs on DTensors; None where it does not, which torch says."""

    _routes: ClassVar[tuple[Route, ...]] = ()
    _entries: ClassVar[dict[Any, Any]] = {}
    _may_be_taken_over: ClassVar[bool] = True
    _repeats: Repeats = NO_REPEATS

    def __init__(self, *, target: str | None = None) -> None:
        self.target = target

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the declarations and enter the class in the catalogue."""
        super().__init_subclass__(**kwargs)
        cls.interfaces = MappingProxyType(dict(cls.interfaces))
        cls.kernel_types = MappingProxyType(dict(cls.kernel_types))
        check_kernel_types(cls)
        if {"forward", "check"} & vars(cls).keys() and "call_sizes" not in vars(cls):
            cls.call_sizes = Op.call_sizes  # what a base says of its own calls
        cls._entries = {}
        cls._may_be_taken_over = may_be_taken_over(cls.__name__)
        _op_classes.append(cls)
        add_op(cls)
        declare(cls)

    # ------------------------------------------------------------------------------------- what authors write

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Build the call spec and call the kernel: `self.kernel_for("layer_norm", call)(x, weight, bias)`."""
        raise NotImplementedError(f"{type(self).__qualname__} has no forward")

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Raise an `InputError` for arguments that the op does not take. Same signature as `forward`."""
        raise NotImplementedError(f"{type(self).__qualname__} has no check")

    def empty_results(self, *args: Any, **kwargs: Any) -> Any:
        """The results without data: for an x without elements, and for tracers. Same signature as `forward`."""
        raise NotImplementedError(f"{type(self).__qualname__} has no empty_results")

    def call_sizes(self, *args: Any, **kwargs: Any) -> Sizes | None:
        """The sizes of each tensor on which a call depends, None or a name in place of one that may vary (`Sizes`).

        It has the signature of `forward`. An op that says this says that `forward` returns what its kernel does for
        the arguments as they are, and that all it reads of them is dtype, device, layout and these sizes. Its
        repeated calls cost the least.

        Returns:
            The sizes; None for an op that depends on more, and for a class with a `forward` or `check` of its own
            that says nothing.
        """
        del args, kwargs
        return None

    def saved(self, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        """What `backward` takes beside the gradient, from the arguments and results of a call: those of its names."""
        return saved_by_name(self, arguments, results)

    # ------------------------------------------------------------------------------------------------ calling

    def __call__(self, *tensors: Any, **named: Any) -> Any:
        """Check the arguments, find the kernel, run it. `forward` documents arguments and results."""
        if named or not tensors:
            tensors = arguments_in_order(type(self), tensors, named)
        if not is_dynamo_compiling():
            entries, known, _ = self._repeats
            if entries is self._entries:
                scope = active()
                for noted_in, repeat in known:
                    if noted_in is scope:
                        results = repeat(tensors)
                        if results is not None:
                            return results
        if needs_dispatcher(tensors):
            return call_through(self, tensors)
        return self._noted(tensors)

    def _repeated(self, tensors: tuple[Any, ...]) -> Any:
        """The results of a call that is like one that was noted; None of any other. `__call__` has it written out."""
        entries, known, _ = self._repeats
        if entries is self._entries:
            scope = active()
            for noted_in, repeat in known:
                if noted_in is scope:
                    results = repeat(tensors)
                    if results is not None:
                        return results
        return None

    def _noted(self, tensors: tuple[Any, ...]) -> Any:
        """The results of a call that torch need not see, or has seen. It is noted, for calls that are like it."""
        results = self._run(*tensors)
        if self._repeats.left or self._repeats.entries is not self._entries:
            self._repeats = with_call(self._repeats, self, tensors)
        return results

    def _run(self, *tensors: Any) -> Any:
        """The call itself, past the question whether torch must see it."""
        try:
            self.check(*tensors)
        except (RuntimeError, TypeError):
            arguments_in_order(type(self), tensors, {})  # says it where there are too many or too few
            refuse_nested(self.argument_names, tensors)
            raise
        if is_grad_enabled():
            for tensor in tensors:
                if tensor is not None and tensor.requires_grad:
                    return with_gradient(self, tensors, self)
        if tensors[0].numel() == 0:
            return self.empty_results(*tensors)
        try:
            return self._serve(tensors)
        except Exception as error:
            failure = error
        raise self._explained(failure, tensors)

    def _explained(self, failure: Exception, tensors: tuple[Any, ...]) -> Exception:
        """What reaches the caller of what `forward` raised."""
        arguments = arguments_in_order(type(self), tensors, {})  # says it where there are too many
        # Layouts are asked about here: a sparse tensor fails wherever memory is asked for, and others cost nothing.
        for name, tensor in zip(self.argument_names, tensors):
            check_strided(name, tensor)
        note_who_ran(failure)
        if self._is_offered():
            return with_refusal(self, specs_of(arguments), failure)
        return failure

    def _serve(self, tensors: tuple[Any, ...]) -> Any:
        """Run the target that takes the call over, or lay the tensors out for the kernel that is selected."""
        if self._is_offered():
            arguments = arguments_in_order(type(self), tensors, {})
            kernel = target_kernel(self, specs_of(arguments), lambda: self._of_kernels(*asked_for(self, arguments)))
            if kernel is not None:
                return run_target_kernel(kernel, self, arguments)
        if not self.any_layout:
            for tensor in tensors:
                if tensor is not None and not (tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0):
                    tensors = laid_out(tensors, written_positions(self))
                    break
        return self.forward(*tensors)

    def _is_offered(self) -> bool:
        """Whether a target may take calls over, on whatever device."""
        return self._may_be_taken_over if self.target is None else self.target != BUILTIN

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a parameter: what was noted of calls with the old ones is forgotten."""
        super().__setattr__(name, value)
        if name != "_repeats" and self._repeats is not NO_REPEATS:
            self._repeats = NO_REPEATS

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: the parameters."""
        return {name: value for name, value in vars(self).items() if name != "_repeats"}

    def kernel_for(self, interface: str, call: CallSpec) -> Callable[..., Any]:
        """The entry that serves `call` at the interface called `interface`.

        A hit is one look-up by (interface, call, scope in force): no implementation is consulted, no device property
        is read.

        Raises:
            OpNotAvailableError: No implementation runs on the call's device, or none of those serves it.
            AmbiguousDispatchError: Several serve it and none is preferred.
            BuildError: The one selected could not be built.
            DeclarationError: The spec is of another type than the interface's, or cannot key a table.
        """
        try:
            return self._entries[interface, call._table_key, active()]
        except (KeyError, AttributeError):
            pass  # resolved below, where an error has no context that its reader could not use
        except TypeError:
            refuse_unkeyable(call)  # the spec holds something that has no hash
        return self._resolve(interface, call)

    @overload
    def explain(self, *tensors: Tensor | None, on: str | Board | DeviceFacts | None = None) -> Selection: ...
    @overload
    def explain(self, interface: str, call: CallSpec, /) -> Selection: ...
    def explain(self, *args: Any, on: str | Board | DeviceFacts | None = None) -> Selection:
        """What dispatch says to a call, without raising, running or building anything.

        Args:
            args: The op's tensors, or an interface's name and a call spec.
            on: With tensors: a board, or facts, to ask about in place of the tensors' device. A spec states
                them itself: `call.on("h200")`.

        Returns:
            The selection: every verdict, and the winner or why there is none. Where a target takes the op over,
            which one and why.
        """
        by_spec = bool(args) and isinstance(args[0], str)
        interface, call = args if by_spec else asked_for(self, args)
        selection = self._of_kernels(interface, call if on is None else call.on(on))
        asked_here = not by_spec and on is None
        specs = specs_of(arguments_in_order(type(self), args, {})) if asked_here else None
        return with_target(type(self), selection, self, specs)

    def prepare(self, *args: Any) -> Selection:
        """Select and build what a call needs, without running it: before a CUDA-graph capture, or at start-up.

        Args:
            args: The op's tensors, fake or meta ones too, or an interface's name and a call spec. A meta tensor
                stands for one on the current accelerator, or on the CPU where there is none.

        Returns:
            The selection, which has a winner or a target. Raises what the call would raise.
        """
        by_spec = bool(args) and isinstance(args[0], str)
        interface, call = args if by_spec else asked_for(self, args)
        if call.device.type == "meta":
            call = dataclasses.replace(call, device=torch.device(default_device_type()))
        call = call.normalised()
        specs = None if by_spec else specs_of(arguments_in_order(type(self), args, {}), on=call.device)
        selection = self._of_kernels(interface, call)
        if specs is None or target_kernel(self, specs, lambda: selection) is None:
            self.kernel_for(interface, call)
        return selection if specs is None else with_target(type(self), selection, self, specs)

    def tune(self, *tensors: Tensor | None) -> Tuning:
        """Try the configurations of the kernel that serves a call, on the call's device, and keep the fastest.

        Which kernel serves the call is not changed. Every call that shares its entry gets the winner from now on,
        and later processes build that at once: it is on record, see `docs/guide/tuning.md`.

        Args:
            tensors: The op's tensors: of the sizes that matter most, since an entry may serve others too. None is
                written; copies of them are.

        Returns:
            What was tried, with times as multiples of the default's, and the winner. Nothing is tried where the
            kernel lists no configurations, or a target takes the call over.

        Raises:
            InputError: An argument does not fit, or there is nothing that a kernel can run with: fake or empty
                tensors, a trace, a mode.
            CaptureError: A CUDA graph is being captured.
            OpNotAvailableError: No kernel serves the call; and what else the call would raise.
        """
        return tune(self, tensors, _exchange)

    def key_for(self, interface: str, call: CallSpec) -> str:
        """The key of the implementation that serves `call`; raises where `kernel_for` would."""
        selection = self._of_kernels(interface, call)
        if selection.key is None:
            raise selection_error(selection)
        return selection.key

    @classmethod
    def selection(cls, interface: str, call: CallSpec) -> Selection:
        """`explain(interface, call)` of an op that names no target: it depends on the op's class alone."""
        return with_target(cls, cls._of_kernels(interface, call))

    @classmethod
    def _of_kernels(cls, interface: str, call: CallSpec) -> Selection:
        """What kernel selection says, whatever targets do."""
        check_request(cls, interface, call)
        load()
        return _selected(cls, interface, implementations(cls, interface), call.normalised())

    @classmethod
    def parameter_names(cls) -> tuple[str, ...]:
        """The names of the constructor's parameters, without `target`."""
        return parameter_names(cls)

    @property
    def argument_names(self) -> tuple[str, ...]:
        """The names of the tensors that the op takes, in order."""
        return argument_names(type(self))

    @property
    def params(self) -> dict[str, Any]:
        """The constructor's parameters, by name; without `target`."""
        return {name: getattr(self, name) for name in self.parameter_names()}

    def __repr__(self) -> str:
        """As it was constructed."""
        shown = [f"{name}={value!r}" for name, value in self.params.items()]
        shown += [] if self.target is None else [f"target={self.target!r}"]
        return f"{type(self).__qualname__}({', '.join(shown)})"

    # ----------------------------------------------------------------------------------------------- a miss

    def _resolve(self, interface: str, call: CallSpec) -> Any:
        """The miss path: select, build or reuse, remember."""
        cls = type(self)
        check_request(cls, interface, call)
        if call.stated_on is not None:
            raise DeclarationError(
                f"{call} states the facts of a device; kernel_for runs where the tensors are: give a plain spec, or "
                "ask key_for or explain"
            )
        if is_capturing(call.device):
            raise CaptureError(
                f"{cls.__name__}.{interface} needs a kernel that is not ready, while a CUDA graph is captured; before "
                f"the capture, call the op once or write:\n  {opening()}{self!r}.prepare({interface!r}, {as_code(call)})"
            )
        load()
        entries = cls._entries  # of this generation: a registration from now on makes a new table
        plain = call.normalised()
        candidates = implementations(cls, interface)
        selection = _selected(cls, interface, candidates, plain)
        if selection.key is None:
            raise selection_error(selection)
        winner = next(one for one in candidates if one.full_key == selection.key)
        entry = entry_of(cls.__name__, cls.interfaces[interface], winner, plain)
        # A device without an index means the current one, which changes: only the spec that names it is kept.
        where = call if call.device == plain.device else plain
        remember(entries, (interface, key_of(where), active()), entry, LOOK_UPS)
        return entry


def clear() -> None:
    """Forget every look-up and every entry of the process. The next calls select and build again."""
    _swap_tables()
    drop_entries()
    forget_target_kernels()


def _selected(cls: type[Op], interface: str, candidates: Sequence[Implementation], call: CallSpec) -> Selection:
    """`select`, and where nothing is selected what backends have to say about it."""
    selection = select(cls.__name__, interface, candidates, call, in_effect(cls))
    if selection.key is not None:
        return selection
    claims = unable_claims(cls.__name__, call.device) if call.stated_on is None else ()
    return dataclasses.replace(selection, remarks=(*claims, *registry().remarks()))


def _exchange(before: Any, entry: Any) -> None:
    """Let look-ups that gave the entry `before` give another. Their tables are new, so no call repeats one of before."""
    for cls in _op_classes:
        known = cls._entries.copy()  # pyright: ignore[reportPrivateUsage] - the tables are this module's
        if any(one is before for one in known.values()):
            cls._entries = {key: entry if one is before else one for key, one in known.items()}


def _swap_tables() -> None:
    """New look-up tables for every op. A miss that began before stores into the old one, which nobody reads."""
    for cls in _op_classes:
        cls._entries = {}  # pyright: ignore[reportPrivateUsage] - the tables are this module's
        cls._may_be_taken_over = may_be_taken_over(cls.__name__)


when_registry_changes(_swap_tables)
