"""How the training programs are called: what they all take, and what takes two launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from tileops.call_spec import CallSpec
from tileops.kernels.batch_norm.interface import BatchNormTrainCall
from tileops.kernels.kernel_base import Kernel

Shape = tuple[int, ...]
Results = tuple[Tensor, Tensor, Tensor]
Statistics = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Running mean and variance, weight and bias; None where absent."""


def program_facts(call: BatchNormTrainCall, run: int) -> tuple[Any, ...]:
    """The leading arguments of every program that writes the output; `run` is what it sees as a channel's run."""
    affine = (call.weight_dtype, call.bias_dtype)
    return (call.arch, call.c, run, call.dtype, *affine, call.running)


def identity_facts(call: BatchNormTrainCall, run: int) -> tuple[Any, ...]:
    """What every build identity holds: the device, what the programs are built from and given. No batch size."""
    return (call.device, *program_facts(call, run), *constants_of(call))


def constants_of(call: BatchNormTrainCall) -> tuple[float, float]:
    """The last arguments of every program that writes the output, which entries of other values share."""
    return float(call.eps), float(call.momentum)


@final
class Launch(Kernel[Any]):
    """One program of an entry of several."""

    def __init__(self, call: CallSpec, program: Callable[..., Any]) -> None:
        super().__init__(call)
        self._program = program

    def forward(self, *arguments: Tensor | float | None) -> None:
        """Take the arguments in the program's order."""
        self._program(*arguments)


def built_together(builders: Sequence[Callable[[], Launch]]) -> list[Launch]:
    """What the builders give, in their order. The CUDA compilers of all run at the same time."""
    with ThreadPoolExecutor(len(builders)) as pool:
        building = [pool.submit(build) for build in builders]
        return [launch.result() for launch in building]


def launch_training(
    launch: Callable[..., Any],
    x: Tensor,
    shape: Shape,
    channels: int,
    statistics: Statistics,
    constants: tuple[float, float],
    *parts: Tensor | int,
) -> Results:
    """Allocate the results and launch `(x, *parts, running_mean, running_var, weight, bias, y, mean, invstd, …)`.

    Args:
        launch: The program, or what calls it.
        x: The input, dense.
        shape: What the program sees x and the output as, in the order of memory.
        channels: The number of channels.
        statistics: The tensors beside x.
        constants: What follows: eps and momentum.
        parts: What an earlier launch left, and how it cut x.
    """
    strides = dense_strides(shape)
    y = torch.empty_like(x)
    mean = x.new_empty(channels, dtype=torch.float32)
    invstd = torch.empty_like(mean)
    # `mean` stands in for every tensor that is absent: the program does not read those.
    running_mean, running_var, weight, bias = statistics
    launch(
        x.as_strided(shape, strides),
        *parts,
        mean if running_mean is None else running_mean,
        mean if running_var is None else running_var,
        mean if weight is None else weight,
        mean if bias is None else bias,
        y.as_strided(shape, strides),
        mean,
        invstd,
        *constants,
    )
    return y, mean, invstd


class Cut(NamedTuple):
    """How a batch is cut for two launches: into `parts` of `chunks` each, the last one what is left."""

    chunks: int
    parts: int


class TwoLaunches(NamedTuple):
    """Moments of each part of each channel, then a launch that merges them and writes the output.

    Args:
        moments: Takes `(x, partials, chunks)`.
        apply: Takes what `launch_training` gives it, the partials and chunks as its `parts`.
    """

    moments: Launch
    apply: Launch

    @classmethod
    def built(cls, moments: Callable[[], Launch], apply: Callable[[], Launch]) -> TwoLaunches:
        """Both, from their builders."""
        return cls(*built_together([moments, apply]))

    def __call__(
        self,
        x: Tensor,
        shape: Shape,
        channels: int,
        statistics: Statistics,
        constants: tuple[float, float],
        chunks: int,
        partials: Shape,
    ) -> Results:
        """Run both; `partials` is the shape of what the first leaves for the second."""
        moments = x.new_empty(partials, dtype=torch.float32)
        self.moments(x.as_strided(shape, dense_strides(shape)), moments, chunks)
        return launch_training(self.apply, x, shape, channels, statistics, constants, moments, chunks)


def viewed(tensor: Tensor | None, shape: Shape) -> Tensor | None:
    """A dense tensor in `shape`, in the order of memory; None stays None."""
    return None if tensor is None else tensor.as_strided(shape, dense_strides(shape))


def dense_strides(shape: Shape) -> Shape:
    """The strides of a dense tensor of two or three axes."""
    return (shape[1] * shape[2], shape[2], 1) if len(shape) == 3 else (shape[1], 1)
