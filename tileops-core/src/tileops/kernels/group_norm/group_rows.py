"""How the forward kernels of group norm are built and called, which instance norm shares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
from torch import Tensor

from tileops.kernels.dtypes import refusal_of_dtypes
from tileops.kernels.group_norm.cluster_plan import LONE_BYTES, cluster_plan
from tileops.kernels.group_norm.split_plan import split_plan
from tileops.kernels.row_plan import HeldLimits, held_row_plan, longest_held_row

Normalise = Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]
"""Takes x, weight, bias and the statistics to fill, (2, rows) in float32 or None; returns y."""

Launch = Callable[..., Any]

MOST_ELEMENTS: Final = 1 << 30
"""Elements of a row, at most: programs count them in 32 bits, some steps past the end."""

HELD_BY_GROUP_NORM: Final[HeldLimits] = ((64, 8), (128, 24), (256, 24), (512, 32))
"""As for layer norm, measured on an H200 in float16, by threads, µs: (16, 64, 128, 128) as instances 256 23.2, 512 18.6;
(2, 1280, 16, 16) in 32 groups 256 2.8, 512 2.8; (2, 640, 32, 32) 512 3.7, 1024 4.2; (8, 256, 56, 56) as instances
128 7.5, 256 8.0. 1024 threads spill their parts of longer rows.
"""


@dataclasses.dataclass(frozen=True)
class GroupRows:
    """What a forward program is built from. Equal ones on one device are one build.

    Args:
        channels: Channels of a group.
        spatial: Elements of a channel.
        dtype: Of x and y.
        eps: Added to the variance.
        weight_dtype: Of the weight; None where there is none.
        bias_dtype: Of the bias, likewise.
        keeps_statistics: Whether the mean and the unbiased variance of each row are wanted.
    """

    channels: int
    spatial: int
    dtype: torch.dtype
    eps: float
    weight_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None
    keeps_statistics: bool = False

    @property
    def n(self) -> int:
        """Elements of a row."""
        return self.channels * self.spatial

    def refusal(self) -> str | None:
        """Why no program serves such rows; None where one does."""
        unserved = refusal_of_dtypes(self.dtype, weight=self.weight_dtype, bias=self.bias_dtype)
        if unserved is None and self.n > MOST_ELEMENTS:
            return f"groups of {self.n} elements; serves up to {MOST_ELEMENTS}"
        return unserved

    def refusal_to_hold(self, arch: int, smem_budget: int) -> str | None:
        """Why one block does not hold such a row in registers; None where it does."""
        unserved = self.refusal()
        if unserved is None and cluster_plan(self.n, self.dtype, arch, smem_budget) is not None:
            return (
                f"groups of {self._bytes} bytes; serves up to {LONE_BYTES} where a cluster of blocks takes longer ones"
            )
        if unserved is None and held_row_plan(self.n, self.dtype, HELD_BY_GROUP_NORM) is None:
            most = longest_held_row(self.n, self.dtype, HELD_BY_GROUP_NORM)
            return f"groups of {self.n} elements; serves up to {most} of {self.dtype} at their alignment"
        return unserved

    def refusal_to_cluster(self, arch: int, smem_budget: int) -> str | None:
        """Why a cluster of blocks does not hold such a row; None where it does."""
        unserved = self.refusal()
        if unserved is None and cluster_plan(self.n, self.dtype, arch, smem_budget) is None:
            return (
                f"groups of {self._bytes} bytes; serves those above {LONE_BYTES} that stay on chip at their alignment"
            )
        return unserved

    @property
    def _bytes(self) -> int:
        return self.n * self.dtype.itemsize


def build_held(facts: GroupRows, arch: int) -> Normalise:
    """Compile the program for rows that a block holds."""
    # Imported here: importing tilelang takes seconds, and only a kernel that is built needs it.
    from tileops.kernels.compiled_program import compiled_once
    from tileops.kernels.group_norm.held_row_program import group_norm_held_row

    plan = held_row_plan(facts.n, facts.dtype, HELD_BY_GROUP_NORM)
    assert plan is not None, "refusal() refuses such rows"
    dtypes = (facts.dtype, facts.weight_dtype, facts.bias_dtype)
    launch: Launch = compiled_once(
        group_norm_held_row, arch, plan, facts.channels, *dtypes, keeps_statistics=facts.keeps_statistics
    )
    return _one_launch(launch, facts)


def build_cluster(facts: GroupRows, arch: int, smem_budget: int) -> Normalise:
    """Compile the program for rows that a cluster of blocks holds."""
    from tileops.kernels.group_norm.cluster_row_program import group_norm_cluster_row

    plan = cluster_plan(facts.n, facts.dtype, arch, smem_budget)
    assert plan is not None, "refusal() refuses such rows"
    dtypes = (facts.dtype, facts.weight_dtype, facts.bias_dtype)
    launch = group_norm_cluster_row(plan, facts.channels, *dtypes, arch, keeps_statistics=facts.keeps_statistics)
    return _one_launch(launch, facts)


def build_split(facts: GroupRows, arch: int, sm_count: int) -> Normalise:
    """Compile the two programs for rows of any length."""
    from tileops.kernels.compiled_program import compiled_once
    from tileops.kernels.group_norm.split_row_program import group_norm_split_apply, group_norm_split_moments

    plan = split_plan(facts.n, facts.dtype)
    dtypes = (facts.dtype, facts.weight_dtype, facts.bias_dtype)
    measure, apply = compiled_together(
        lambda: compiled_once(group_norm_split_moments, arch, plan, facts.dtype),
        lambda: compiled_once(
            group_norm_split_apply, arch, plan, facts.channels, *dtypes, keeps_statistics=facts.keeps_statistics
        ),
    )
    n, eps = facts.n, float(facts.eps)

    def normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor | None) -> Tensor:
        y, rows = torch.empty_like(x), x.view(-1, n)
        part_vectors, parts = plan.cut(rows.shape[0], sm_count)
        partials = x.new_empty((2, rows.shape[0], parts), dtype=torch.float32)
        measure(rows, partials, part_vectors)
        apply(rows, partials, part_vectors, weight, bias, y.view(-1, n), statistics, eps)
        return y

    return normalise


def _one_launch(launch: Launch, facts: GroupRows) -> Normalise:
    n, eps = facts.n, float(facts.eps)

    def normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor | None) -> Tensor:
        y = torch.empty_like(x)
        launch(x.view(-1, n), weight, bias, y.view(-1, n), statistics, eps)
        return y

    return normalise


def compiled_together(*builders: Callable[[], Launch]) -> list[Launch]:
    """What the builders give, in their order. The CUDA compilers of all run at the same time."""
    with ThreadPoolExecutor(len(builders)) as pool:
        building = [pool.submit(build) for build in builders]
        return [launch.result() for launch in building]
