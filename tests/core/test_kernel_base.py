"""`Kernel`, `KernelInterface`, and what registration refuses of a class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tileops import IN_TREE, DeclarationError, Kernel, KernelInterface, at_least
from tileops.device import DeviceFacts
from tileops.kernels.declarations import check_kernel_class
from tileops.kernels.kernel_base import available
from tileops.verdict import Answer, Owner


def refusal_of(fake: Any, cls: Any, key: Any = "row", interfaces: Any = None) -> str:
    with pytest.raises(DeclarationError) as raised:
        check_kernel_class(key, cls, [fake.Interface] if interfaces is None else interfaces)
    return str(raised.value)


def changed(fake: Any, **members: Any) -> Any:
    return type("Changed", (fake.kernel(),), members)


def test_a_class_that_only_subclasses_its_interface_and_runs_is_taken(fake: Any) -> None:
    class Plain(fake.Interface):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    check_kernel_class("plain", Plain, [fake.Interface])
    assert (Plain.devices, Plain.supported_archs, Plain.general, Plain.preferred_over) == (
        frozenset({"cuda"}), None, False, frozenset(),
    )  # fmt: skip
    assert Plain.refusal(fake.call()) is None
    identity, factory = Plain.entry_for(fake.call(3))
    assert identity == fake.call(3)
    assert factory().call == fake.call(3)


def test_calling_a_kernel_is_calling_its_forward(fake: Any) -> None:
    class Plain(fake.Interface):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    class Heir(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 2

    class Grandchild(Heir):
        pass

    assert [cls()(torch.zeros(1)).item() for cls in (Plain, Heir, Grandchild)] == [1, 2, 2]


def test_a_kernel_is_constructed_with_a_call_or_with_nothing(fake: Any) -> None:
    class Plain(fake.Interface):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    assert Plain().call is None
    assert Plain(fake.call()).call == fake.call()


def test_an_interface_states_what_it_lacks() -> None:
    class Bare(KernelInterface[Any]):
        pass

    for ask in (
        lambda: Bare.reference(None),
        lambda: Bare.sample_calls(torch.device("cpu")),
        lambda: Bare.sample_tensors(None, torch.Generator()),
        lambda: Bare()(torch.ones(1)),
    ):
        with pytest.raises(NotImplementedError, match="Bare has no"):
            ask()


@pytest.mark.parametrize("key", ["", "Row", "short rows", "row-1", "1row", "acme:row", "_row", None, 3])
def test_a_key_that_is_no_key_is_refused_with_an_example(fake: Any, key: Any) -> None:
    message = refusal_of(fake, fake.kernel(), key)
    assert repr(key) in message
    assert "such as 'short_rows'" in message


@pytest.mark.parametrize("cls", [None, "Row", lambda: None])
def test_what_is_no_class_is_refused(fake: Any, cls: Any) -> None:
    assert "is not a class; give the class itself" in refusal_of(fake, cls)


def test_an_instance_in_place_of_a_class_is_refused(fake: Any) -> None:
    assert "give the class itself" in refusal_of(fake, fake.kernel()())


@pytest.mark.parametrize("base", [object, Kernel])
def test_a_class_that_fits_no_interface_is_refused_with_the_interfaces_to_subclass(fake: Any, base: type) -> None:
    message = refusal_of(fake, type("Row", (base,), {}), interfaces=[fake.Interface, fake.Other])
    assert "Row (key 'row') implements no interface of this op; subclass one of: " in message
    assert "FakeInterface" in message
    assert "OtherInterface" in message


@pytest.mark.parametrize("method", ["refusal", "entry_for"])
@pytest.mark.parametrize("wrap", [lambda f: f, staticmethod, property])
def test_a_question_that_is_no_classmethod_is_refused(fake: Any, method: str, wrap: Any) -> None:
    message = refusal_of(fake, changed(fake, **{method: wrap(lambda call: None)}))
    assert f"Changed.{method} must be a classmethod" in message


@pytest.mark.parametrize("devices", ["cpu", {"cpu"}, ("cpu",), None, frozenset({1}), frozenset({torch.device("cpu")})])
def test_devices_that_are_no_frozenset_of_device_types_are_refused(fake: Any, devices: Any) -> None:
    message = refusal_of(fake, changed(fake, devices=devices))
    assert "Changed.devices must be a frozenset of device types" in message
    assert repr(devices) in message


def test_a_class_that_runs_on_no_device_type_is_refused(fake: Any) -> None:
    assert "devices" in refusal_of(fake, changed(fake, devices=frozenset()))


def test_architectures_of_two_device_types_are_refused(fake: Any) -> None:
    both = frozenset({"cpu", "cuda"})
    message = refusal_of(fake, changed(fake, devices=both, supported_archs=frozenset({90})))
    assert "supported_archs" in message


@pytest.mark.parametrize("archs", [90, True, "90", frozenset({"90"}), ["sm_90"]])
def test_architectures_that_are_no_set_of_numbers_are_refused(fake: Any, archs: Any) -> None:
    message = refusal_of(fake, changed(fake, devices=frozenset({"cuda"}), supported_archs=archs))
    assert "Changed.supported_archs must be a set or at_least(…)" in message


@pytest.mark.parametrize("archs", [None, frozenset({90}), {80, 90}, (90,), [90], range(80, 91), at_least(80)])
def test_architectures_as_any_collection_of_numbers_are_taken(fake: Any, archs: Any) -> None:
    check_kernel_class("row", changed(fake, devices=frozenset({"cuda"}), supported_archs=archs), [fake.Interface])


@pytest.mark.parametrize("over", [{"a"}, ("a",), "a", None])
def test_preferences_that_are_no_frozenset_are_refused(fake: Any, over: Any) -> None:
    assert "preferred_over must be a frozenset of keys" in refusal_of(fake, changed(fake, preferred_over=over))


@pytest.mark.parametrize("name", ["Row", "acme:", ":row", "acme:Row", "a b", 3, "a:b:c", "IN_TREE"])
def test_a_preference_for_what_is_no_key_is_refused(fake: Any, name: Any) -> None:
    message = refusal_of(fake, changed(fake, preferred_over=frozenset({name})))
    assert f"preferred_over holds {name!r}, which is no key" in message


@pytest.mark.parametrize("name", ["row", "acme:row", "acme-2:row_1", IN_TREE])
def test_a_preference_for_a_key_is_taken(fake: Any, name: str) -> None:
    check_kernel_class("best", changed(fake, preferred_over=frozenset({name})), [fake.Interface])


def test_a_general_class_states_no_preference_but_in_tree(fake: Any) -> None:
    message = refusal_of(fake, fake.kernel(general=True, over=("row", IN_TREE)))
    assert "is general, hence below everything that is not" in message
    assert "row" in message
    check_kernel_class("row", fake.kernel(general=True, over=(IN_TREE,)), [fake.Interface])


def test_a_class_without_a_forward_of_its_own_is_refused(fake: Any) -> None:
    class Silent(fake.Interface):
        pass

    assert "Silent has no forward of its own; FakeInterface states its contract" in refusal_of(fake, Silent)


@pytest.mark.parametrize("forward", [lambda self: 0, lambda self, x, y: 0, lambda self, *, x: 0])
def test_a_forward_that_does_not_take_the_interfaces_arguments_is_refused(fake: Any, forward: Any) -> None:
    message = refusal_of(fake, changed(fake, forward=forward))
    assert "Changed.forward does not take the arguments of FakeInterface (x)" in message


@pytest.mark.parametrize("forward", [lambda self, rows: 0, lambda self, x, y=None: 0, lambda self, *tensors: 0])
def test_a_forward_that_takes_the_interfaces_arguments_in_its_order_is_taken(fake: Any, forward: Any) -> None:
    check_kernel_class("row", changed(fake, forward=forward), [fake.Interface])


def test_a_class_is_checked_against_every_interface_that_it_serves(fake: Any) -> None:
    class Wide(KernelInterface[Any]):
        request = fake.Call

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            raise NotImplementedError

    kernel = fake.kernel(of=(fake.Interface, Wide))
    check_kernel_class("row", kernel, [fake.Interface])
    assert "Wide (x, y)" in refusal_of(fake, kernel, interfaces=[fake.Interface, Wide])


# ---------------------------------------------------------------------------------------------- availability


def test_on_a_rocm_build_in_tree_kernels_are_unavailable_and_a_backends_are_not(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.2")
    kernel, call = fake.kernel(devices=("cuda",)), fake.call(device="cuda:0")
    answer, reason = available(kernel, call, Owner(IN_TREE))
    assert (answer, reason) == (Answer.OTHER_DEVICE, "runs on NVIDIA GPUs; this build of torch drives AMD's")
    assert available(kernel, call, Owner("acme")) == (Answer.SERVES, None)


def test_on_a_rocm_build_a_named_board_is_still_an_nvidia_board(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.2")
    kernel = fake.kernel(devices=("cuda",), archs=at_least(90))
    assert available(kernel, fake.call().on("h200"), Owner(IN_TREE)) == (Answer.SERVES, None)


def test_no_set_and_no_range_contains_the_architecture_of_a_device_that_has_none(fake: Any) -> None:
    for archs in (frozenset({80, 90}), at_least(0), at_least(80)):
        kernel = fake.kernel(devices=("cuda",), archs=archs)
        answer, _ = available(kernel, fake.call().on(DeviceFacts()), Owner("acme"))
        assert answer is Answer.OTHER_ARCH
