"""Registering, unregistering, and what is refused: `tileops.register_kernel_type` and its like."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from tileops import backend
from tileops.backend import State, register_kernel_type, status, unregister_kernel_type
from tileops.backend.registration import registry
from tileops.device import DeviceFacts, device_facts
from tileops.errors import BackendLoadWarning, DeclarationError, RegistrationError


def record(name: str = "local") -> backend.BackendRecord:
    (found,) = [one for one in status() if one.name == name]
    return found


def test_what_a_program_registers_belongs_to_local(fake: Any) -> None:
    op = fake.op({})()
    register_kernel_type("FakeOp", "picky", fake.kernel())
    assert op.key_for("fake", fake.call()) == "local:picky"
    assert record().state is State.LOADED
    assert record().registered == ("FakeOp: local:picky",)


def test_the_same_class_again_is_no_error_and_changes_nothing(fake: Any) -> None:
    op, kernel = fake.op({})(), fake.kernel()
    register_kernel_type("FakeOp", "picky", kernel)
    before = registry().units
    register_kernel_type("FakeOp", "picky", kernel)
    assert registry().units == before
    assert op.key_for("fake", fake.call()) == "local:picky"


def test_another_class_under_a_used_key_is_refused_with_the_way_out(fake: Any) -> None:
    op = fake.op({})()
    register_kernel_type("FakeOp", "picky", fake.kernel("First"))
    with pytest.raises(RegistrationError) as raised:
        register_kernel_type("FakeOp", "picky", fake.kernel("Second"))
    for part in ("FakeOp has 'local:picky' already", "First", "Second", "unregister_kernel_type('FakeOp', 'picky')"):
        assert part in str(raised.value)
    assert op.explain("fake", fake.call()).verdicts[0].cls.__name__ == "First"


def test_a_key_may_repeat_an_in_tree_key_and_the_key_of_another_op(fake: Any) -> None:
    op = fake.op({"a": fake.kernel("Ours")})()
    fake.op({}, name="OtherOp")
    register_kernel_type("FakeOp", "a", fake.kernel("Mine", over=("a",)))
    register_kernel_type("OtherOp", "a", fake.kernel("Others"))
    assert [verdict.key for verdict in op.explain("fake", fake.call()).verdicts] == ["a", "local:a"]
    assert op.key_for("fake", fake.call()) == "local:a"


@pytest.mark.parametrize("key", ["picky", "local:picky"])
def test_unregistering_takes_a_kernel_back(fake: Any, key: str) -> None:
    op = fake.op({})()
    register_kernel_type("FakeOp", "picky", fake.kernel())
    register_kernel_type("FakeOp", "other", fake.kernel(over=("picky",)))
    unregister_kernel_type("FakeOp", key)
    assert [verdict.key for verdict in op.explain("fake", fake.call()).verdicts] == ["local:other"]
    register_kernel_type("FakeOp", "picky", fake.kernel("Another"))


def test_unregistering_what_is_not_registered_lists_what_is(fake: Any) -> None:
    fake.op({})
    with pytest.raises(RegistrationError, match="no 'picky' for FakeOp; it has registered: nothing"):
        unregister_kernel_type("FakeOp", "picky")
    register_kernel_type("FakeOp", "other", fake.kernel())
    with pytest.raises(RegistrationError, match="no 'picky' for FakeOp; it has registered: FakeOp 'other'"):
        unregister_kernel_type("FakeOp", "picky")


def test_a_refused_registration_leaves_everything_as_it_was(fake: Any) -> None:
    fake.op({})
    before = registry()
    for key, cls in (
        ("Bad Key", fake.kernel()),
        ("k", fake.kernel(of=(fake.Other,))),
        ("k", object),
        ("k", fake.kernel()()),
    ):
        with pytest.raises(DeclarationError):
            register_kernel_type("FakeOp", key, cls)
    assert registry() is before


def test_an_unknown_op_is_kept_and_noted_with_the_nearest_name(fake: Any) -> None:
    fake.op({}, name="FakeNormOp")
    register_kernel_type("FakeNromOp", "row", fake.kernel())
    (note,) = record().notes
    assert "'FakeNromOp', an op that this release does not have; did you mean 'FakeNormOp'?" in note


def test_a_kernel_registered_before_its_op_serves_when_the_op_appears(fake: Any) -> None:
    register_kernel_type("LaterOp", "row", fake.kernel("Early"))
    op = fake.op({}, name="LaterOp")()
    assert op(torch.ones(2))[0] == "Early"


def test_a_kernel_registered_before_its_op_that_does_not_fit_is_left_out_with_a_warning(fake: Any) -> None:
    register_kernel_type("LaterOp", "row", fake.kernel("Unfit", of=(fake.Other,)))
    op = fake.op({"a": fake.kernel("Ours")}, name="LaterOp")()
    with pytest.warns(BackendLoadWarning, match=r"LaterOp goes without local:row \(local\): .*implements no interface"):
        assert op(torch.ones(2))[0] == "Ours"
    assert op(torch.ones(3))[0] == "Ours"


def test_a_programs_two_generals_are_refused_at_the_next_selection_and_can_be_mended(fake: Any) -> None:
    op = fake.op({})()
    register_kernel_type("FakeOp", "one", fake.kernel(general=True))
    register_kernel_type("FakeOp", "two", fake.kernel(general=True))
    with pytest.raises(DeclarationError, match="local:one and local:two are both general for FakeInterface on cpu"):
        op.key_for("fake", fake.call())
    unregister_kernel_type("FakeOp", "two")
    assert op.key_for("fake", fake.call()) == "local:one"


def test_a_programs_cycle_is_refused_at_the_next_selection_and_not_before_it_is_complete(fake: Any) -> None:
    op = fake.op({})()
    register_kernel_type("FakeOp", "one", fake.kernel(over=("two",)))
    assert op.key_for("fake", fake.call()) == "local:one"
    register_kernel_type("FakeOp", "two", fake.kernel(over=("one",)))
    with pytest.raises(DeclarationError, match="form a cycle"):
        op.key_for("fake", fake.call())


def test_a_programs_general_may_stand_beside_the_in_tree_general(fake: Any) -> None:
    op = fake.op({"g": fake.kernel(general=True)})()
    register_kernel_type("FakeOp", "mine", fake.kernel(general=True, over=("in-tree",)))
    assert op.key_for("fake", fake.call()) == "local:mine"


def test_a_note_of_a_program_is_shown_in_its_record_and_in_later_errors_once(fake: Any) -> None:
    backend.note("no C++ compiler; torch kernels only")
    backend.note("no C++ compiler; torch kernels only")
    assert record().notes == ("no C++ compiler; torch kernels only",)
    with pytest.raises(backend.OpNotAvailableError, match="local: no C\\+\\+ compiler; torch kernels only"):
        fake.op({})().kernel_for("fake", fake.call())


def test_registered_device_facts_serve_their_device_type_and_go_with_their_registration(fake: Any) -> None:
    asked = list[torch.device]()

    def read(device: torch.device) -> DeviceFacts:
        asked.append(device)
        return DeviceFacts(arch=7)

    backend.register_device_facts("meta", read)
    op = fake.op({"a": fake.kernel(devices=("meta",), archs=frozenset({7}))})()
    for _ in range(3):
        assert op.key_for("fake", fake.call(device="meta")) == "a"
    assert asked == [torch.device("meta")]


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_the_facts_of_cuda_and_cpu_are_read_by_tileops_itself(fake: Any, device_type: str) -> None:
    with pytest.raises(RegistrationError, match=f"the facts of '{device_type}' are read by tileops itself"):
        backend.register_device_facts(device_type, lambda device: DeviceFacts(arch=7))
    assert device_facts(torch.device("cpu")) == DeviceFacts()


def test_a_second_reader_for_a_device_type_is_refused(fake: Any) -> None:
    backend.register_device_facts("meta", lambda device: DeviceFacts(arch=7))
    with pytest.raises(RegistrationError):
        backend.register_device_facts("meta", lambda device: DeviceFacts(arch=8))


def test_a_fork_while_another_thread_registers_leaves_the_child_able_to_register() -> None:
    program = """
        import os, signal, sys, threading
        from tileops.backend import note, registration, status

        holding, release = threading.Event(), threading.Event()

        def hold(old):
            holding.set()
            release.wait(30)
            return old

        holder = threading.Thread(target=registration.update_registry, args=(hold,))
        holder.start()
        holding.wait(30)
        child = os.fork()
        if child == 0:
            signal.alarm(10)  # ends a child that waits for ever
            note("hello")
            os._exit(0)
        _, state = os.waitpid(child, 0)
        release.set()
        holder.join()
        sys.exit(os.waitstatus_to_exitcode(state))
    """
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(program)]
    done = subprocess.run(command, timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "the child waits for a lock that nobody holds"
