"""The rules about declarations, `refusal`, `entry_for` and precedence, and the kernels that break them."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import Any

import pytest
import torch
from tileops import IN_TREE, at_least, register_kernel_type, unregister_kernel_type
from tileops.device import DeviceFacts
from tileops.testing import Limits
from tileops.testing.asking_rules import check_ambiguity, check_declared_facts, check_purity, overlaps
from tileops.testing.broken_rule import NotTried
from tileops.testing.samples import askable
from tileops.testing.subjects import subjects_of

LIMITS = Limits(specs=60)


def answering(answer: Any) -> Any:
    return classmethod(lambda cls, call: answer(call))


def test_the_right_kernel_holds_to_the_rules_on_every_device_that_it_names(kit: Any) -> None:
    for members in ({}, {"devices": frozenset({"cuda"}), "supported_archs": at_least(90)}):
        subject = kit.broken(**members)
        check_declared_facts(subject)
        check_purity(subject, LIMITS)
        check_ambiguity(subject)
        unregister_kernel_type("ScaleOp", "broken")


# ------------------------------------------------------------------------------------------------ declared facts


@pytest.mark.parametrize(
    ("members", "found", "change"),
    [
        ({"devices": frozenset({"gpu"})}, "torch knows no device type 'gpu'", "as torch.device takes it"),
        ({"devices": frozenset({"cuda"}), "supported_archs": {9}}, "supported_archs holds 9", "major * 10 + minor"),
    ],
    ids=["device", "architecture"],
)
def test_a_declaration_that_cannot_hold_is_found(kit: Any, members: Any, found: str, change: str) -> None:
    text = kit.verdict(check_declared_facts, kit.broken(**members))
    assert text.startswith("rule broken: declared facts are honoured\n  by: local:broken  [")
    assert found in text
    assert change in text


def test_a_declaration_that_was_changed_after_the_registration_is_found(kit: Any) -> None:
    subject = kit.broken()
    subject.cls.devices = ["cpu"]
    assert "devices must be a frozenset of device types, not ['cpu']" in kit.verdict(check_declared_facts, subject)


def test_a_class_is_asked_only_about_boards_that_it_declares(kit: Any) -> None:
    subject = kit.broken(devices=frozenset({"cuda"}), supported_archs=frozenset({80, 89}))
    assert {call.stated_on for call in askable(subject)} == {"a100", "l40s", "rtx4090"}


def test_a_class_for_a_device_type_that_is_not_there_is_asked_with_the_facts_it_names(kit: Any) -> None:
    subject = kit.broken(devices=frozenset({"privateuseone"}), supported_archs=at_least(3))
    assert {call.facts for call in askable(subject)} == {DeviceFacts(arch=3)}
    assert {call.device for call in askable(subject)} == {torch.device("privateuseone", 0)}


def test_a_class_for_no_board_that_is_known_is_not_tried_and_says_so(kit: Any) -> None:
    subject = kit.broken(devices=frozenset({"cuda"}), supported_archs=frozenset({70}))
    with pytest.raises(NotTried, match="available for no sample call, on no board that is known"):
        check_purity(subject, LIMITS)


# ------------------------------------------------------------------------------------------ pure and total answers

COUNTER = itertools.count()


def raises_beyond_32_bits(call: Any) -> None:
    if call.n > 1 << 32 and call.n != 1 << 40:
        raise OverflowError("too long for me")


def swallows_a_device_query(call: Any) -> None:
    with contextlib.suppress(Exception):
        torch.cuda.is_available()


def moves_the_default_dtype(call: Any) -> None:
    torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize(
    ("refusal", "found", "change"),
    [
        (raises_beyond_32_bits, "refusal raised OverflowError: too long for me (", "answer every call"),
        (lambda call: "", "refusal returned ''", "return None where the call is served, else a sentence"),
        (lambda call: False, "refusal returned False", "return None where the call is served, else a sentence"),
        (lambda call: os.environ.get("PATH"), "with another environment and default dtype", "nothing but the call"),
        (lambda call: f"asked {next(COUNTER)} times", "refusal answered 'asked ", "nothing but the call"),
        (lambda call: torch.ones(2).sum() < 0 or None, "refusal: it ran torch's aten.ones", "call.arch"),
        (swallows_a_device_query, "refusal: it asked a device: torch.cuda.is_available()", "call.sm_count"),
    ],
    ids=["raises", "empty", "no sentence", "environment", "counter", "tensor", "device"],
)
def test_a_refusal_that_is_not_pure_and_total_is_found(kit: Any, refusal: Any, found: str, change: str) -> None:
    text = kit.verdict(check_purity, kit.broken(refusal=answering(refusal)), LIMITS)
    assert text.startswith(
        "rule broken: refusal, entry_for and configurations are pure and total\n  by: local:broken  ["
    )
    assert "  call: ScaleCall(device=cpu, n=" in text
    assert found in text
    assert change in text


def test_a_refusal_that_changes_global_state_is_found(kit: Any) -> None:
    subject = kit.broken(refusal=answering(moves_the_default_dtype))
    try:
        text = kit.verdict(check_purity, subject, LIMITS)
    finally:
        torch.set_default_dtype(torch.float32)
    assert "torch's default dtype: torch.float32 became torch.float64" in text


@pytest.mark.parametrize(
    ("entry_for", "found"),
    [
        (lambda call: ([call.n], int), "entry_for raised TypeError: unhashable type: 'list'"),
        (lambda call: (float("nan"), int), "the identity nan does not equal itself"),
        (lambda call: (call.n, 3), "the factory 3 cannot be called"),
        (lambda call: (call.n, 10 // (call.n - 7), int), "entry_for raised"),
        (lambda call: (next(COUNTER), int), "entry_for answered"),
    ],
    ids=["unhashable", "nan", "no factory", "raises", "counter"],
)
def test_an_entry_for_that_is_not_pure_and_total_is_found(kit: Any, entry_for: Any, found: str) -> None:
    assert found in kit.verdict(check_purity, kit.broken(entry_for=answering(entry_for)), LIMITS)


@pytest.mark.parametrize(
    ("configurations", "found"),
    [
        (lambda call: [{"step": next(COUNTER)}], "configurations answered "),
        (lambda call: [{"tile": (8, 8)}], "configurations raised TypeError: Broken.configurations lists {'tile'"),
        (lambda call: 1 // 0, "configurations raised ZeroDivisionError"),
    ],
    ids=["varies", "no configuration", "raises"],
)
def test_configurations_that_are_not_pure_and_total_are_found(kit: Any, configurations: Any, found: str) -> None:
    assert found in kit.verdict(check_purity, kit.broken(configurations=answering(configurations)), LIMITS)


def test_only_calls_that_are_served_are_asked_for_an_entry(kit: Any) -> None:
    refusal = answering(lambda call: None if call.n == 7 else f"{call.n} elements; serves 7")
    check_purity(kit.broken(refusal=refusal, entry_for=answering(lambda call: (1 // (call.n == 7), int))), LIMITS)


# --------------------------------------------------------------------------------------------------- precedence


def test_an_ambiguity_with_an_in_tree_kernel_is_found_and_in_tree_is_what_settles_it(kit: Any) -> None:
    kit.op = kit.new_op(plain=kit.Right)
    text = kit.verdict(check_ambiguity, kit.broken())
    assert "rule broken: nothing is ambiguous among the backend's own implementations and the in-tree ones" in text
    assert "found: plain and local:broken serve this call and none is preferred" in text
    assert "change: let it state preferred_over = frozenset({IN_TREE}), or refuse the call" in text
    unregister_kernel_type("ScaleOp", "broken")
    check_ambiguity(kit.broken(preferred_over=frozenset({IN_TREE})))


def test_an_ambiguity_among_a_backends_own_kernels_is_found(kit: Any) -> None:
    register_kernel_type("ScaleOp", "other", kit.Right)
    text = kit.verdict(check_ambiguity, kit.broken())
    assert "local:broken and local:other serve this call" in text
    assert "preferred_over = frozenset({'other'})" in text


ROW = """
    from tileops.backend import register_kernel_type
    from tileops.kernels.rms_norm import RMSNorm

    class Row(RMSNorm):
        devices = frozenset({"cpu"})

        def forward(self, x, weight):
            return self.reference(self.call, x, weight)

    register_kernel_type("RMSNormFwdOp", "row", Row)
"""


def test_an_overlap_with_another_backend_breaks_no_rule_and_is_listed_with_what_settles_it(
    site: Any, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("acme", "zeta"):
        site.backend(name, ROW)
    monkeypatch.setenv("TILEOPS_BACKENDS", "acme,zeta")
    (subject,) = subjects_of("acme")
    check_ambiguity(subject)
    (line,) = overlaps([subject])
    assert line.startswith("RMSNormFwdOp: acme:row and zeta:row serve RMSNormCall(device=cpu, n=1, ")
    assert line.endswith('a user settles it by: with tileops.selection(prefer="acme"): …')
