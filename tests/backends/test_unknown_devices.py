"""A device type that tileops has never heard of: facts, availability and targets, with no call to torch.cuda."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils import backend_registration

FAKES_TENSORS = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
"""Whether this torch can make tensors of a private device type without a library in C++."""

BACKEND = """
import torch
from tileops.backend import DeviceFacts, hookimpl
from tileops.kernels.rms_norm import RMSNorm

asked = []

def read(device):
    asked.append(str(device))
    return DeviceFacts(arch=2, sm_count=24, smem_budget=4096)

def empty(x):
    return torch._C._acc.create_empty_tensor(tuple(x.shape), x.dtype)

class Row(RMSNorm):
    devices = frozenset({"npu"})
    supported_archs = frozenset({2})

    @classmethod
    def refusal(cls, call):
        return None if (call.sm_count, call.smem_budget) == (24, 4096) else f"it has {call.facts}"

    def forward(self, x, weight):
        return empty(x)

class Newer(Row):
    supported_archs = frozenset({3})

@hookimpl
def tileops_register_kernels(register_kernel_type):
    register_kernel_type("RMSNormFwdOp", "row", Row)
    register_kernel_type("RMSNormFwdOp", "newer", Newer)

@hookimpl
def tileops_register_devices(register_device_facts):
    register_device_facts("npu", read)
"""

TARGET = """
import torch
from tileops.backend import hookimpl
from plug_acme import empty

@hookimpl
def tileops_register_targets(register_detector, register_kernel_builder):
    register_detector("wide", lambda device: device.type == "npu")
    register_kernel_builder("LayerNormFwdOp", "wide", lambda *specs, **params: lambda x, *_: empty(x))
"""

NO_CUDA = """
import torch
from tileops.backend import load
load()  # which sees whether an import initialises CUDA

def refusing(name):
    def raises(*args, **kwargs):
        raise AssertionError(f"torch.cuda.{name} was called")
    return raises

for name, value in list(vars(torch.cuda).items()):
    if callable(value) and not isinstance(value, type) and not name.startswith("_"):
        setattr(torch.cuda, name, refusing(name))
"""


def test_a_spec_on_an_unknown_device_is_served_by_the_facts_of_its_reader(site: Any) -> None:
    site.backend("acme", BACKEND)
    done = site.python(
        NO_CUDA
        + """
torch.utils.rename_privateuse1_backend("npu")
from tileops import RMSNormFwdOp
from tileops.kernels.rms_norm import RMSNormCall
call = RMSNormCall(torch.device("npu", 1), 8, torch.float32, 1e-5)
op = RMSNormFwdOp(8)
assert type(op.kernel_for("rms_norm", call)).__name__ == "Row"
assert op.kernel_for("rms_norm", call) is op.kernel_for("rms_norm", call)
for verdict in op.explain("rms_norm", call).verdicts:
    print(verdict.key, "|", verdict.reason)
import plug_acme
print(plug_acme.asked)
""",
        policy="acme",
    )
    assert done.stdout.splitlines() == [
        "held_row | runs on cuda, not on npu",
        "streamed_row | runs on cuda, not on npu",
        "acme:newer | is built for architectures 3; this one is 2",
        "acme:row | None",
        "['npu:1']",
    ]


@pytest.mark.skipif(not FAKES_TENSORS, reason="this torch makes no tensors of a private device type in Python")
def test_tensors_on_an_unknown_device_are_served_by_kernels_and_by_targets(site: Any) -> None:
    site.backend("acme", BACKEND)
    site.backend("wide", TARGET)
    done = site.python(
        NO_CUDA
        + """
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
_setup_privateuseone_for_python_backend("npu")
from tileops import BatchNormFwdOp, LayerNormFwdOp, OpNotAvailableError, RMSNormFwdOp
x = torch._C._acc.create_empty_tensor((2, 8), torch.float32)
for op in (RMSNormFwdOp(8), LayerNormFwdOp(8)):
    for _ in range(2):
        y = op(x)
    assert op.prepare(x) == op.explain(x)
    print(type(op).__name__, y.device, op.explain(x).key, op.explain(x).target)
try:
    BatchNormFwdOp(training=True)(x)
except OpNotAvailableError as error:
    print(str(error).splitlines()[0])
""",
        policy="acme,wide",
    )
    assert done.stdout.splitlines() == [
        "RMSNormFwdOp npu:0 acme:row None",
        "LayerNormFwdOp npu:0 None wide",
        "in-tree kernels do not run on npu: BatchNormFwdOp.batch_norm_fwd_train",
    ]
