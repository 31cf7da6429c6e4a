"""What inductor writes for a torch op of ours: a launch that selects as the torch op does."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tileops
import torch
import torch.nn.functional as F  # noqa: N812
from tileops import FusedAddRMSNormFwdOp, LayerNormFwdOp, OpNotAvailableError, RMSNormFwdOp, torch_inductor, torch_ops
from tileops.kernels.rms_norm import RMSNorm
from torch import Tensor
from torch._inductor.utils import fresh_inductor_cache, run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

TABLE = pytest.importorskip(torch_inductor._TABLE, reason="this torch's inductor calls the torch op")

pytestmark = [
    pytest.mark.usefixtures("backends", "fresh_dynamo", "no_code_of_earlier_runs"),
    pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning"),  # inductor's own use of it
]

N = 8
X = torch.randn(4, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
W = torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture
def no_code_of_earlier_runs() -> Iterator[None]:
    with fresh_inductor_cache():
        yield


def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(call, fullgraph=True)


def written(call: Callable[..., Any], *given: Any) -> tuple[Any, list[str]]:
    """The results of a call, and the lines that inductor wrote for nodes of ours."""
    results, codes = run_and_get_code(call, *given)
    lines = [line.strip() for code in codes for line in code.splitlines() if "_norm" in line]
    return results, [line for line in lines if not line.startswith(("#", "assert"))]


def scaled(by: float) -> type[RMSNorm]:
    class Scaled(RMSNorm):
        devices = frozenset({"cpu"})

        def forward(self, x: Tensor, weight: Tensor | None) -> Tensor:
            return x * by

    return Scaled


class SeenOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_both_directions_are_launches() -> None:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    call = compiled(LayerNormFwdOp(N))
    got, lines = written(lambda: torch.autograd.grad(call(x, w).pow(3).sum(), (x, w)))
    named = [re.sub(r"_[0-9a-f]{8}\b", "_HASH", line) for line in lines]
    assert named == [
        "_layer_norm_HASH = tileops.torch_ops.launcher('_layer_norm', [8], 1e-05)",
        "buf0 = _layer_norm_HASH(primals_1, primals_2, None)",
        "_layer_norm_backward_HASH = tileops.torch_ops.launcher('_layer_norm_backward', [8], 1e-05, [True, True, False], None)",
        next(line for line in named if re.match(r"buf\d+ = _layer_norm_backward_HASH\(", line)),
    ]
    torch.testing.assert_close(got, torch.autograd.grad(F.layer_norm(x, (N,), w).pow(3).sum(), (x, w)))


def test_an_op_with_two_results_is_launched() -> None:
    op = FusedAddRMSNormFwdOp()
    results, lines = written(compiled(lambda x, residual: op(x, residual, W)), X, X.flip(0))
    assert "launcher('_fused_add_rms_norm'" in lines[0]
    torch.testing.assert_close(results, op(X, X.flip(0), W))


def test_a_size_that_varies_among_the_parameters_leaves_the_torch_op() -> None:
    def call(x: Tensor) -> Tensor:
        return LayerNormFwdOp(x.shape[-1])(x)

    x = X.clone()
    torch._dynamo.mark_dynamic(x, 1)
    y, (line,) = written(compiled(call), x)
    assert "torch.ops.tileops._layer_norm.default(" in line
    torch.testing.assert_close(y, F.layer_norm(X, (N,)))


def test_kernels_are_selected_at_each_launch() -> None:
    tileops.register_kernel_type("RMSNormFwdOp", "twice", scaled(2))
    call = compiled(RMSNormFwdOp(N))
    for _ in range(3):
        torch.testing.assert_close(call(X), X * 2)
    tileops.register_kernel_type("RMSNormFwdOp", "thrice", scaled(3))
    for key, factor in (("local:twice", 2), ("local:thrice", 3), ("local:twice", 2)):
        with tileops.selection(prefer=key):
            torch.testing.assert_close(call(X), X * factor)
    with tileops.selection(exclude=("local", "example")), pytest.raises(OpNotAvailableError, match="RMSNormFwdOp"):
        call(X)
    tileops.unregister_kernel_type("RMSNormFwdOp", "twice")
    torch.testing.assert_close(call(X), X * 3)


def test_a_launch_like_an_earlier_one_passes_no_dispatcher() -> None:
    call = compiled(LayerNormFwdOp(N))
    for _ in range(3):
        call(X)
    with torch.autograd.profiler.profile() as profile:
        torch.testing.assert_close(call(X + 1), F.layer_norm(X + 1, (N,)))
    assert not [event.name for event in profile.function_events if event.name.startswith("tileops::")]


def test_a_mode_sees_every_launch() -> None:
    launch = torch_ops.launcher("_layer_norm", [N], 1e-5)
    expected = launch(X, None, None)
    with SeenOps() as mode:
        torch.testing.assert_close(launch(X, None, None), expected)
    assert mode.seen[0] == "tileops._layer_norm.default"


def test_a_class_that_is_made_again_takes_the_launches_over(site: Any) -> None:
    site.module("acme_launch", ROW)
    module = importlib.import_module("acme_launch")
    launch = torch_ops.launcher("_acme_launch__RowOp", 1, target=None)
    assert [launch(X).equal(X * 2) for _ in range(3)] == [True] * 3
    site.module("acme_launch", ROW.replace("FACTOR = 2.0", "FACTOR = 30.0"))
    importlib.reload(module)
    assert launch(X).equal(X * 30)


def test_the_name_that_generated_code_calls_stays_for_ever() -> None:
    assert str(inspect.signature(torch_ops.launcher)) == (
        "(defined: 'str', *parameters: 'Any', target: 'str | None' = None) -> 'Callable[..., Any]'"
    )


def test_this_torch_has_the_private_names() -> None:
    from torch._inductor.codegen import wrapper

    assert isinstance(TABLE.CUSTOM_EXTERN_KERNEL_CODEGEN, dict)
    assert callable(TABLE.CustomCodegen)
    assert callable(wrapper.ExternKernelAllocLine)
    assert issubclass(wrapper.SubgraphPythonWrapperCodegen, wrapper.PythonWrapperCodegen)
    assert torch._C._dispatch_tls_is_dispatch_key_excluded("PythonTLSSnapshot") is False


ROW = """
    from dataclasses import dataclass
    from torch import Tensor
    from tileops import CallSpec, KernelInterface, Op

    @dataclass(frozen=True)
    class RowCall(CallSpec):
        n: int

    class Row(KernelInterface[RowCall]):
        request = RowCall
        def forward(self, x): raise NotImplementedError

    class Scaled(Row):
        devices = frozenset({"cpu"})
        def forward(self, x): return x * FACTOR

    FACTOR = 2.0

    class RowOp(Op):
        interfaces = {"row": Row}
        kernel_types = {"scaled": Scaled}
        def __init__(self, size: int = 1, *, target: str | None = None) -> None:
            super().__init__(target=target)
            self.size = size
        def check(self, x): pass
        def empty_results(self, x): return x.clone()
        def call_sizes(self, x): return [tuple(x.shape)]
        def forward(self, x: Tensor) -> Tensor:
            return self.kernel_for("row", RowCall(x.device, x.numel()))(x)
"""
