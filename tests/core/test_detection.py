"""Which target a call is offered to: named, the default, or detected; and what happens where it declines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tileops import (
    AmbiguousTargetError,
    BackendError,
    BuildError,
    OpNotAvailableError,
    TargetDeclinedError,
    UnknownTargetError,
    clear,
)
from tileops.backend import (
    BUILTIN,
    Declined,
    default_target,
    register_detector,
    register_kernel_builder,
    register_kernel_type,
    registered_targets,
    set_default_target,
)
from tileops.errors import KernelFaultWarning, RegistrationError
from tileops.ops import target_kernels
from tileops.ops.op_base import Op

X = torch.ones(4)
CPU = torch.device("cpu")
META = torch.device("meta")


def on_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def filling(value: float) -> Callable[..., Any]:
    """A builder of kernels that fill the result."""
    return lambda *specs, **params: lambda x, *rest: torch.full_like(x, value)


def declining(*specs: Any, **params: Any) -> Any:
    raise Declined("no such shape here")


def served_by(result: Any) -> Any:
    """The name of the fake kernel that ran, or the value that a target's kernel filled in."""
    return result[0] if isinstance(result, tuple) else result.flatten()[0].item()


@pytest.fixture
def op(fake: Any) -> type[Op]:
    class DetectedOp(fake.op({"a": fake.kernel("Ours")}, name="Base")):
        def __init__(self, slope: float = 0.5, *, target: str | None = None) -> None:
            super().__init__(target=target)
            self.slope = slope

    return DetectedOp


@pytest.fixture
def acme(op: type[Op]) -> None:
    """A target that claims the CPU and fills with 1."""
    register_detector("acme", on_cpu)
    register_kernel_builder("DetectedOp", "acme", filling(1))


# ---------------------------------------------------------------------------------------------------- which target


@pytest.mark.usefixtures("acme")
def test_a_target_that_claims_the_device_takes_the_op_over_unasked(fake: Any, op: Any) -> None:
    assert served_by(op()(X)) == 1
    assert fake.log == []


def test_a_target_registered_later_takes_live_ops_over(op: Any) -> None:
    live = op()
    assert served_by(live(X)) == "Ours"
    register_detector("acme", on_cpu)
    assert served_by(live(X)) == "Ours"
    register_kernel_builder("DetectedOp", "acme", filling(1))
    assert served_by(live(X)) == 1


def test_a_call_on_another_device_is_served_by_that_devices_target(op: Any) -> None:
    class Meta(op):
        def check(self, x: Any) -> None: ...

    seen = list[torch.device]()

    def build(x: Any, **params: Any) -> Any:
        seen.append(x.device)
        return torch.zeros_like

    for target, device in (("near", "cpu"), ("far", "meta")):
        register_detector(target, lambda asked, mine=device: asked.type == mine)
        register_kernel_builder("Meta", target, build)
    both = Meta()
    both(X)
    both(X.to("meta"))
    assert seen == [CPU, META]
    assert [both.explain(x).target for x in (X, X.to("meta"))] == ["near", "far"]


@pytest.mark.usefixtures("acme")
def test_what_the_op_names_comes_before_the_default_and_that_before_detection(op: Any) -> None:
    for target, value in (("default", 2), ("named", 3)):
        register_kernel_builder("DetectedOp", target, filling(value))
    live = op()
    assert served_by(live(X)) == 1
    set_default_target("default")
    assert default_target() == "default"
    assert served_by(live(X)) == 2
    assert served_by(op(target="named")(X)) == 3
    set_default_target(None)
    assert default_target() is None
    assert served_by(live(X)) == 1


@pytest.mark.usefixtures("acme")
def test_builtin_leaves_the_call_to_the_kernels_of_everybody(fake: Any, op: Any) -> None:
    register_kernel_type("DetectedOp", "mine", fake.kernel("Registered", over=("a",)))
    assert served_by(op(target=BUILTIN)(X)) == "Registered"
    set_default_target(BUILTIN)
    assert served_by(op()(X)) == "Registered"
    assert served_by(op(target="acme")(X)) == 1


def test_no_target_can_be_called_builtin_or_nothing(op: Any) -> None:
    for name in (BUILTIN, "", 3):
        with pytest.raises(RegistrationError, match="a target cannot be called"):
            register_kernel_builder("DetectedOp", name, filling(1))  # type: ignore[arg-type]
        with pytest.raises(RegistrationError, match="a target cannot be called"):
            register_detector(name, on_cpu)  # type: ignore[arg-type]
    assert registered_targets() == []


def test_a_default_that_nobody_registered_is_refused_and_changes_nothing(op: Any) -> None:
    register_kernel_builder("DetectedOp", "acme", filling(1))
    with pytest.raises(
        UnknownTargetError, match=r"no target is called 'acne'; known targets: acme; did you mean 'acme'"
    ):
        set_default_target("acne")
    assert default_target() is None


def test_a_default_that_has_nothing_for_the_op_is_an_error_and_nothing_stands_in(fake: Any, op: Any) -> None:
    register_kernel_builder("ElsewhereOp", "acme", filling(1))
    set_default_target("acme")
    with pytest.raises(
        UnknownTargetError, match="target 'acme' has nothing for DetectedOp; it takes over: ElsewhereOp"
    ):
        op()(X)
    assert fake.log == []


def test_the_targets_of_one_op_are_told_apart(op: Any) -> None:
    register_kernel_builder("DetectedOp", "zeta", filling(1))
    register_kernel_builder("ElsewhereOp", "acme", filling(1))
    register_detector("dreamt", on_cpu)
    assert registered_targets() == ["acme", "dreamt", "zeta"]
    assert registered_targets("DetectedOp") == ["zeta"]
    assert registered_targets("NoSuchOp") == []


# ----------------------------------------------------------------------------------------------------- detection


def test_a_detector_is_given_the_device_and_asked_once_for_each(op: Any) -> None:
    asked = list[torch.device]()
    register_detector("acme", asked.append)  # type: ignore[arg-type] - it returns None, which claims nothing
    register_kernel_builder("DetectedOp", "acme", filling(1))
    live = op()
    for _ in range(3):
        live(X)
        live(torch.ones(5))
        op()(X)
    assert asked == [CPU]
    register_kernel_builder("ElsewhereOp", "acme", filling(1))
    live(X)
    assert asked == [CPU, CPU]
    clear()
    live(X)
    assert asked == [CPU, CPU, CPU]


def test_no_detector_is_asked_where_its_target_can_take_nothing_over(op: Any) -> None:
    register_detector("acme", lambda device: pytest.fail("asked"))
    assert served_by(op()(X)) == "Ours"
    register_kernel_builder("ElsewhereOp", "acme", filling(1))
    assert served_by(op()(X)) == "Ours"


def test_without_a_target_for_the_op_a_call_makes_no_specs(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    live = op()
    live(X)
    register_kernel_builder("DetectedOp", "acme", filling(1))  # with no detector: for whoever names it
    monkeypatch.setattr(target_kernels.TensorSpec, "of", lambda _: pytest.fail("a spec was made"))
    assert served_by(live(X)) == "Ours"


def test_two_targets_that_claim_one_device_are_an_error_with_both_and_the_way_out(op: Any) -> None:
    for target in ("zeta", "acme"):
        register_detector(target, on_cpu)
        register_kernel_builder("DetectedOp", target, filling(1))
    with pytest.raises(AmbiguousTargetError) as raised:
        op()(X)
    assert str(raised.value) == (
        "DetectedOp: target 'acme' (local) and target 'zeta' (local) each claim cpu; choose one: "
        "DetectedOp(…, target='acme'), with tileops.selection(prefer=\"local:acme\"): …, or for the process "
        "tileops.backend.set_default_target('acme')"
    )
    assert isinstance(raised.value, BackendError)
    assert served_by(op(target="acme")(X)) == 1
    set_default_target("zeta")
    assert served_by(op()(X)) == 1


def test_a_claim_counts_only_where_the_target_has_the_op(op: Any) -> None:
    for target in ("zeta", "acme"):
        register_detector(target, on_cpu)
    register_kernel_builder("DetectedOp", "acme", filling(1))
    register_kernel_builder("ElsewhereOp", "zeta", filling(2))
    assert served_by(op()(X)) == 1


def test_a_claim_on_a_device_does_not_stop_an_op_that_the_target_lacks(op: Any) -> None:
    register_detector("acme", on_cpu)
    register_kernel_builder("ElsewhereOp", "acme", filling(1))
    assert served_by(op()(X)) == "Ours"


def test_where_nothing_serves_the_error_says_which_target_claims_the_device_and_lacks_the_op(fake: Any) -> None:
    register_detector("acme", on_cpu)
    register_kernel_builder("ElsewhereOp", "acme", filling(1))
    lacking = fake.op({"a": fake.kernel("Ours", devices=("cuda",))}, name="LackingOp")()
    said = (
        r"target 'acme' \(local\) claims cpu and registers no kernel builder for LackingOp; it takes over: ElsewhereOp"
    )
    with pytest.raises(OpNotAvailableError, match=said):
        lacking(X)


def test_a_detector_that_raises_claims_nothing_and_is_warned_about_once(op: Any) -> None:
    def broken(device: torch.device) -> bool:
        raise OSError("libacme.so is missing")

    register_detector("acme", broken)
    register_kernel_builder("DetectedOp", "acme", filling(1))
    said = r"the detector of target 'acme' \(local\) raised OSError: libacme.so is missing; it claims nothing on cpu"
    with pytest.warns(KernelFaultWarning, match=said):
        assert served_by(op()(X)) == "Ours"
    clear()
    assert served_by(op()(X)) == "Ours"
    assert served_by(op(target="acme")(X)) == 1


def test_an_answer_that_has_no_truth_is_a_fault_of_the_detector(op: Any) -> None:
    register_detector("acme", lambda device: torch.ones(2))  # type: ignore[arg-type,return-value]
    register_kernel_builder("DetectedOp", "acme", filling(1))
    with pytest.warns(KernelFaultWarning, match="the detector of target 'acme'"):
        assert served_by(op()(X)) == "Ours"


def test_a_target_has_one_detector_and_the_same_again_is_no_error(op: Any) -> None:
    register_detector("acme", on_cpu)
    register_detector("acme", on_cpu)
    with pytest.raises(RegistrationError, match="target 'acme' has a detector already"):
        register_detector("acme", lambda device: False)
    with pytest.raises(RegistrationError, match="the detector of target 'zeta' is True, which nobody can call"):
        register_detector("zeta", True)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------- declining


def test_a_detected_target_that_declines_leaves_the_call_to_the_kernels(op: Any) -> None:
    asked = list[Any]()

    def build(x: Any, **params: Any) -> Any:
        asked.append((x.shape, params))
        return filling(1)() if x.shape == (4,) else declining()

    register_detector("acme", on_cpu)
    register_kernel_builder("DetectedOp", "acme", build)
    for _ in range(3):
        assert served_by(op()(X)) == 1
        assert served_by(op()(torch.ones(5))) == "Ours"
    assert asked == [((4,), {"slope": 0.5}), ((5,), {"slope": 0.5})]
    op(0.25)(torch.ones(5))
    assert asked[2:] == [((5,), {"slope": 0.25})]


def test_what_a_builder_is_asked_with_is_told_apart_by_type(op: Any) -> None:
    asked = list[Any]()

    def build(x: Any, *, slope: Any) -> Any:
        asked.append(slope)
        return filling(1)()

    register_kernel_builder("DetectedOp", "acme", build)
    for slope in (1, 1.0, True, (1,), (1.0,), 1):
        op(slope, target="acme")(X)
    assert [repr(slope) for slope in asked] == ["1", "1.0", "True", "(1,)", "(1.0,)"]


def test_a_parameter_that_cannot_key_a_table_is_named(op: Any) -> None:
    register_kernel_builder("DetectedOp", "acme", filling(1))
    with pytest.raises(TypeError, match=r"DetectedOp\(slope=\[1\], target='acme'\) has a parameter that cannot key"):
        op([1], target="acme")(X)


@pytest.mark.parametrize("how", ["target= names it", "set_default_target names it"])
def test_a_named_target_that_declines_is_an_error_and_nothing_stands_in(fake: Any, op: Any, how: str) -> None:
    register_kernel_builder("DetectedOp", "acme", declining)
    if how.startswith("set"):
        set_default_target("acme")
    live = op() if how.startswith("set") else op(target="acme")
    said = (
        rf"DetectedOp: target 'acme' \(local\) declined this call: no such shape here, and nothing else is asked: {how}"
    )
    for _ in range(2):
        with pytest.raises(TargetDeclinedError, match=said):
            live(X)
    assert fake.log == []


def test_where_no_kernel_serves_a_declined_call_the_error_says_who_declined_it(fake: Any) -> None:
    lacking = fake.op({"a": fake.kernel("Ours", refuse="not this")}, name="LackingOp")()
    register_detector("acme", on_cpu)
    register_kernel_builder("LackingOp", "acme", declining)
    for _ in range(2):
        with pytest.raises(OpNotAvailableError) as raised:
            lacking(X)
        assert raised.value.verdicts[0].reason == "not this"
        assert raised.value.selection.remarks == ("target 'acme' (local) declined this call: no such shape here",)


def test_a_builder_that_raises_anything_else_is_a_build_error_with_the_way_out(op: Any) -> None:
    def build(*specs: Any, **params: Any) -> Any:
        raise ValueError("acme needs float16")

    register_detector("acme", on_cpu)
    register_kernel_builder("DetectedOp", "acme", build)
    with pytest.raises(BuildError, match=r"ValueError: acme needs float16\n.*Declined, and target=BUILTIN"):
        op()(X)
    assert served_by(op(target=BUILTIN)(X)) == "Ours"


# ------------------------------------------------------------------------------------------------------- explain


@pytest.mark.usefixtures("acme")
def test_explain_says_which_target_takes_the_op_over_and_why(op: Any) -> None:
    def line(live: Any) -> str:
        selection = live.explain(X)
        assert (selection.target, selection.key, selection.failure) == ("acme", None, None)
        assert selection.headline == "target 'acme' serves this call: DetectedOp.fake"
        [remark] = selection.remarks
        assert remark in str(selection)
        return remark.removeprefix("target 'acme' (local) takes the op over: ")

    assert line(op()) == "its detector claims cpu"
    assert line(op(target="acme")) == "target= names it"
    set_default_target("acme")
    assert line(op()) == "set_default_target names it"


@pytest.mark.usefixtures("acme")
def test_explain_tells_of_kernels_what_they_would_do(fake: Any, op: Any) -> None:
    assert "serves this call; the target is asked in its place" in str(op().explain(X))
    assert op().explain("fake", fake.call()).target == "acme"
    assert op.selection("fake", fake.call()).target == "acme"
    assert op().key_for("fake", fake.call()) == "a"
    assert op(target=BUILTIN).explain(X).key == "a"


def test_explain_says_why_a_declined_target_was_passed_by_and_asks_no_builder(op: Any) -> None:
    register_detector("acme", on_cpu)
    register_kernel_builder("DetectedOp", "acme", declining)
    assert op().explain(X).target == "acme"  # nobody has asked the builder yet
    op()(X)
    selection = op().explain(X)
    assert (selection.target, selection.key) == (None, "a")
    assert selection.remarks == ("target 'acme' (local) declined this call: no such shape here",)
    assert op().explain(torch.ones(5)).target == "acme"


def test_explain_does_not_raise_what_the_call_raises(fake: Any, op: Any) -> None:
    register_kernel_builder("DetectedOp", "acme", declining)
    unknown = op(target="acne").explain(X)
    assert unknown.headline == "the target does not serve this call: DetectedOp.fake"
    assert "no target is called 'acne'" in str(unknown)
    with pytest.raises(TargetDeclinedError):
        op(target="acme")(X)
    assert op(target="acme").explain(X).remarks == ("target 'acme' (local) declined this call: no such shape here",)
    assert op(target="acme").explain(X).as_json()["error"] is not None


@pytest.mark.usefixtures("acme")
def test_explain_asks_no_detector_about_a_board_that_is_not_there(fake: Any, op: Any) -> None:
    register_detector("cards", lambda device: pytest.fail("asked") if device.type == "cuda" else False)
    assert op().explain(X, on="h200").target is None
    assert op(target="acme").explain(X, on="h200").target == "acme"


@pytest.mark.usefixtures("acme")
def test_preparing_builds_the_detected_targets_kernel(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert op().prepare(X.to("meta")).target == "acme"  # a meta tensor stands for one on this machine
    monkeypatch.setattr(target_kernels, "_build", lambda *_: pytest.fail("it was not ready"))
    assert served_by(op()(X)) == 1


def test_preparing_a_declined_call_prepares_the_kernel(fake: Any, op: Any) -> None:
    register_detector("acme", on_cpu)
    register_kernel_builder("DetectedOp", "acme", declining)
    assert op().prepare(X).key == "a"
    assert fake.asked("built") == ["Ours"]
