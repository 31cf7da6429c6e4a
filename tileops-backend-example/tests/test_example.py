"""The tests of the backend as a whole. They import public names of tileops only.

`test_conformance.py` holds the kernels to the rules of every kernel. What is left to say here is what is this
backend's own: what it registers on which machine, which of its kernels an op selects, and how its results are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tileops_backend_example as plug
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from tileops import LayerNormFwdOp, backend, selection
from tileops.kernels.layer_norm import LayerNormCall
from tileops_backend_example import kernels

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def this_backend_first() -> Iterator[None]:
    """Let these tests be about this backend, whoever else is installed and serves the same calls."""
    with selection(prefer="example"):
        yield


def record() -> backend.BackendRecord:
    named = [one for one in backend.status() if one.name == "example"]
    (found,) = [one for one in named if one.state is not backend.State.SHADOWED]  # a second copy, not loaded
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
        "FusedAddLayerNormFwdOp: example:torch",
        "FusedAddRMSNormFwdOp: example:torch",
        "BatchNormFwdOp: example:torch_train",
        "BatchNormFwdOp: example:torch_infer",
        "GroupNormFwdOp: example:torch",
        "InstanceNormFwdOp: example:torch",
        "InstanceNormFwdOp: example:torch_train",
        "InstanceNormFwdOp: example:torch_infer",
        "LayerNormBwdOp: example:torch",
        "RMSNormBwdOp: example:torch",
        "BatchNormBwdOp: example:torch_train",
        "BatchNormBwdOp: example:torch_infer",
        "GroupNormBwdOp: example:torch",
        "InstanceNormBwdOp: example:torch",
        "InstanceNormBwdOp: example:torch_infer",
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


def test_rows_are_summed_in_the_number_of_parts_that_tuning_finds_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels.toolchain_missing() is not None:
        pytest.skip("the kernel that lists configurations is not there")
    monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path))
    x = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
    op = LayerNormFwdOp((300,))
    tuned = op.tune(x)
    (kernel,) = tuned.kernels
    assert [dict(trial.configuration) for trial in kernel.trials] == [{"lanes": 64}, {"lanes": 32}, {"lanes": 128}]
    assert all(trial.reason is None for trial in kernel.trials), str(tuned)
    assert op.kernel_for("layer_norm", tuned.selection.call).configuration == kernel.winner
    torch.testing.assert_close(op(x), F.layer_norm(x, (300,)))


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
