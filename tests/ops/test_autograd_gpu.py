"""Gradients on a GPU: against float64, under autocast, compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tileops import BatchNormFwdOp, GroupNormFwdOp, InstanceNormFwdOp, LayerNormFwdOp, RMSNormFwdOp
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("backends"),
]

N = 256
OURS: dict[str, Any] = {
    "layer": LayerNormFwdOp(N),
    "rms": lambda x, w, b: RMSNormFwdOp(N)(x, w) + b,
    "train": lambda x, w, b: BatchNormFwdOp(training=True)(x, None, None, w, b)[0],
    "group": GroupNormFwdOp(8),
    "instance": lambda x, w, b: InstanceNormFwdOp()(x.t()[None], None, None, w, b)[0].t(),
}
THEIRS: dict[str, Any] = {
    "layer": lambda x, w, b: F.layer_norm(x, (N,), w, b),
    "rms": lambda x, w, b: F.rms_norm(x, (N,), w, 1.1920928955078125e-07) + b,  # float32's, also of float64
    "train": lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    "group": lambda x, w, b: F.group_norm(x, 8, w, b),
    "instance": lambda x, w, b: F.instance_norm(x.t()[None], None, None, w, b)[0].t(),
}


def given(dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((133, N), (N,), (N,))
    return tuple(torch.randn(one, generator=generator).to("cuda", dtype).requires_grad_() for one in shapes)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", list(OURS))
def test_gradients_agree_with_float64(name: str, dtype: torch.dtype, compiled: bool) -> None:
    x, w, b = given(dtype)
    call = torch.compile(OURS[name], fullgraph=True, backend="aot_eager") if compiled else OURS[name]
    y = call(x, w, b)
    up = torch.randn(133, N, generator=torch.Generator().manual_seed(1)).to("cuda", y.dtype)
    got = torch.autograd.grad(y, (x, w, b), up)
    wide = tuple(one.detach().double().requires_grad_() for one in (x, w, b))
    expected = torch.autograd.grad(THEIRS[name](*wide), wide, up.double())
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    for one, right in zip(got, expected):
        assert one.dtype is dtype
        torch.testing.assert_close(one.double(), right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype"), [("layer", torch.float32), ("rms", torch.float32), ("train", torch.bfloat16)]
)
def test_autocast_gives_the_dtypes_of_torchs_table(name: str, dtype: torch.dtype, compiled: bool) -> None:
    """Compared with float64: torch's table names rms norm too, and torch 2.11 leaves its own in bfloat16."""
    x, w, b = given(torch.bfloat16)
    call = torch.compile(OURS[name], fullgraph=True, backend="aot_eager") if compiled else OURS[name]
    up = torch.randn(133, N, generator=torch.Generator().manual_seed(1)).to("cuda", dtype)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        ours = call(x, w, b)
    assert ours.dtype is dtype
    wide = tuple(one.detach().double().requires_grad_() for one in (x, w, b))
    theirs = THEIRS[name](*wide)
    torch.testing.assert_close(ours.double(), theirs, rtol=2e-2, atol=2e-2)
    expected = torch.autograd.grad(theirs, wide, up.double())
    for one, right in zip(torch.autograd.grad(ours, (x, w, b), up), expected):
        assert one.dtype is torch.bfloat16
        torch.testing.assert_close(one.double(), right, rtol=3e-2, atol=3e-2)
