"""Detectors and builders that installed backends register: hooks, rollback, clashes, notes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tileops import LayerNormFwdOp, RMSNormFwdOp
from tileops.backend import (
    POLICY_VARIABLE,
    BackendLoadWarning,
    BackendRecord,
    State,
    load,
    register_detector,
    registered_targets,
    status,
)
from tileops.errors import RegistrationError

X = torch.ones(2, 4)

HOOKS = """
from tileops.backend import hookimpl

@hookimpl
def tileops_register_targets(register_detector, register_kernel_builder):
    register_detector("npu", lambda device: device.type == "cpu")
    register_kernel_builder("RMSNormFwdOp", "npu", lambda *specs, **params: lambda x, weight: x + 1)
"""

DETECTOR_ALONE = """
from tileops.backend import hookimpl

@hookimpl
def tileops_register_targets(register_detector):
    register_detector("npu", lambda device: True)
"""


@pytest.fixture(autouse=True)
def only_these(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POLICY_VARIABLE, "-example")


def record(name: str) -> BackendRecord:
    [found] = [one for one in status() if one.name == name]
    return found


def test_a_hook_may_register_a_detector_and_builders(site: Any) -> None:
    site.backend("acme", HOOKS)
    assert torch.equal(RMSNormFwdOp(4)(X), X + 1)
    assert record("acme").registered == ("RMSNormFwdOp: target npu", "detector of target npu")


def test_a_backend_that_fails_leaves_no_detector(site: Any) -> None:
    site.backend("acme", HOOKS + "    raise OSError('no driver')\n")
    with pytest.warns(BackendLoadWarning, match="OSError: no driver"):
        load()
    assert registered_targets() == []
    assert RMSNormFwdOp(4).explain(X).target is None


def test_a_detector_whose_target_takes_nothing_over_is_noted(site: Any) -> None:
    site.backend("acme", DETECTOR_ALONE)
    site.backend("zeta", HOOKS.replace('"npu"', '"ascent"', 1).replace('"npu"', '"ascend"'))
    assert record("acme").notes == ("target 'npu' has a detector and takes no op over",)
    assert record("zeta").notes == ("target 'ascent' has a detector and takes no op over; did you mean 'ascend'?",)


def test_of_two_backends_with_a_detector_for_one_target_the_second_is_told_who_has_it(site: Any) -> None:
    site.backend("acme", HOOKS)
    site.backend("zeta", DETECTOR_ALONE)
    with pytest.warns(
        BackendLoadWarning, match=r"zeta.*target 'npu' has a detector already, from tileops-backend-acme 1.0"
    ):
        load()
    assert record("zeta").state is State.FAILED
    with pytest.raises(RegistrationError, match="target 'npu' has a detector already, from tileops-backend-acme 1.0"):
        register_detector("npu", lambda device: True)
    assert torch.equal(RMSNormFwdOp(4)(X), X + 1)


def test_a_faulty_detector_is_told_with_its_distribution_and_costs_nobody_else_anything(site: Any) -> None:
    site.backend("acme", HOOKS)
    site.backend("zeta", HOOKS.replace("npu", "gpu").replace('device.type == "cpu"', "device.no_such_attribute"))
    said = r"the detector of target 'gpu' \(tileops-backend-zeta 1.0\) raised AttributeError"
    with pytest.warns(RuntimeWarning, match=said):
        assert torch.equal(RMSNormFwdOp(4)(X), X + 1)


def test_a_builder_for_an_op_that_this_release_does_not_have_is_noted_with_the_nearest_name(site: Any) -> None:
    site.backend("acme", HOOKS.replace("RMSNormFwdOp", "RMSNrmFwdOp"))
    said = "registers for 'RMSNrmFwdOp', an op that this release does not have; did you mean 'RMSNormFwdOp'?"
    assert record("acme").notes == (said,)
    assert LayerNormFwdOp(4).explain(X).target is None
