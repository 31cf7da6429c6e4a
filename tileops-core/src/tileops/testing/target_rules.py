"""The rule about targets: what a builder makes for an op agrees with the interface that the op would ask."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from tileops.backend.targets import TensorSpec
from tileops.backend.units import Builder
from tileops.call_spec import CallSpec
from tileops.catalogue import find_op
from tileops.errors import Declined
from tileops.kernels.kernel_base import KernelInterface
from tileops.testing.broken_rule import NotTried, RuleBroken, shown_error
from tileops.testing.running import Tensors, argument_names, disagreement, run
from tileops.testing.running_rules import misuse, race
from tileops.testing.samples import Limits, is_here, most_different, sample_calls, tensors_of

TARGET: Final = "what a target builds agrees with the reference, and may be shared"


@dataclasses.dataclass(frozen=True)
class Case:
    """One sample call, as a call of the whole op.

    Args:
        op: The op, constructed so that it asks for that call.
        interface: The interface that it would ask.
        call: The call spec.
        tensors: The arguments of the interface.
    """

    op: Any
    interface: type[KernelInterface[Any]]
    call: CallSpec
    tensors: Tensors

    def in_op_order(self, tensors: Tensors) -> tuple[Any, ...]:
        """The interface's arguments as the op takes them."""
        named = dict(zip(argument_names(self.interface), tensors))
        return tuple(named.get(name) for name in self.op.argument_names)

    def built_by(self, builder: Builder) -> Callable[..., Any]:
        """What the builder makes, called with the interface's arguments."""
        specs = map(TensorSpec.of, self.in_op_order(self.tensors))
        kernel = builder.build(*specs, **self.op.params)
        return lambda *tensors: kernel(*self.in_op_order(tensors))


def check_target(builder: Builder, limits: Limits) -> None:
    """Each chosen sample call, as a call of the op, is built and agrees with the reference of its interface."""
    built, faults = set[str](), list[tuple[Case, Exception]]()
    for case in _cases(find_op(builder.op), limits):
        try:
            kernel = case.built_by(builder)
        except Declined:
            continue
        except Exception as error:
            faults.append((case, error))
            continue
        in_threads = not builder.per_op and case.call.device.type not in built
        _check_kernel(builder, case, kernel, in_threads=in_threads)
        built.add(case.call.device.type)
    for case, error in faults:
        if case.call.device.type in built:
            raise _broken(
                builder,
                case,
                f"building raised {shown_error(error)}",
                "build whatever the op takes, or raise tileops.backend.Declined",
            )
    if not built:
        first = f": {shown_error(faults[0][1])}" if faults else ""
        raise NotTried(f"it builds for none of the op's sample calls on this machine{first}")


def _check_kernel(builder: Builder, case: Case, kernel: Callable[..., Any], *, in_threads: bool) -> None:
    try:
        outcome = run(case.interface, kernel, case.tensors)
    except Exception as error:
        raise _broken(builder, case, f"it raised {shown_error(error)}", "mend what the builder returns") from error
    wrong = disagreement(case.interface, case.call, case.tensors, outcome)
    if wrong:
        raise _broken(builder, case, wrong, "mend what the builder returns for these specs and parameters")
    for found, change in misuse(case.interface, case.call, case.tensors, outcome):
        raise _broken(builder, case, found, change)
    found = race(case.interface, case.call, kernel) if in_threads else ""
    if found:
        raise _broken(builder, case, found, "keep nothing between calls: equal ops share what is built")


def _broken(builder: Builder, case: Case, found: str, change: str) -> RuleBroken:
    owner = builder.owner.distribution or builder.owner.name
    return RuleBroken(TARGET, f"target {builder.target!r} for {case.op!r}  [{owner}]", found, change, case.call)


# ------------------------------------------------------------------------------------- sample calls as calls of an op


def _cases(op: type[Any] | None, limits: Limits) -> Iterator[Case]:
    interfaces: Mapping[str, type[KernelInterface[Any]]] = {} if op is None else op.interfaces
    for name, interface in interfaces.items():
        for device in (torch.device(kind) for kind in ("cpu", "cuda") if is_here(kind)):
            for call in most_different(sample_calls(interface, device), interface, limits):
                case = _case(op, name, interface, call)
                if case is not None:
                    yield case


def _case(op: Any, name: str, interface: type[KernelInterface[Any]], call: CallSpec) -> Case | None:
    """The call as one of the op; None where no parameters that a spec suggests make the op ask for it."""
    for params in _suggested(op, call):
        try:
            case = Case(op(**params), interface, call, tensors_of(interface, call))
            asked = case.op.explain(*case.in_op_order(case.tensors))
        except (TypeError, ValueError):
            continue
        if (asked.interface, asked.call) == (name, call.normalised()):
            return case
    return None


def _suggested(op: Any, call: CallSpec) -> Iterator[dict[str, Any]]:
    """Parameters that may make the op ask for the call. Whether they do is seen by asking it."""
    fields = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    parameters = inspect.signature(op.__init__).parameters
    choices = [_choices(parameters[name], fields) for name in op.parameter_names()]
    return (dict(zip(op.parameter_names(), values)) for values in itertools.product(*choices))


def _choices(parameter: inspect.Parameter, fields: Mapping[str, Any]) -> Sequence[Any]:
    """A field of the parameter's name; else both flags, the default, or each size of the spec as a shape and as it is."""
    if parameter.name in fields:
        return (fields[parameter.name],)
    if isinstance(parameter.default, bool):
        return (parameter.default, not parameter.default)
    if parameter.default is not inspect.Parameter.empty:
        return (parameter.default,)
    sizes = [value for value in fields.values() if isinstance(value, int) and not isinstance(value, bool)]
    return [*((size,) for size in sizes), *sizes]
