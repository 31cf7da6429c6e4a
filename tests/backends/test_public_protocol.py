"""A wheel that somebody wrote for the public TileOPs backend protocol, without a thought of us, installs and runs.

It registers when its module is imported, with the protocol's names and keywords, has one detector, and a builder for
an op that this release does not have.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import tileops
from tileops import backend

WHEEL = '''
"""Kernels for CPUs."""

import math

import torch
from tileops.backend import TensorSpec, register_detector, register_kernel_builder

TARGET = "torch_cpu"
BUILT = []


def detect(device: torch.device) -> bool:
    return device.type == "cpu"


class Norm:
    def __init__(self, normalized_shape, eps, dtype):
        BUILT.append((tuple(normalized_shape), eps, dtype))
        self.axes = tuple(range(-len(normalized_shape), 0))
        self.eps = eps

    def __call__(self, x, weight):
        assert x.is_contiguous()
        wide = x.float()
        y = wide * torch.rsqrt(wide.square().mean(self.axes, keepdim=True) + self.eps)
        return (y if weight is None else y * weight.float()).to(x.dtype)


def build_rms_norm(x: TensorSpec, weight: "TensorSpec | None", *, normalized_shape, eps):
    device, dtype, shape = x
    assert shape[-len(normalized_shape):] == tuple(normalized_shape)
    return Norm(normalized_shape, torch.finfo(torch.float32).eps if eps is None else eps, dtype)


def build_gemm(a, b, *, trans_a, trans_b):
    raise AssertionError("no such op yet")


register_detector(target=TARGET, detect=detect)

for op, build_kernel in {"RMSNormFwdOp": build_rms_norm, "GemmFwdOp": build_gemm}.items():
    register_kernel_builder(op=op, target=TARGET, build_kernel=build_kernel)
'''

PROGRAM = """
import warnings
warnings.simplefilter("error")
import torch
import torch.nn.functional as F
from tileops.backend import BUILTIN, default_target, load_failures, registered_targets
from tileops.ops.norm.rms_norm import RMSNormFwdOp

op = RMSNormFwdOp(normalized_shape=(64,))
weight = torch.randn(64, dtype=torch.float16)
for rows in (4, 4, 8):
    x = torch.randn(rows, 128, dtype=torch.float16)[:, ::2]
    y = op(x, weight)
    assert y.dtype == x.dtype and y.shape == x.shape
    torch.testing.assert_close(y, F.rms_norm(x, (64,), weight), rtol=1e-3, atol=1e-3)
op(x)

import tileops_cpu
print(len(tileops_cpu.BUILT), tileops_cpu.BUILT[0][1:])
print(registered_targets(), registered_targets("RMSNormFwdOp"), registered_targets("GemmFwdOp"))
print(default_target(), load_failures())
print(op.explain(x).target)
try:
    RMSNormFwdOp(normalized_shape=(64,), target=BUILTIN)(x)
except ValueError as error:
    print(str(error).split(":")[0])
from tileops import LayerNormFwdOp
from tileops.backend import OpNotAvailableError, status
try:
    LayerNormFwdOp((64,))(x)
except OpNotAvailableError as error:
    assert "registers no kernel builder for LayerNormFwdOp" in str(error)
print(*status()[1].notes)
"""


@pytest.fixture
def wheel(site: Any) -> Any:
    site.module("tileops_cpu", WHEEL)
    site.distribution("tileops-cpu", "[tileops.backends]\ntorch_cpu = tileops_cpu\n", "0.3")
    return site


def test_it_takes_its_op_over_and_the_rest_works_as_before(wheel: Any) -> None:
    done = wheel.python(PROGRAM, policy="torch_cpu")
    assert done.stdout.splitlines() == [
        "3 (1.1920928955078125e-07, torch.float16)",
        "['torch_cpu'] ['torch_cpu'] ['torch_cpu']",
        "None []",
        "torch_cpu",
        "in-tree kernels do not run on cpu",
        "registers for 'GemmFwdOp', an op that this release does not have",
    ]


def test_an_op_that_appears_later_is_served_by_the_builder_that_waited(wheel: Any) -> None:
    done = wheel.python(
        """
        import torch
        from torch import Tensor
        from tileops import Op
        from tileops.backend import load
        load()

        class GemmFwdOp(Op):
            def __init__(self, trans_a: bool = False, trans_b: bool = True, *, target: str | None = None):
                super().__init__(target=target)
                self.trans_a, self.trans_b = trans_a, trans_b

            def forward(self, a: Tensor, b: Tensor) -> Tensor:
                raise AssertionError("no kernels")

            def check(self, a, b): ...

            def empty_results(self, a, b):
                return a.new_empty(a.shape[0], b.shape[0])

        import tileops_cpu
        try:
            GemmFwdOp()(torch.ones(2, 3), torch.ones(4, 3))
        except ValueError as error:
            print(str(error).splitlines()[0])
        """,
        policy="torch_cpu",
    )
    said = "GemmFwdOp: target 'torch_cpu' (tileops-cpu 0.3) could not build its kernel: AssertionError: no such op yet"
    assert done.stdout.strip() == said


def test_two_wheels_that_claim_the_cpu_are_named_with_what_settles_it(wheel: Any) -> None:
    wheel.module("other_cpu", WHEEL.replace("torch_cpu", "other_cpu"))
    wheel.distribution("other-cpu", "[tileops.backends]\nother_cpu = other_cpu\n", "2.0")
    done = wheel.python(
        """
        import torch
        from tileops import AmbiguousTargetError, RMSNormFwdOp
        try:
            RMSNormFwdOp(4)(torch.ones(2, 4))
        except AmbiguousTargetError as error:
            print(error)
        RMSNormFwdOp(4, target="other_cpu")(torch.ones(2, 4))
        """,
        policy="torch_cpu,other_cpu",
    )
    assert done.stdout.startswith(
        "RMSNormFwdOp: target 'other_cpu' (other-cpu 2.0) and target 'torch_cpu' (tileops-cpu 0.3) each claim cpu; "
        "choose one: RMSNormFwdOp(…, target='other_cpu'), with tileops.selection(prefer=\"other-cpu\"): …, or for the "
    )


def test_the_names_and_parameters_of_the_protocol_are_there() -> None:
    wanted = {
        backend.register_detector: ["target", "detect"],
        backend.register_kernel_builder: ["op", "target", "build_kernel", "per_op"],
        backend.register_device_facts: ["device_type", "read"],
        backend.registered_targets: ["op"],
        backend.set_default_target: ["target"],
        backend.default_target: [],
        backend.load_failures: [],
    }
    assert {function: list(inspect.signature(function).parameters) for function in wanted} == wanted
    assert backend.TensorSpec._fields == ("device", "dtype", "shape")
    assert {"BUILTIN", "DeviceFacts", "AmbiguousTargetError", "UnknownTargetError"} <= set(backend.__all__)


@pytest.mark.parametrize(
    ("op", "arguments", "parameters"),
    [
        ("RMSNormFwdOp", ["x", "weight"], ["normalized_shape", "eps"]),
        ("LayerNormFwdOp", ["x", "weight", "bias"], ["normalized_shape", "eps"]),
        (
            "BatchNormFwdOp",
            ["x", "running_mean", "running_var", "weight", "bias"],
            ["training", "momentum", "eps"],
        ),
    ],
)  # fmt: skip
def test_builders_are_given_the_arguments_in_the_order_of_the_protocol(
    op: str, arguments: list[str], parameters: list[str]
) -> None:
    cls = getattr(tileops, op)
    assert list(inspect.signature(cls.forward).parameters)[1:] == arguments
    assert list(cls.parameter_names()) == parameters


def test_a_backend_that_fails_is_a_line_of_load_failures(site: Any) -> None:
    site.backend("acme", "raise OSError('no such library')")
    done = site.python(
        """
        import warnings
        warnings.simplefilter("ignore")
        from tileops.backend import load_failures
        print(load_failures())
        """,
        policy="acme",
    )
    assert done.stdout.strip() == "['acme (plug_acme): OSError: no such library']"
