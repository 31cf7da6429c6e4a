"""Torch's norm modules with our ops in `forward`.

Each subclasses torch's and adds no state. Constructor, state dict, repr and initialisation are therefore those of
the installed torch, `isinstance(module, torch.nn.LayerNorm)` holds, and a module of torch's becomes one of ours
by its class alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from tileops import functional


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`, computed by `LayerNormFwdOp`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name for it, here and below
        """Normalise the trailing axes of `(*batch, *normalized_shape)`; see `LayerNormFwdOp.forward`."""
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm`, computed by `RMSNormFwdOp`."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the trailing axes of `(*batch, *normalized_shape)`; see `RMSNormFwdOp.forward`."""
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class _OurBatchNorm(_BatchNorm):
    """The `forward` of the batch norms. Which ranks each takes is for torch's `_check_input_dim` to say."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise each channel of `(N, C, *spatial)`; see `BatchNormFwdOp.forward`.

        In training by the batch's statistics, which update the running ones where those are tracked. In
        inference by the running statistics, or the batch's where there are none.
        """
        self._check_input_dim(input)
        if self.training:
            return self._train(input)
        mean, variance = self.running_mean, self.running_var
        return self._normalised(input, mean, variance, training=mean is None and variance is None)

    def _train(self, x: Tensor) -> Tensor:
        if not self.track_running_stats:
            return self._normalised(x, None, None, training=True)
        count = self.num_batches_tracked
        if count is None or self.momentum is not None:
            share = self.momentum or 0.0
            y = self._normalised(x, self.running_mean, self.running_var, training=True, momentum=share)
        else:
            y = self._train_averaging(x, count + 1)
        if count is not None:
            count.add_(1)
        return y

    def _train_averaging(self, x: Tensor, batches: Tensor) -> Tensor:
        """A step with `momentum=None`: running statistics are the mean of those of all batches.

        Momentum is a parameter of the op. One that changes with every batch would select and build a kernel for
        every batch; so the kernel writes the batch's statistics, and the mean is taken here.
        """
        running = (self.running_mean, self.running_var)
        mean, variance = (None if kept is None else torch.zeros_like(kept) for kept in running)
        y = self._normalised(x, mean, variance, training=True, momentum=1.0)
        with torch.no_grad():
            for kept, new in zip(running, (mean, variance)):
                if kept is not None and new is not None:
                    kept.add_((new - kept) / batches)
        return y

    def _normalised(
        self, x: Tensor, mean: Tensor | None, variance: Tensor | None, *, training: bool, momentum: float = 0.0
    ) -> Tensor:
        return functional.batch_norm(x, mean, variance, self.weight, self.bias, training, momentum, self.eps)


class BatchNorm1d(_OurBatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d`, computed by `BatchNormFwdOp`."""


class BatchNorm2d(_OurBatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, computed by `BatchNormFwdOp`."""


class BatchNorm3d(_OurBatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d`, computed by `BatchNormFwdOp`."""


class GroupNorm(nn.GroupNorm):
    """`torch.nn.GroupNorm`, computed by `GroupNormFwdOp`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise each group of channels of `(N, C, *spatial)`; see `GroupNormFwdOp.forward`."""
        return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class _OurInstanceNorm(_InstanceNorm):
    """What the instance norms compute. Which ranks and channels each takes is for torch's `forward` to say."""

    def _apply_instance_norm(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise each channel of each sample of `(N, C, *spatial)`; see `InstanceNormFwdOp.forward`.

        By the statistics of the input in training, and wherever no running ones are tracked.
        """
        by_input = self.training or not self.track_running_stats
        running = (self.running_mean, self.running_var)
        momentum = self.momentum or 0.0
        return functional.instance_norm(input, *running, self.weight, self.bias, by_input, momentum, self.eps)


class InstanceNorm1d(_OurInstanceNorm, nn.InstanceNorm1d):
    """`torch.nn.InstanceNorm1d`, computed by `InstanceNormFwdOp`."""


class InstanceNorm2d(_OurInstanceNorm, nn.InstanceNorm2d):
    """`torch.nn.InstanceNorm2d`, computed by `InstanceNormFwdOp`."""


class InstanceNorm3d(_OurInstanceNorm, nn.InstanceNorm3d):
    """`torch.nn.InstanceNorm3d`, computed by `InstanceNormFwdOp`."""
