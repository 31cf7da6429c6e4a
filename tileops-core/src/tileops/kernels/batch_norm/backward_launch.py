"""How the backward programs are called: what they all take, and what they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tileops.kernels.batch_norm.backward_interface import BatchNormBwdCall
from tileops.kernels.batch_norm.launch import Cut, Launch, Shape, built_together, viewed
from tileops.kernels.kernel_base import Entry

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
Program = Callable[..., Any]


def program_facts(call: BatchNormBwdCall, run: int) -> tuple[Any, ...]:
    """The leading arguments of every program; `run` is what it sees as a channel's run."""
    return (call.arch, call.c, run, call.dtype, call.weight_dtype, call.bias_dtype, call.need)


def identity_facts(call: BatchNormBwdCall, run: int) -> tuple[Any, ...]:
    """What every build identity holds: the device, and what the programs are built from. No batch size."""
    return (call.device, *program_facts(call, run))


def dtypes_of_sums(call: BatchNormBwdCall) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The dtypes of the gradients of weight and bias; None for what is not wanted."""
    _, of_weight, of_bias = call.need
    return call.weight_dtype if of_weight else None, call.bias_dtype if of_bias else None


class Results(NamedTuple):
    """Makes what a backward returns, without data; None for what is not wanted."""

    c: int
    of_x: bool
    weight_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None

    @classmethod
    def of(cls, call: BatchNormBwdCall) -> Results:
        """Those of a call."""
        return cls(call.c, call.need[0], *dtypes_of_sums(call))

    def empty(self, x: Tensor) -> Gradients:
        """The gradient of x in its memory order, then those of weight and bias."""
        grad_x = torch.empty_like(x) if self.of_x else None
        return grad_x, self._empty_sum(x, self.weight_dtype), self._empty_sum(x, self.bias_dtype)

    def _empty_sum(self, x: Tensor, dtype: torch.dtype | None) -> Tensor | None:
        return None if dtype is None else x.new_empty(self.c, dtype=dtype)


class SplitPrograms(NamedTuple):
    """What an entry of two launches is made of.

    Args:
        sums: Builds the program that leaves the sums of each part, from which of them are wanted and whether it also
            writes the gradient of x.
        gradient: Builds the one that adds them up and writes the gradient of x.
        cut: From x to what the programs see it as, and how it is cut.
    """

    sums: Callable[..., Program]
    gradient: Callable[[], Program]
    cut: Callable[[Tensor], tuple[Shape, Cut]]


def split_entry(call: BatchNormBwdCall, programs: SplitPrograms, *, training: bool) -> Entry:
    """The launches as one entry, with the contract of both interfaces.

    In training the gradient of x needs both sums, and is written by the second launch. Where it is not wanted, and in
    inference, the second launch only adds up.
    """
    of_x, of_weight, of_bias = call.need
    through = of_x and training
    wanted = (True, True) if through else (of_weight, of_bias)
    count, results = sum(wanted), Results.of(call)
    of_unit, of_grad = wanted
    writes = of_x and not training
    builders = [lambda: Launch(call, programs.sums(of_unit=of_unit, of_grad=of_grad, writes=writes))]
    if through:
        builders.append(lambda: Launch(call, programs.gradient()))
    elif count:
        builders.append(lambda: Launch(call, _total_program(call)))
    launches = built_together(builders)

    def run(grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None) -> Gradients:
        shape, (chunks, parts) = programs.cut(x)
        grad_x, *sums = gradients = results.empty(x)
        given = (viewed(grad, shape), viewed(x, shape), mean, invstd, weight)
        written = viewed(grad_x, shape)
        partials = x.new_empty((count, parts, call.c), dtype=torch.float32) if count else None
        launches[0](*given, written if writes else None, partials, chunks, parts)
        if through:
            launches[1](*given, partials, chunks, written, *sums)
        elif count:
            launches[1](partials, *sums)
        return gradients

    return Entry(run, kernels=launches)


def _total_program(call: BatchNormBwdCall) -> Program:
    """Adds up what each part has of a channel."""
    from tileops.kernels.compiled_program import compile_program
    from tileops.kernels.row_backward_program import sums_of_parts

    return compile_program(sums_of_parts(call.c, *dtypes_of_sums(call)), call.arch)
