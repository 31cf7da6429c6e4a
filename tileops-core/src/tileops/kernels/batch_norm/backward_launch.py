"""How the backward programs are called: what they all take, and what they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

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


MOST_CHUNKS_OF_ONE_PART: Final = 4
"""Chunks of a channel that one block takes where that saves the launch that adds up parts."""


class SplitPrograms(NamedTuple):
    """What an entry of two launches is made of.

    Args:
        sums: Builds the program that leaves the sums of each part. It takes by name which are `wanted`, whether it
            `closes`, that is writes those of a single part as the results, and whether it `writes` the gradient of x.
        gradient: Builds the one that adds them up and writes the gradient of x.
        cut: From x to what the programs see it as, and how it is cut.
    """

    sums: Callable[..., Program]
    gradient: Callable[[], Program]
    cut: Callable[[Tensor], tuple[Shape, Cut]]


def split_entry(call: BatchNormBwdCall, programs: SplitPrograms, *, training: bool) -> Entry:
    """The launches as one entry, with the contract of the interface of training, or of inference.

    In training the gradient of x needs both sums, and a second launch writes it.
    """
    return _through_sums(call, programs) if training and call.need[0] else _beside_sums(call, programs)


def _through_sums(call: BatchNormBwdCall, programs: SplitPrograms) -> Entry:
    """Both sums, then the gradient of x."""
    results = Results.of(call)
    launches = built_together(
        [
            lambda: Launch(call, programs.sums(wanted=(True, True), closes=False, writes=False)),
            lambda: Launch(call, programs.gradient()),
        ]
    )
    sums, gradient = launches

    def run(grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None) -> Gradients:
        shape, (chunks, parts) = programs.cut(x)
        grad_x, *others = gradients = results.empty(x)
        given = (viewed(grad, shape), viewed(x, shape), mean, invstd, weight)
        partials = x.new_empty((2, parts, call.c), dtype=torch.float32)
        sums(*given, None, partials, chunks, parts, None, None)
        gradient(*given, partials, chunks, viewed(grad_x, shape), *others)
        return gradients

    return Entry(run, kernels=launches)


def _beside_sums(call: BatchNormBwdCall, programs: SplitPrograms) -> Entry:
    """The gradient of x, if wanted, and the sums of each part, if wanted; where there are several parts, their total."""
    results, (of_x, *wanted) = Results.of(call), call.need
    count = sum(wanted)
    builders = [lambda: Launch(call, programs.sums(wanted=tuple(wanted), closes=True, writes=of_x))]
    if count:
        builders.append(lambda: Launch(call, _total_program(call)))
    sums, *total = launches = built_together(builders)

    def run(grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None) -> Gradients:
        shape, (chunks, parts) = programs.cut(x)
        if count and chunks * parts <= MOST_CHUNKS_OF_ONE_PART:
            chunks, parts = chunks * parts, 1
        grad_x, *others = gradients = results.empty(x)
        partials = x.new_empty((count, parts, call.c), dtype=torch.float32) if count else None
        given = (viewed(grad, shape), viewed(x, shape), mean, invstd, weight, viewed(grad_x, shape))
        sums(*given, partials, chunks, parts, *others)
        if count and parts > 1:
            total[0](partials, *others)
        return gradients

    return Entry(run, kernels=launches)


def _total_program(call: BatchNormBwdCall) -> Program:
    """Adds up what each part has of a channel."""
    from tileops.kernels.compiled_program import compile_program
    from tileops.kernels.row_backward_program import sums_of_parts

    return compile_program(sums_of_parts(call.c, *dtypes_of_sums(call)), call.arch)
