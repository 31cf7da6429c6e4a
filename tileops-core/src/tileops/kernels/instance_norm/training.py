"""How the kernels of instance norm that updates running statistics are built and called."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from tileops.kernels.group_norm.group_rows import GroupRows, Normalise, compiled_together
from tileops.kernels.instance_norm.interface import InstanceNormTrainCall

Train = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


def facts_of(call: InstanceNormTrainCall) -> GroupRows:
    """What the programs of the output are built from: group norm's, with groups of one channel."""
    return GroupRows(1, call.spatial, call.dtype, call.eps, call.weight_dtype, call.bias_dtype, keeps_statistics=True)


def identity_of(call: InstanceNormTrainCall) -> Hashable:
    """What an entry is built from."""
    return call.device, facts_of(call), call.momentum


def build_training(call: InstanceNormTrainCall, build: Callable[[], Normalise]) -> Train:
    """What `build` gives, followed by the update of the running statistics."""
    from tileops.kernels.compiled_program import compiled_once
    from tileops.kernels.instance_norm.running_program import instance_norm_running

    steps: list[Any] = compiled_together(build, lambda: compiled_once(instance_norm_running, call.arch))
    normalise, update = steps
    momentum = float(call.momentum)

    def train(
        x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        samples, channels = x.shape[:2]
        statistics = x.new_empty((2, samples * channels), dtype=torch.float32)
        y = normalise(x, weight, bias, statistics)
        update(statistics.view(2, samples, channels), running_mean, running_var, momentum)
        return y

    return train
