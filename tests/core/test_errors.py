"""The exceptions: their tree, what they carry, and how they cross process borders."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tileops
import torch
from tileops import backend, errors
from tileops.kernels.layer_norm import LayerNormCall


def test_the_tree_of_exceptions_is_as_drawn() -> None:
    assert issubclass(errors.InputError, (errors.TileopsError, ValueError))
    assert issubclass(errors.DeclarationError, errors.TileopsError)
    assert issubclass(errors.DeclarationError, TypeError)
    for error in (
        errors.OpNotAvailableError,
        errors.AmbiguousDispatchError,
        errors.UnknownTargetError,
        errors.RegistrationError,
        errors.BuildError,
    ):
        assert issubclass(error, errors.BackendError)
        assert issubclass(error, ValueError)
        assert issubclass(error, errors.TileopsError)
    assert issubclass(errors.BuildError, RuntimeError)
    assert issubclass(errors.BackendLoadWarning, RuntimeWarning)
    assert issubclass(errors.KernelFaultWarning, RuntimeWarning)
    assert not issubclass(errors.OpNotAvailableError, errors.AmbiguousDispatchError)


@pytest.mark.parametrize("name", ["OpNotAvailableError", "AmbiguousDispatchError", "BuildError", "DeclarationError"])
def test_errors_are_importable_from_both_public_places(name: str) -> None:
    assert getattr(tileops, name) is getattr(backend, name) is getattr(errors, name)


def selection_error_of(call: Any) -> errors.SelectionError:
    with pytest.raises(errors.SelectionError) as raised:
        tileops.LayerNormFwdOp((4,)).key_for("layer_norm", call)
    return raised.value


@pytest.mark.parametrize("on", [None, "h200", tileops.DeviceFacts(arch=70)], ids=str)
def test_a_selection_error_crosses_process_borders_whole(no_backends: None, on: Any) -> None:
    call = LayerNormCall(torch.device("cpu"), 4, torch.float64)
    error = selection_error_of(call if on is None else call.on(on))
    for twin in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error), copy.copy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert twin.verdicts == error.verdicts
        assert twin.call == error.call


@pytest.mark.parametrize(
    "error",
    [
        errors.InputError("x is wrong"),
        errors.BuildError("no"),
        errors.DeclarationError("no"),
        errors.RegistrationError("no"),
        errors.UnknownTargetError("no"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_every_other_error_crosses_process_borders(error: Exception) -> None:
    twin = pickle.loads(pickle.dumps(error))
    assert (type(twin), twin.args) == (type(error), error.args)


def test_the_same_error_may_be_raised_in_many_threads(fake: Any) -> None:
    barrier = threading.Barrier(8)
    op = fake.op({"a": fake.kernel(refuse="no")})()

    def miss(_: int) -> str:
        barrier.wait(timeout=30)
        with pytest.raises(errors.OpNotAvailableError) as raised:
            op.kernel_for("fake", fake.call())
        return str(raised.value)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(miss, range(8)))) == 1


def test_a_selection_error_has_no_context_that_its_reader_could_not_use(fake: Any) -> None:
    with pytest.raises(errors.OpNotAvailableError) as raised:
        fake.op({})().kernel_for("fake", fake.call())
    assert raised.value.__context__ is None
