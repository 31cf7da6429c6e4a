"""`BackwardOp`: the base of ops that compute gradients of other ops' arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tileops.call_spec import CallSpec
from tileops.errors import InputError
from tileops.ops.op_base import Op
from tileops.ops.signature import asked_for
from tileops.torch_schema import names_of


class BackwardOp(Op):
    """An op that computes the gradients of another op's arguments. That op names it in its `backward`.

    Everything goes by name. `results` are called `grad_` and the name of an argument of the other op. `forward`
    takes `grad`, the gradient of the other op's first result, and then arguments or results of that op. The
    constructor takes parameters of that op, `need`, and where it wants to know the dtype of an argument that it
    does not take, `<argument>_dtype`.

    Args:
        need: Which gradients are wanted, in the order of `results`. `forward` returns None in place of the others,
            and of the gradient of an argument that it takes and that is absent.
        target: A target that takes the op over, instead of kernel selection.
    """

    def __init__(self, need: Sequence[bool], *, target: str | None = None) -> None:
        super().__init__(target=target)
        self.need = tuple(need)
        if len(self.need) != len(self.results) or {*map(type, self.need)} != {bool}:
            raise InputError(f"need is {need!r}; it must say for each of {', '.join(self.results)} True or False")

    def request(self, *args: Any, **kwargs: Any) -> tuple[str, CallSpec]:
        """The interface and the call spec, from arguments of the other op, by the names of the parameters here.

        The other op asks before it runs, so that a backward that nobody serves is refused there.
        """
        raise NotImplementedError(f"{type(self).__qualname__} has no request")

    def wanted(self, *tensors: Tensor | None) -> tuple[bool, ...]:
        """For each result, whether `forward` returns it: it is needed, and no absent argument's."""
        names = self._routes[0].arguments  # which dynamo traces
        given = {name for name, tensor in zip(names, tensors) if tensor is not None}
        absent = {f"grad_{name}" for name in names if name not in given}
        return tuple(needed and name not in absent for needed, name in zip(self.need, self.results))

    def formula(self, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """What `forward` returns, in plain torch, which can be differentiated again.

        It is the reference of the interface, in float32 or in float64.
        """
        interface, call = asked_for(self, tensors)
        wide = [None if one is None else one if one.dtype is torch.float64 else one.float() for one in tensors]
        taken = _taken(self.interfaces[interface], dict(zip(self._routes[0].arguments, wide)))
        results = self.interfaces[interface].reference(call, *taken)
        return tuple(
            None if one is None else one.reshape(like.shape).to(like.dtype)
            for one, like in zip(results, self.empty_results(*tensors))
        )


def _taken(interface: Any, given: dict[str, Any]) -> list[Any]:
    """Of an op's arguments those that an interface takes, by name; all, where it has other names for them.

    `kernel_arguments` lays them out on its way, for which tensors of transforms and traces have no memory.
    """
    names = names_of(interface.forward)
    return [given.get(name) for name in names] if set(names) <= given.keys() else list(given.values())
