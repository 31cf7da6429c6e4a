"""The target takes over the ops that it has a builder for, and no other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from tileops import LayerNormFwdOp, RMSNormFwdOp, UnknownTargetError, backend
from tileops_backend_example import target


def test_its_builder_is_registered() -> None:
    assert "example" in backend.registered_targets()
    x = torch.randn(3, 64)
    spec = backend.TensorSpec(x.device, x.dtype, (3, 64))
    run = target.build_rms_norm(spec, None, normalized_shape=(64,), eps=1e-6)
    assert torch.equal(run(x, None), RMSNormFwdOp((64,), 1e-6, target="example")(x))


def test_the_target_takes_rms_norm_over_for_whoever_names_it() -> None:
    x, weight = torch.randn(3, 64), torch.randn(64)
    assert "example" in backend.registered_targets()
    y = RMSNormFwdOp((64,), 1e-6, target="example")(x, weight)
    torch.testing.assert_close(y, F.rms_norm(x, (64,), weight, 1e-6))


def test_the_target_serves_float16_with_a_float32_weight() -> None:
    x, weight = torch.randn(3, 64).half(), torch.randn(64)
    y = RMSNormFwdOp((64,), target="example")(x, weight)
    assert y.dtype is torch.float16
    torch.testing.assert_close(y, (F.rms_norm(x.float(), (64,)) * weight).half(), rtol=4e-3, atol=4e-3)


def test_the_target_declines_a_dtype_that_torch_does_not_compute_in() -> None:
    op = RMSNormFwdOp((64,), target="example")
    with pytest.raises(backend.TargetDeclinedError, match="x is float8_e5m2; serves float16, bfloat16, float32"):
        op(torch.zeros(3, 64, dtype=torch.float8_e5m2))


def test_the_target_says_which_op_it_has_where_it_is_named_for_another() -> None:
    with pytest.raises(UnknownTargetError, match=r"target 'example' has nothing for .*it takes over: RMSNormFwdOp"):
        LayerNormFwdOp((4,), target="example")(torch.randn(3, 4))
