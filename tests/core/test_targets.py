"""Targets: a backend's name for kernels that take over whole ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tileops import BuildError, UnknownTargetError
from tileops.backend import TensorSpec, register_kernel_builder, registered_targets
from tileops.errors import RegistrationError
from tileops.ops.op_base import Op


class Builder:
    """Logs what it is asked with, and what its kernels are given."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.asked = list[tuple[tuple[Any, ...], dict[str, Any]]]()
        self.ran = list[tuple[Any, ...]]()

    def __call__(self, *specs: TensorSpec | None, **params: Any) -> Any:
        self.asked.append((specs, params))
        if self.failures:
            raise self.failures.pop()
        return self.run

    def run(self, *tensors: Any) -> Any:
        self.ran.append(tensors)
        return torch.full_like(tensors[0], 7.0, memory_format=torch.contiguous_format)


@pytest.fixture
def target_op(fake: Any) -> type[Op]:
    class TargetOp(fake.op({"a": fake.kernel("Ours")}, name="Base")):
        def __init__(self, size: int = 4, slope: float = 0.5, *, target: str | None = None) -> None:
            super().__init__(target=target)
            self.size = size
            self.slope = slope

        def check(self, x: Any, weight: Any = None) -> None: ...

        def forward(self, x: Any, weight: Any = None) -> Any:
            return self.kernel_for("fake", fake.call(x.numel()))(x)

        def empty_results(self, x: Any, weight: Any = None) -> Any:
            return torch.empty_like(x, memory_format=torch.contiguous_format)

    return TargetOp


def taken_over(result: Any) -> bool:
    """Whether a result came from a `Builder`'s kernel, and not from a fake kernel, which returns a tuple."""
    return isinstance(result, torch.Tensor) and bool((result == 7).all())


def test_a_named_target_takes_the_op_over_and_no_kernel_is_asked(fake: Any, target_op: Any) -> None:
    register_kernel_builder("TargetOp", "acme", Builder())
    assert taken_over(target_op(target="acme")(torch.ones(4)))
    assert fake.log == []
    assert target_op()(torch.ones(4))[0] == "Ours"


def test_a_builder_gets_specs_in_signature_order_and_parameters_by_name(target_op: Any) -> None:
    builder = Builder()
    register_kernel_builder("TargetOp", "acme", builder)
    op = target_op(8, target="acme")
    x, weight = torch.ones(2, 8), torch.ones(8, dtype=torch.float64)
    op(x)
    op(weight=weight, x=x)
    spec = TensorSpec(torch.device("cpu"), torch.float32, (2, 8))
    assert builder.asked[0] == ((spec, None), {"size": 8, "slope": 0.5})
    assert builder.asked[1][0] == (spec, TensorSpec(torch.device("cpu"), torch.float64, (8,)))
    assert builder.ran == [(x, None), (x, weight)]


def test_a_builder_is_asked_once_for_equal_specs_and_parameters(target_op: Any) -> None:
    builder = Builder()
    register_kernel_builder("TargetOp", "acme", builder)
    for _ in range(3):
        target_op(target="acme")(torch.ones(4))
        target_op(target="acme")(torch.ones(4))
    assert len(builder.asked) == 1
    target_op(target="acme")(torch.ones(5))
    target_op(target="acme")(torch.ones(4, dtype=torch.float64))
    target_op(4, 0.25, target="acme")(torch.ones(4))
    assert len(builder.asked) == 4


def test_a_target_is_given_contiguous_inputs(target_op: Any) -> None:
    builder = Builder()
    register_kernel_builder("TargetOp", "acme", builder)
    x, weight = torch.arange(12.0).reshape(3, 4).t(), torch.arange(8.0)[::2]
    target_op(target="acme")(x, weight)
    for given, came in zip((x, weight), builder.ran[0]):
        assert came.is_contiguous()
        assert torch.equal(given, came)


def test_a_call_without_elements_asks_no_target(target_op: Any) -> None:
    builder = Builder()
    register_kernel_builder("TargetOp", "acme", builder)
    assert target_op(target="acme")(torch.ones(0, 4)).shape == (0, 4)
    assert builder.asked == []


def test_an_unknown_target_is_an_error_that_lists_the_known_ones(target_op: Any) -> None:
    with pytest.raises(UnknownTargetError, match="TargetOp: no target is called 'acm'; known targets: none"):
        target_op(target="acm")(torch.ones(4))
    register_kernel_builder("TargetOp", "zeta", Builder())
    register_kernel_builder("TargetOp", "acme", Builder())
    message = "known targets: acme, zeta; did you mean 'acme'?"
    with pytest.raises(UnknownTargetError, match=message.replace("?", r"\?")):
        target_op(target="acm")(torch.ones(4))
    assert registered_targets() == ["acme", "zeta"]


def test_a_target_without_the_op_says_which_ops_it_takes_over_and_nothing_falls_back(fake: Any, target_op: Any) -> None:
    fake.op({}, name="SecondOp")
    register_kernel_builder("SecondOp", "acme", Builder())
    with pytest.raises(UnknownTargetError, match="target 'acme' has nothing for TargetOp; it takes over: SecondOp"):
        target_op(target="acme")(torch.ones(4))
    assert fake.log == []


def test_a_target_registered_later_serves_a_live_instance(target_op: Any) -> None:
    op = target_op(target="acme")
    with pytest.raises(UnknownTargetError):
        op(torch.ones(4))
    register_kernel_builder("TargetOp", "acme", Builder())
    assert taken_over(op(torch.ones(4)))


def test_a_failing_builder_is_a_build_error_with_its_cause_and_the_next_call_retries(target_op: Any) -> None:
    cause = OSError("no licence")
    builder = Builder(cause)
    register_kernel_builder("TargetOp", "acme", builder)
    op = target_op(target="acme")
    with pytest.raises(
        BuildError, match=r"TargetOp: target 'acme' \(local\) could not build .*OSError: no licence"
    ) as raised:
        op(torch.ones(4))
    assert raised.value.__cause__ is cause
    assert taken_over(op(torch.ones(4)))


def test_a_builder_that_returns_nothing_callable_is_a_build_error(target_op: Any) -> None:
    register_kernel_builder("TargetOp", "acme", lambda *specs, **params: 3)
    with pytest.raises(BuildError, match="the builder of target 'acme' .*returned 3, which nobody can call"):
        target_op(target="acme")(torch.ones(4))


def test_a_second_builder_for_an_op_and_target_is_refused_and_the_same_again_is_not(target_op: Any) -> None:
    builder = Builder()
    register_kernel_builder("TargetOp", "acme", builder)
    register_kernel_builder("TargetOp", "acme", builder)
    with pytest.raises(RegistrationError, match="target 'acme' has a builder for TargetOp already"):
        register_kernel_builder("TargetOp", "acme", Builder())
    target_op(target="acme")(torch.ones(4))
    assert len(builder.asked) == 1


def test_a_builder_that_nobody_can_call_is_refused(target_op: Any) -> None:
    with pytest.raises(RegistrationError, match="the builder of target 'acme' for TargetOp is 3"):
        register_kernel_builder("TargetOp", "acme", 3)  # type: ignore[arg-type]


def test_a_builder_for_an_unknown_op_is_kept(fake: Any, target_op: Any) -> None:
    register_kernel_builder("FutureOp", "acme", Builder())
    assert taken_over(fake.op({}, name="FutureOp")(target="acme")(torch.ones(2)))


def test_a_tensor_spec_compares_by_device_dtype_and_shape_and_holds_no_tensor() -> None:
    spec = TensorSpec.of(torch.ones(2, 3))
    assert spec == TensorSpec.of(torch.zeros(3, 2).t())
    assert spec != TensorSpec.of(torch.ones(3, 2))
    assert spec != TensorSpec.of(torch.ones(2, 3, dtype=torch.float64))
    assert spec != TensorSpec.of(torch.ones(2, 3, device="meta"))
    assert hash(spec) == hash(TensorSpec(torch.device("cpu"), torch.float32, (2, 3)))
    assert TensorSpec.of(None) is None


def test_the_exception_of_a_targets_kernel_reaches_the_caller(target_op: Any) -> None:
    def build(*specs: Any, **params: Any) -> Any:
        def run(*tensors: Any) -> Any:
            raise ZeroDivisionError("in the target")

        return run

    register_kernel_builder("TargetOp", "acme", build)
    with pytest.raises(ZeroDivisionError, match="in the target"):
        target_op(target="acme")(torch.ones(4))


def test_explain_of_an_op_with_a_target_says_that_no_kernel_is_asked(target_op: Any) -> None:
    register_kernel_builder("TargetOp", "acme", Builder())
    selection = target_op(target="acme").explain(torch.ones(4))
    assert (selection.target, selection.key, selection.failure) == ("acme", None, None)
    assert "target 'acme' (local) takes the op over: target= names it" in str(selection)
