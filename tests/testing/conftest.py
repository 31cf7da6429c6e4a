"""An op and an interface that the conformance kit has never seen, a kernel that is right, and ways to break it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from tileops import CallSpec, KernelInterface, Op, register_kernel_type
from tileops.testing.broken_rule import RuleBroken
from tileops.testing.subjects import Subject, subjects_of
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclasses.dataclass(frozen=True)
class ScaleCall(CallSpec):
    """The facts of a call: rows of `n` elements, times `factor`, plus a shift where there is one."""

    n: int
    dtype: torch.dtype
    factor: float = 1.5
    shift_dtype: torch.dtype | None = torch.float32


class Scale(KernelInterface[ScaleCall]):
    """Scale rows, and count what was scaled."""

    request = ScaleCall
    writes = frozenset({"total"})

    def forward(self, x: Tensor, shift: Tensor | None, total: Tensor) -> Tensor:
        """Return `x * factor + shift`, new; the number of elements of x is added to `total`."""
        raise NotImplementedError

    @classmethod
    def reference(cls, call: ScaleCall, *tensors: Any) -> tuple[Tensor, Tensor]:
        x, shift, total = tensors
        y = x * call.factor
        return (y if shift is None else y + shift.to(x.dtype)), total + x.numel()

    @classmethod
    def sample_calls(cls, device: torch.device) -> tuple[ScaleCall, ...]:
        kinds = itertools.product((1, 7, 64, 1 << 40), FLOATS, (torch.float32, None))
        return tuple(ScaleCall(device, n, dtype, shift_dtype=shift) for n, dtype, shift in kinds)

    @classmethod
    def sample_tensors(cls, call: ScaleCall, generator: torch.Generator) -> tuple[Tensor | None, ...]:
        x = torch.randn(5, call.n, generator=generator).to(call.device, call.dtype)
        shift = None if call.shift_dtype is None else torch.full((call.n,), 0.5, dtype=call.shift_dtype)
        return x, shift, torch.tensor(3, device=call.device)


class RightScale(Scale):
    """Holds to every rule; each test breaks one."""

    devices = frozenset({"cpu"})

    @classmethod
    def refusal(cls, call: ScaleCall) -> str | None:
        return None if call.dtype in (*FLOATS, torch.float64) else f"x is {call.dtype}; serves floating dtypes"

    @classmethod
    def entry_for(cls, call: ScaleCall) -> tuple[Hashable, Callable[[], Any]]:
        return call.factor, lambda: cls(call)

    def forward(self, x: Tensor, shift: Tensor | None, total: Tensor) -> Tensor:
        total += x.numel()
        y = x.to(self.wide(x)) * self.factor
        return (y if shift is None else y + shift).to(x.dtype)

    def wide(self, x: Tensor) -> torch.dtype:
        return torch.float64 if x.dtype is torch.float64 else torch.float32

    @property
    def factor(self) -> float:
        assert self.call is not None
        return self.call.factor


class Kit:
    """Registers kernels of the invented op, and tells what a rule says of them."""

    Right = RightScale
    Interface = Scale
    Call = ScaleCall

    def __init__(self) -> None:
        self.op = self.new_op()

    def new_op(self, **in_tree: type[Any]) -> type[Op]:
        """The invented op, with in-tree kernels."""

        def construct(self: Any, factor: float = 1.5, *, target: str | None = None) -> None:
            Op.__init__(self, target=target)
            self.factor = factor

        def forward(self: Any, x: Tensor, shift: Tensor | None, total: Tensor) -> Tensor:
            shift_dtype = None if shift is None else shift.dtype
            return self.kernel_for("scale", ScaleCall(x.device, x.shape[-1], x.dtype, self.factor, shift_dtype))(
                x, shift, total
            )

        members = {
            "__init__": construct, "forward": forward, "check": lambda self, x, shift, total: None,
            "empty_results": lambda self, x, shift, total: x.clone(), "__module__": __name__,
            "interfaces": {"scale": Scale}, "kernel_types": in_tree,
        }  # fmt: skip
        return type("ScaleOp", (Op,), members)

    def broken(self, **members: Any) -> Subject:
        """The right kernel with other members, registered."""
        register_kernel_type("ScaleOp", "broken", type("Broken", (RightScale,), members))
        return subjects_of("local")[-1]

    def verdict(self, check: Callable[..., None], *arguments: Any) -> str:
        """The text with which a rule is broken."""
        with pytest.raises(RuleBroken) as raised:
            check(*arguments)
        return str(raised.value)


@pytest.fixture
def kit(no_backends: None) -> Kit:
    """The invented op, in a process without backends."""
    return Kit()
