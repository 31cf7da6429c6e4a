"""`ConformanceTests` as an author inherits it, and the rules about loading, with backends that are installed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from tileops.testing.broken_rule import NotTried, RuleBroken
from tileops.testing.global_state import changes
from tileops.testing.loading_rules import check_cheap, check_loads, check_no_trace_of_loading
from tileops.verdict import IN_TREE

ROW = """
    import torch
    from tileops.backend import register_kernel_type
    from tileops.kernels.rms_norm import RMSNorm

    class Row(RMSNorm):
        devices = frozenset({"cpu"})

        @classmethod
        def refusal(cls, call):
            return None if call.dtype is torch.float32 else f"x is {call.dtype}; serves torch.float32"

        def forward(self, x, weight):
            return self.reference(self.call, x, weight)

    register_kernel_type("RMSNormFwdOp", "row", Row)
"""

WRONG = (
    ROW
    + """
    Row.forward = Row.__call__ = lambda self, x, weight: 2 * self.reference(self.call, x, weight)
"""
)

HEAVY = (
    ROW
    + """
    import os, subprocess, sys
    import torch.utils.cpp_extension

    os.environ["ACME"] = "1"
    try:
        subprocess.run(["cc", "--version"], capture_output=True)
    except OSError:
        pass
    if "plug_zeta" in sys.modules:
        register_kernel_type("RMSNormFwdOp", "with_zeta", Row)
"""
)

LOUD = (
    """
    import warnings

    warnings.warn("acme is deprecated", DeprecationWarning)
"""
    + ROW
)

TESTS = """
from tileops.testing import ConformanceTests, Limits


class TestAcme(ConformanceTests):
    backend = "acme"
    limits = Limits(samples=4, specs=20)
    compilers = ()


class TestZeta(ConformanceTests):
    backend = "zeta"
    limits = Limits(samples=4, specs=20)
    compilers = ()
"""


def broken(check: Any, *arguments: str) -> str:
    with pytest.raises(RuleBroken) as raised:
        check(*arguments)
    return str(raised.value)


def test_an_author_inherits_the_rules_in_one_line_and_needs_neither_plugin_nor_gpu(site: Any) -> None:
    site.backend("acme", ROW)
    site.backend("zeta", WRONG)
    file = site.folder / "test_conformance.py"
    file.write_text(TESTS)
    command = [
        sys.executable, "-W", "error", "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", "--rootdir",
        str(site.folder), "-k", "TestAcme or agrees", str(file),
    ]  # fmt: skip
    path = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(command, cwd=site.folder, env=path, capture_output=True, text=True, check=False)
    out = done.stdout
    assert "1 failed, 14 passed, 3 skipped" in out, out + done.stderr
    for test in (
        "test_the_backend_loads_in_a_fresh_process[alone] PASSED",
        "test_loading_imports_no_compiler PASSED",
        "test_refusal_and_entry_for_are_pure_and_total[RMSNormFwdOp.rms_norm-acme:row] PASSED",
        "test_equal_identity_means_equal_behaviour[RMSNormFwdOp.rms_norm-acme:row] PASSED",
        "test_a_target_agrees_with_the_reference[none] SKIPPED",
    ):
        assert f"TestAcme::{test}" in out
    assert 'a user settles it by: with tileops.selection(prefer="acme"): …' in out
    assert "the backend 'acme' has registered no target for an op that is known" in out
    assert "rule broken: a call that is not refused builds and agrees with the reference\n  by: zeta:row  [" in out
    assert out.count("by: zeta:row") == 1
    assert "running_rules.py" not in out


# ------------------------------------------------------------------------------------------------------- loading


def test_a_backend_that_costs_everybody_something_is_found(site: Any) -> None:
    site.backend("acme", HEAVY)
    site.backend("zeta", "")
    check_loads("acme", "alone")
    heavy = broken(check_cheap, "acme")
    assert heavy.startswith("rule broken: loading imports no compiler and starts none\n  by: acme\n")
    assert "found: loading it brings in torch.utils.cpp_extension, cc" in heavy
    assert "change: import compilers where a kernel is built, in its factory or __init__" in heavy
    moved = broken(check_no_trace_of_loading, "acme")
    assert moved.startswith("rule broken: loading changes no global state\n")
    assert "found: loading it changed " in moved
    assert "os.environ: ACME None became '1'" in moved
    order = broken(check_loads, "acme", "others_first")
    assert "in any order relative to others" in order
    assert "others_first, it registers [RMSNormFwdOp: acme:row, RMSNormFwdOp: acme:with_zeta]; alone [" in order


def test_a_backend_that_warns_when_it_is_loaded_is_found_with_the_traceback(site: Any) -> None:
    site.backend("loud", LOUD)
    text = broken(check_loads, "loud", "alone")
    assert "alone, with warnings as errors, it is failed: DeprecationWarning: acme is deprecated" in text
    assert "plug_loud.py" in text


def test_a_backend_that_is_not_installed_is_found_with_what_is_installed(site: Any) -> None:
    site.backend("acme", ROW)
    text = broken(check_loads, "acne", "alone")
    assert "found: no installed backend is called 'acne'; installed: acme" in text
    assert "pip install -e ." in text


def test_in_tree_kernels_are_not_loaded() -> None:
    with pytest.raises(NotTried, match="nothing is loaded"):
        check_loads(IN_TREE, "alone")


def test_changes_of_global_state_are_told_one_by_one() -> None:
    before = {"a": 1, "sys.path": ["x"], "os.environ": {"A": "1", "B": "2"}, "same": 3}
    after = {"a": 2, "sys.path": ["x", "y"], "os.environ": {"A": "1", "C": "3"}, "same": 3}
    assert changes(before, after) == (
        "a: 1 became 2; sys.path: 'y' was added; os.environ: B '2' became None, C None became '3'"
    )
    assert changes(before, {**before, "sys.path": []}) == "sys.path: 'x' was taken out"
    assert changes(before, before) == ""


# -------------------------------------------------------------------------------------------------------- extras


@pytest.mark.parametrize("library", ["pytest", "hypothesis"])
def test_a_missing_library_is_a_sentence_with_the_pip_line(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import tileops.testing

    for name in [name for name in sys.modules if name.startswith("tileops.testing.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=f"needs {library}, which is not installed: pip install 'tileops-core"):
        tileops.testing.ConformanceTests


def test_the_package_imports_its_libraries_when_a_name_is_used(site: Any) -> None:
    site.python("""
        import sys
        import tileops.testing
        assert not {"pytest", "hypothesis"} & set(sys.modules)
        assert tileops.testing.Limits().samples > 0
        assert not {"pytest", "hypothesis"} & set(sys.modules)
    """)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    import tileops.testing

    with pytest.raises(AttributeError, match="it has: ConformanceTests, Limits"):
        tileops.testing.Conformance  # type: ignore[attr-defined]
