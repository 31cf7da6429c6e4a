"""The rules about building and running, and the kernels that break them."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

import pytest
import torch
from tileops import register_kernel_builder
from tileops.backend import Declined, Entry
from tileops.testing import Limits
from tileops.testing.broken_rule import NotTried
from tileops.testing.configuration_rules import check_configurations
from tileops.testing.running_rules import (
    check_agreement,
    check_identity,
    check_no_trace,
    check_threads,
    import_compilers,
)
from tileops.testing.samples import runnable
from tileops.testing.subjects import builders_of
from tileops.testing.target_rules import check_target
from torch import Tensor

LIMITS = Limits(samples=10, elements=10_000)


def forward(run: Any) -> dict[str, Any]:
    """A `forward` that does something to its arguments, and gives what `run` makes of the right results."""

    def broken(self: Any, x: Tensor, shift: Tensor | None, total: Tensor) -> Any:
        return run(self, x, shift, total, lambda: type(self).__base__.forward(self, x, shift, total))

    return {"forward": broken}


def test_the_right_kernel_holds_to_the_rules(kit: Any) -> None:
    subject = kit.broken()
    for check in (check_agreement, check_identity, check_threads, check_configurations, check_no_trace):
        check(subject, LIMITS)


def test_samples_cover_every_dtype_that_is_served_and_leave_out_what_is_large(kit: Any) -> None:
    calls = runnable(kit.broken(), LIMITS)
    assert {call.dtype for call in calls} == {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    assert {call.n for call in calls} == {1, 7, 64}
    assert {call.shift_dtype for call in calls} >= {None, torch.float32}


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"devices": frozenset({"cuda"})}, "it runs on cuda, and this machine has no such device"),
        ({"refusal": classmethod(lambda cls, call: "no")}, "it serves none of the sample calls of Scale on cpu"),
        ({"refusal": classmethod(lambda cls, call: None if call.n > 64 else "no")}, "tensors of up to 10000 elements"),
    ],
    ids=["elsewhere", "refuses", "large"],
)
def test_what_cannot_be_run_here_is_skipped_with_the_reason(
    kit: Any, members: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotTried, match=reason):
        check_agreement(kit.broken(**members), LIMITS)


# ---------------------------------------------------------------------------------------------------- agreement


def off_in_float16(self: Any, x: Tensor, shift: Any, total: Any, right: Any) -> Tensor:
    return right() + (0.1 if x.dtype is torch.float16 else 0)


def wrong_for_single_elements(self: Any, x: Tensor, shift: Any, total: Any, right: Any) -> Tensor:
    return right() if x.shape[1] > 1 else right().neg()


def widens(self: Any, x: Tensor, shift: Any, total: Any, right: Any) -> Tensor:
    return right().float()


def flattens(self: Any, x: Tensor, shift: Any, total: Any, right: Any) -> Tensor:
    return right().reshape(-1)


def returns_the_total_too(self: Any, x: Tensor, shift: Any, total: Any, right: Any) -> Any:
    return right(), total


def forgets_the_total(self: Any, x: Tensor, shift: Any, total: Tensor, right: Any) -> Tensor:
    before = total.clone()
    y = right()
    total.copy_(before)
    return y


def works_in_place(self: Any, x: Tensor, shift: Any, total: Any, right: Any) -> Tensor:
    y = right()
    x.mul_(2)
    return y


def raises(self: Any, x: Tensor, shift: Any, total: Any, right: Any) -> Tensor:
    raise ZeroDivisionError("in the kernel")


@pytest.mark.parametrize(
    ("run", "found", "change"),
    [
        (
            off_in_float16,
            "the result differs from the reference in float64 in 5 of 5 elements, at most in element ",
            "mend the kernel for this call",
        ),
        (wrong_for_single_elements, "the result differs from the reference", "let refusal refuse it"),
        (widens, "the result has dtype torch.float32; the reference gives torch.float16", "mend"),
        (flattens, "the result has shape (5,); the reference gives (5, 1)", "mend"),
        (returns_the_total_too, "it gives 3 tensors", "mend"),
        (forgets_the_total, "total, which is written, differs from the reference", "mend"),
        (works_in_place, "x was written", "copy x first: Scale writes total alone"),
        (raises, "it raised ZeroDivisionError: in the kernel (", "let refusal refuse the call"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_kernel_that_disagrees_with_the_reference_is_found(kit: Any, run: Any, found: str, change: str) -> None:
    text = kit.verdict(check_agreement, kit.broken(**forward(run)), LIMITS)
    assert text.startswith("rule broken: a call that is not refused builds and agrees with the reference\n  by: local")
    assert "  call: ScaleCall(device=cpu, n=" in text
    assert found in text
    assert change in text


def test_a_result_that_shares_the_memory_of_an_argument_is_found(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def returns_x_where_nothing_is_to_do(self: Any, x: Tensor, shift: Any, total: Any, right: Any) -> Tensor:
        y = right()
        return x if self.call.factor == 1 else y

    def sample_calls(cls: Any, device: torch.device) -> Any:
        return tuple(kit.Call(device, 4, torch.float32, factor, shift_dtype=None) for factor in (2.0, 1.0))

    monkeypatch.setattr(kit.Interface, "sample_calls", classmethod(sample_calls))
    text = kit.verdict(check_agreement, kit.broken(**forward(returns_x_where_nothing_is_to_do)), LIMITS)
    assert "factor=1.0" in text
    assert "found: the result shares the memory of x" in text
    assert "change: return a new tensor, as the reference does" in text


def test_a_kernel_that_serves_float64_in_float32_is_found_though_no_sample_is_in_float64(kit: Any) -> None:
    text = kit.verdict(check_agreement, kit.broken(wide=lambda self, x: torch.float32), LIMITS)
    assert "dtype=float64" in text
    assert "the result differs from the reference in float64" in text


def test_what_repeated_calls_go_to_is_held_to_the_contract_too(kit: Any) -> None:
    def keeps_the_first_result(self: Any, *tensors: Any) -> Any:
        y = self.forward(*(None if tensor is None else tensor.clone() for tensor in tensors))
        return lambda x, shift, total: (total.add_(x.numel()), y)[1]

    text = kit.verdict(check_agreement, kit.broken(repeated=keeps_the_first_result), LIMITS)
    assert "found: what its repeated() returned is wrong for a like call: the result differs" in text


def test_a_kernel_that_cannot_be_built_is_found(kit: Any) -> None:
    def factory() -> None:
        raise OSError("no such compiler")

    entry_for = classmethod(lambda cls, call: (call, factory))
    text = kit.verdict(check_agreement, kit.broken(entry_for=entry_for), LIMITS)
    assert "found: it could not be built: OSError: no such compiler (" in text
    assert "change: mend the factory, or let refusal refuse what it cannot build" in text


# ------------------------------------------------------------------------------------------------ configurations


def configured(run: Any) -> dict[str, Any]:
    """A kernel with three configurations, which gives what `run` makes of the right results in the third."""

    def broken(self: Any, x: Tensor, shift: Any, total: Tensor) -> Any:
        right = type(self).__base__.forward(self, x, shift, total)
        return right if self.configuration["step"] < 3 else run(right)

    listed = [{"step": step} for step in (1, 2, 3)]
    return {"forward": broken, "configurations": classmethod(lambda cls, call: listed)}


def test_a_kernel_that_is_right_in_every_configuration_holds_to_the_rule(kit: Any) -> None:
    check_configurations(kit.broken(**configured(lambda right: right)), LIMITS)


def short(right: Tensor) -> Tensor:
    return right if right.shape[1] > 1 else right.neg()


def long(right: Tensor) -> Tensor:
    return right if right.shape[1] < 64 else right.neg()


def fails(right: Tensor) -> Tensor:
    raise ZeroDivisionError("in the kernel")


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (short, "the result differs from the reference"),
        (long, "the result differs from the reference"),
        (fails, "it raises ZeroDivisionError: in the kernel"),
    ],
)
def test_a_configuration_that_is_wrong_is_found_and_named(kit: Any, run: Any, found: str) -> None:
    text = kit.verdict(check_configurations, kit.broken(**configured(run)), LIMITS)
    assert f"found: in step=3 of Broken {found}" in text
    assert "change: mend the kernel in that configuration, or do not list it for such calls" in text


def test_a_configuration_of_a_kernel_within_an_entry_is_tried_too(kit: Any) -> None:
    inner = type("Inner", (kit.Right,), configured(torch.neg))

    def entry_for(cls: Any, call: Any) -> Any:
        return call, lambda: Entry(made := inner(call), (made,))

    text = kit.verdict(check_configurations, kit.broken(entry_for=classmethod(entry_for)), LIMITS)
    assert "found: in step=3 of Inner the result differs" in text


# ----------------------------------------------------------------------------------------------------- identity


@pytest.mark.parametrize(
    ("identity", "run", "field"),
    [
        (lambda call: call.n, None, "factor"),
        (lambda call: call.factor, lambda self, x, shift, total, right: right()[:, : self.call.n], "n"),
        (
            lambda call: (call.n, call.factor, call.dtype),
            lambda self, x, shift, total, right: (
                right() - (shift if self.call.shift_dtype is None and shift is not None else 0)
            ),
            "shift_dtype",
        ),
    ],
    ids=["factor", "n", "shift"],
)
def test_a_factory_that_reads_a_fact_missing_from_the_identity_is_found(
    kit: Any, identity: Any, run: Any, field: str
) -> None:
    members = {} if run is None else forward(run)
    entry_for = classmethod(lambda cls, call: (identity(call), lambda: cls(call)))
    text = kit.verdict(check_identity, kit.broken(entry_for=entry_for, **members), LIMITS)
    assert text.startswith("rule broken: equal identity means equal behaviour\n  by: local:broken")
    assert "serves another call of equal identity, ScaleCall(" in text
    assert f"change: put {field} into the identity that entry_for returns" in text


def test_what_a_kernel_gets_wrong_for_itself_too_is_no_matter_of_identity(kit: Any) -> None:
    check_identity(kit.broken(**forward(off_in_float16)), LIMITS)


# ------------------------------------------------------------------------------------------------------ threads


def keeps_its_scratch(self: Any, x: Tensor, shift: Any, total: Any, right: Any) -> Tensor:
    self.scratch = right()
    time.sleep(0.0001)
    return self.scratch


def draws(self: Any, x: Tensor, shift: Any, total: Any, right: Any) -> Tensor:
    return right() + torch.rand(()) * 1e-3


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (keeps_its_scratch, "of 32 runs differ from the same run alone"),
        (draws, "two runs from one thread already differ"),
    ],
    ids=["scratch", "random"],
)
def test_an_entry_that_keeps_something_between_calls_is_found(kit: Any, run: Any, found: str) -> None:
    text = kit.verdict(check_threads, kit.broken(**forward(run)), LIMITS)
    assert text.startswith("rule broken: an entry gives the same bits from four threads as from one\n")
    assert found in text
    assert "change: keep nothing between calls: take scratch per call" in text


# ----------------------------------------------------------------------------------------------------- no trace


def test_a_factory_that_changes_global_state_is_found(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACME_THREADS", raising=False)

    def build(self: Any, call: Any = None) -> None:
        super(kit.Right, self).__init__(call)
        os.environ["ACME_THREADS"] = "1"

    try:
        text = kit.verdict(check_no_trace, kit.broken(__init__=build), LIMITS)
    finally:
        os.environ.pop("ACME_THREADS")
    assert text.startswith("rule broken: building and running change no global state\n  by: local:broken")
    assert "found: building it changed os.environ: ACME_THREADS None became '1'" in text
    assert "name the compiler's module in the `compilers` of your ConformanceTests" in text


def test_a_run_that_changes_global_state_is_found(kit: Any) -> None:
    def counts_threads(self: Any, x: Tensor, shift: Any, total: Any, right: Any) -> Tensor:
        torch.set_num_threads(threads + 1)
        return right()

    threads = torch.get_num_threads()
    try:
        text = kit.verdict(check_no_trace, kit.broken(**forward(counts_threads)), LIMITS)
    finally:
        torch.set_num_threads(threads)
    assert f"found: running it changed torch's number of threads: {threads} became {threads + 1}" in text


def test_what_importing_a_compiler_changes_is_not_taken_for_the_kernels_doing(
    kit: Any, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME_HOME", "")
    site.module("acme_compiler", "import os; os.environ['ACME_HOME'] = '/opt/acme'")

    def build(self: Any, call: Any = None) -> None:
        super(kit.Right, self).__init__(call)
        importlib.import_module("acme_compiler")

    import_compilers(["acme_compiler", "no_such.compiler"])
    check_no_trace(kit.broken(__init__=build), LIMITS)


# ------------------------------------------------------------------------------------------------------- targets


def built_for(kit: Any, make: Any, *, declines: Any = lambda x: False, per_op: bool = False) -> Any:
    """A target of the invented op whose builder gives `make(factor)`, or declines what `declines` says."""

    def build(x: Any, shift: Any, total: Any, *, factor: float) -> Any:
        assert shift is None or shift.shape == x.shape[-1:]
        assert total.shape == ()
        if declines(x):
            raise Declined("not this one")
        return make(factor)

    register_kernel_builder("ScaleOp", "acme", build, per_op=per_op)
    return builders_of("local")[0]


def right(factor: float) -> Any:
    def run(x: Tensor, shift: Tensor | None, total: Tensor) -> Tensor:
        total += x.numel()
        y = x.float() * factor
        return (y if shift is None else y + shift).to(x.dtype)

    return run


def test_a_target_that_agrees_with_the_reference_of_the_ops_interface_is_taken(kit: Any) -> None:
    check_target(built_for(kit, right), LIMITS)


def test_a_target_that_disagrees_is_found(kit: Any) -> None:
    text = kit.verdict(check_target, built_for(kit, lambda factor: right(2 * factor)), LIMITS)
    assert text.startswith("rule broken: what a target builds agrees with the reference, and may be shared\n")
    assert "by: target 'acme' for ScaleOp(factor=1.5)" in text
    assert "the result differs from the reference" in text


def keeping(factor: float) -> Any:
    kept: dict[str, Tensor] = {}

    def run(*tensors: Any) -> Tensor:
        kept["y"] = right(factor)(*tensors)
        time.sleep(0.0001)
        return kept["y"]

    return run


def test_a_target_whose_kernel_keeps_something_between_calls_is_found(kit: Any) -> None:
    text = kit.verdict(check_target, built_for(kit, keeping), LIMITS)
    assert "runs differ from the same run alone" in text
    assert "equal ops share what is built" in text


def test_a_kernel_of_one_op_may_keep_something_between_calls(kit: Any) -> None:
    check_target(built_for(kit, keeping, per_op=True), LIMITS)


def test_a_target_may_decline_some_calls_and_not_fail_at_them(kit: Any) -> None:
    seen = list[torch.dtype]()

    def half(x: Any) -> bool:
        seen.append(x.dtype)
        return x.dtype is torch.float16

    check_target(built_for(kit, right, declines=half), LIMITS)
    assert torch.float16 in seen


def test_a_target_that_declines_every_sample_call_is_skipped(kit: Any) -> None:
    with pytest.raises(NotTried, match="builds for none of the op's sample calls on this machine$"):
        check_target(built_for(kit, right, declines=lambda x: True), LIMITS)


def test_a_target_that_builds_nothing_here_is_skipped_with_its_reason(kit: Any) -> None:
    def make(factor: float) -> Any:
        raise OSError("no licence")

    with pytest.raises(NotTried, match="builds for none of the op's sample calls on this machine: OSError: no licence"):
        check_target(built_for(kit, make), LIMITS)
