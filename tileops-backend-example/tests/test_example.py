"""The tests of the backend as a whole. They import public names of tileops only.

A backend's own tests answer three questions: is everything registered, does every kernel compute what its
interface promises, and does the op reach it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import tileops_backend_example as plug
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from tileops import KernelInterface, LayerNormFwdOp, backend, selection
from tileops.kernels.batch_norm import BatchNormInfer, BatchNormTrain
from tileops.kernels.layer_norm import LayerNorm, LayerNormCall
from tileops.kernels.rms_norm import RMSNorm
from tileops_backend_example import kernels
from torch import Tensor

CPU = torch.device("cpu")
MOST_ELEMENTS = 1 << 22
"""Samples above this size are for GPUs; on a CPU they would only take long."""

KERNELS: list[tuple[type[KernelInterface[Any]], Any]] = [
    (LayerNorm, kernels.TorchLayerNorm),
    (LayerNorm, kernels.TileLangRowLayerNorm),
    (RMSNorm, kernels.TorchRMSNorm),
    (BatchNormTrain, kernels.TorchBatchNormTrain),
    (BatchNormInfer, kernels.TorchBatchNormInfer),
]
NEEDS_A_TOOLCHAIN = (kernels.TileLangRowLayerNorm,)


@pytest.fixture(autouse=True)
def this_backend_first() -> Iterator[None]:
    """Let these tests be about this backend, whoever else is installed and serves the same calls."""
    with selection(prefer="example"):
        yield


def record() -> backend.BackendRecord:
    (found,) = [one for one in backend.status() if one.name == "example"]
    return found


# ---------------------------------------------------------------------------------------------- registration


def test_the_backend_loads() -> None:
    assert record().state is backend.State.LOADED, record().reason
    assert record().distribution == "tileops-backend-example"
    assert record().registered


def test_all_of_its_kernels_are_registered() -> None:
    expected = {
        "LayerNormFwdOp: example:torch",
        "RMSNormFwdOp: example:torch",
        "BatchNormFwdOp: example:torch_train",
        "BatchNormFwdOp: example:torch_infer",
        "RMSNormFwdOp: target example",
    }
    assert expected <= set(record().registered)


def test_the_tilelang_kernel_is_registered_or_a_note_says_why_not() -> None:
    if kernels.toolchain_missing() is None:
        assert "LayerNormFwdOp: example:row" in record().registered
        assert record().notes == ()
    else:
        assert "LayerNormFwdOp: example:row" not in record().registered
        assert any(kernels.toolchain_missing() in note for note in record().notes)


@pytest.mark.parametrize("missing", [None, "no C++ compiler"])
def test_the_hook_registers_the_tilelang_kernel_only_where_it_can_be_built(
    missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered, notes = list[tuple[str, str]](), list[str]()
    monkeypatch.setattr(kernels, "toolchain_missing", lambda: missing)
    monkeypatch.setattr(kernels, "note", notes.append)
    plug.tileops_register_kernels(lambda op, key, cls: registered.append((op, key)))
    assert (("LayerNormFwdOp", "row") in registered) is (missing is None)
    assert len(notes) == (missing is not None)


@pytest.mark.parametrize(
    ("dtype", "key"),
    [
        (torch.float32, "example:row"),
        (torch.float16, "example:torch"),
        (torch.bfloat16, "example:torch"),
        (torch.float64, "example:torch"),
    ],
    ids=str,
)
def test_the_op_selects_the_kernel_that_is_meant(dtype: torch.dtype, key: str) -> None:
    if kernels.toolchain_missing() is not None:
        key = "example:torch"
    call = LayerNormCall(CPU, 64, dtype, weight_dtype=None, bias_dtype=None)
    assert LayerNormFwdOp((64,)).key_for("layer_norm", call) == key


def test_a_float32_row_with_affine_tensors_of_another_dtype_is_left_to_torch() -> None:
    call = LayerNormCall(CPU, 64, torch.float32, weight_dtype=torch.float64)
    assert "weight is float64" in (kernels.TileLangRowLayerNorm.refusal(call) or "")


# -------------------------------------------------------------------------------------------------- numerics


def samples(interface: type[KernelInterface[Any]], kernel: Any) -> list[Any]:
    """The interface's sample calls that the kernel serves; the large ones are left out."""
    size = {LayerNorm: lambda c: c.n, RMSNorm: lambda c: c.n, BatchNormTrain: lambda c: c.n * c.c * c.spatial,
            BatchNormInfer: lambda c: c.c * c.spatial}[interface]  # fmt: skip
    calls = [call for call in interface.sample_calls(CPU) if size(call) <= MOST_ELEMENTS]
    return [call for call in calls if kernel.refusal(call) is None]


def listed(results: Any) -> list[Tensor]:
    return [value for value in (results if isinstance(results, tuple) else (results,)) if value is not None]


@pytest.mark.parametrize(("interface", "kernel"), KERNELS, ids=[kernel.__name__ for _, kernel in KERNELS])
def test_a_kernel_computes_what_its_interface_promises(interface: type[KernelInterface[Any]], kernel: Any) -> None:
    if kernel in NEEDS_A_TOOLCHAIN and kernels.toolchain_missing() is not None:
        pytest.skip(kernels.toolchain_missing() or "")
    names = list(inspect.signature(interface.forward).parameters)[1:]
    calls = samples(interface, kernel)
    assert calls
    for seed, call in enumerate(calls):
        tensors = interface.sample_tensors(call, torch.Generator().manual_seed(seed))
        wide = [None if value is None else value.double() for value in tensors]
        expected = listed(interface.reference(call, *wide))
        arguments = [None if value is None else value.clone() for value in tensors]
        _, factory = kernel.entry_for(call)
        results = listed(factory()(*arguments))
        for name, value, old in zip(names, arguments, tensors):
            if value is not None and name in interface.writes:
                results.append(value)
            elif value is not None:
                assert torch.equal(value, old), f"{call}: {name} was written"
        assert len(results) == len(expected)
        for result, right in zip(results, expected):
            relative, absolute = interface.tolerance(result.dtype)
            torch.testing.assert_close(
                result.double(), right, rtol=relative, atol=absolute, msg=lambda text, call=call: f"{call}\n{text}"
            )


@pytest.mark.parametrize(("interface", "kernel"), KERNELS, ids=[kernel.__name__ for _, kernel in KERNELS])
def test_calls_that_share_an_identity_share_a_kernel_that_is_right_for_both(
    interface: type[KernelInterface[Any]], kernel: Any
) -> None:
    """An identity that left out a fact would hand one call the other's kernel."""
    if kernel in NEEDS_A_TOOLCHAIN and kernels.toolchain_missing() is not None:
        pytest.skip(kernels.toolchain_missing() or "")
    factories = dict[Any, Any]()
    for call in samples(interface, kernel):
        identity, factory = kernel.entry_for(call)
        factories.setdefault(identity, []).append((call, factory))
    for sharing in factories.values():
        entry = sharing[0][1]()
        for call, _ in sharing[1:]:
            tensors = interface.sample_tensors(call, torch.Generator().manual_seed(0))
            wide = [None if value is None else value.double() for value in tensors]
            right = listed(interface.reference(call, *wide))[0]
            result = listed(entry(*tensors))[0]
            relative, absolute = interface.tolerance(result.dtype)
            torch.testing.assert_close(result.double(), right, rtol=relative, atol=absolute)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x = torch.randn(600, 4096, generator=torch.Generator().manual_seed(0))
    op, threads = LayerNormFwdOp((4096,)), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(op(x))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_with_a_value_that_is_not_finite_spoils_no_other_row(value: float) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    x[1, 7] = value
    y = LayerNormFwdOp((64,))(x)
    assert y[1].isnan().all()
    torch.testing.assert_close(y[[0, 2]], F.layer_norm(x, (64,))[[0, 2]])


def test_a_row_of_huge_values_is_finite() -> None:
    x = torch.linspace(-1e18, 1e18, 64).repeat(2, 1)
    torch.testing.assert_close(LayerNormFwdOp((64,))(x).double(), F.layer_norm(x.double(), (64,)), rtol=1e-5, atol=1e-5)


def test_no_op_is_taken_over_unless_a_target_is_named() -> None:
    assert LayerNormFwdOp((64,)).explain(torch.randn(3, 64)).key in ("example:row", "example:torch")
