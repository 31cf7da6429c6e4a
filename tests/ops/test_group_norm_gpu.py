"""Group norm and instance norm through their ops on a GPU, against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from tileops import GroupNormFwdOp, InstanceNormFwdOp
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("backends"),
]

# A group that is held, one that is not, one of a prime number of elements, many of them; and none in space.
SHAPES = [(2, 64, 32, 32), (1, 6, 300, 300), (5, 6, 7, 13), (700, 12, 4, 4)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return (torch.randn(shape, generator=generator) + mean).to("cuda", dtype)


def affine(channels: int) -> tuple[Tensor, Tensor]:
    return drawn(channels, mean=1), drawn(channels, seed=1)


def wide(*values: Tensor) -> list[Any]:
    return [value.detach().double().clone() for value in values]


def layouts(x: Tensor) -> list[Tensor]:
    flat = x.new_empty(x.numel() + 1)
    flat[1:] = x.reshape(-1)
    return [
        x,
        x.contiguous(memory_format=torch.channels_last),
        torch.stack([x, x], dim=-1)[..., 0],
        flat[1:].view_as(x),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_group_norm_agrees_with_torch_in_every_memory_layout(close: Any, shape: Any, dtype: torch.dtype) -> None:
    x, (weight, bias) = drawn(*shape, dtype=dtype, mean=2), affine(shape[1])
    values = wide(x, weight, bias)
    right = F.group_norm(values[0], 2, *values[1:])
    for view in layouts(x):
        y = GroupNormFwdOp(2)(view, weight, bias)
        close(y, right, dtype)
        if view.is_contiguous(memory_format=torch.channels_last):
            assert y.stride() == view.stride()
    close(GroupNormFwdOp(3)(x[:, :3, 0, 0], weight[:3], bias[:3]), values[2][:3].expand(shape[0], 3), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_instance_norm_agrees_with_torch_running_statistics_included(
    close: Any, shape: Any, dtype: torch.dtype
) -> None:
    c = shape[1]
    x, (weight, bias) = drawn(*shape, dtype=dtype, mean=2), affine(c)
    for view in layouts(x):
        table = torch.stack([drawn(c, seed=2), drawn(c, seed=3).abs() + 0.5], dim=1)
        mean, variance = table.unbind(1)
        values = wide(x, mean, variance, weight, bias)
        close(InstanceNormFwdOp(use_input_stats=False)(view, mean, variance, weight, bias),
              F.instance_norm(*values, use_input_stats=False), dtype)  # fmt: skip
        right = F.instance_norm(*values, momentum=0.5)
        close(InstanceNormFwdOp()(view, None, None, weight, bias), right, dtype)
        close(InstanceNormFwdOp(momentum=0.5)(view, mean, variance, weight, bias), right, dtype)
        close(mean, values[1])
        close(variance, values[2])


def test_a_channel_of_mean_1e4_and_deviation_1_keeps_its_variance() -> None:
    x, mean, variance = drawn(4, 8, 64, 64, mean=1e4), drawn(8), drawn(8)
    InstanceNormFwdOp(momentum=1.0)(x, mean, variance)
    torch.testing.assert_close(variance.double(), x.double().flatten(2).var(dim=2).mean(0), rtol=1e-5, atol=0)
    torch.testing.assert_close(mean.double(), x.double().mean(dim=(0, 2, 3)), rtol=1e-6, atol=0)


def test_two_runs_are_bit_identical() -> None:
    x, (weight, bias) = drawn(33, 12, 40, 40, dtype=torch.float16, mean=3).requires_grad_(), affine(12)
    results = []
    for _ in range(2):
        mean, variance, w = drawn(12), drawn(12, seed=1), weight.clone().requires_grad_()
        y = InstanceNormFwdOp()(x, mean, variance, w, bias) + GroupNormFwdOp(3)(x, w, bias)
        results.append([y, mean, variance, *torch.autograd.grad(y.float().square().sum(), (x, w))])
    assert all(torch.equal(one, other) for one, other in zip(*results))
