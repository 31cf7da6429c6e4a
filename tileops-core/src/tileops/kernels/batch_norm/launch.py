"""How the training programs are called: what they all take, and entries of two launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from tileops.kernels.batch_norm.interface import BatchNormTrainCall
from tileops.kernels.kernel_base import Entry, Kernel

Shape = tuple[int, ...]
Results = tuple[Tensor, Tensor, Tensor]


def program_facts(call: BatchNormTrainCall, run: int) -> tuple[Any, ...]:
    """The leading arguments of every program that writes the output; `run` is what it sees as a channel's run."""
    affine = (call.weight_dtype, call.bias_dtype)
    return (call.arch, call.c, run, call.dtype, *affine, call.running, call.eps, call.momentum)


def identity_facts(call: BatchNormTrainCall, run: int) -> tuple[Any, ...]:
    """What every build identity holds: the device, and what the program is built from."""
    return (call.device, *program_facts(call, run))


def launch_training(
    launch: Callable[..., Any],
    x: Tensor,
    shape: Shape,
    channels: int,
    statistics: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    *partials: Tensor,
) -> Results:
    """Allocate the results and launch `(x, *partials, running_mean, running_var, weight, bias, y, mean, invstd)`.

    Args:
        launch: The compiled program.
        x: The input, dense.
        shape: What the program sees x and the output as, in the order of memory.
        channels: The number of channels.
        statistics: Running mean and variance, weight and bias; None where absent.
        partials: What an earlier launch left.
    """
    strides = dense_strides(shape)
    y = torch.empty_like(x)
    mean = x.new_empty(channels, dtype=torch.float32)
    invstd = torch.empty_like(mean)
    # `mean` stands in for every tensor that is absent: the program does not read those.
    running_mean, running_var, weight, bias = statistics
    launch(
        x.as_strided(shape, strides),
        *partials,
        mean if running_mean is None else running_mean,
        mean if running_var is None else running_var,
        mean if weight is None else weight,
        mean if bias is None else bias,
        y.as_strided(shape, strides),
        mean,
        invstd,
    )
    return y, mean, invstd


@final
class Launch(Kernel[BatchNormTrainCall]):
    """One program of an entry of several."""

    def __init__(self, call: BatchNormTrainCall, program: Callable[..., Any]) -> None:
        super().__init__(call)
        self._program = program

    def forward(self, *tensors: Tensor) -> None:
        """Take the tensors in the program's order."""
        self._program(*tensors)


def two_launches(
    moments: Launch,
    apply: Launch,
    channels: int,
    shape_of: Callable[[Tensor], Shape],
    partials_of: Callable[[Shape], Shape],
) -> Entry:
    """Moments of each part of each channel, then a launch that merges them and writes the output.

    Args:
        moments: Called `(x, partials)`.
        apply: Called as `launch_training` does.
        channels: The number of channels.
        shape_of: What the programs see an input as.
        partials_of: The shape of the partials of an input of such a shape.
    """

    def run(
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Results:
        shape = shape_of(x)
        partials = x.new_empty(partials_of(shape), dtype=torch.float32)
        moments(x.as_strided(shape, dense_strides(shape)), partials)
        return launch_training(apply, x, shape, channels, (running_mean, running_var, weight, bias), partials)

    return Entry(run, kernels=(moments, apply))


def dense_strides(shape: Shape) -> Shape:
    """The strides of a dense tensor of two or three axes."""
    return (shape[1] * shape[2], shape[2], 1) if len(shape) == 3 else (shape[1], 1)
