"""Discovery through real metadata on a real path; in processes of their own where it concerns the whole process."""

from __future__ import annotations

import json
from textwrap import dedent
from typing import Any

import pytest
import torch
from tileops import LayerNormFwdOp, RMSNormFwdOp
from tileops.backend import BackendRecord, State, load
from tileops.backend.registration import registry
from tileops.errors import BackendLoadWarning
from tileops.kernels.layer_norm import LayerNormCall

CALL = LayerNormCall(torch.device("cpu"), 4, torch.float32)

KERNEL = """
    import torch
    from tileops.backend import hookimpl, register_kernel_type
    from tileops.kernels.layer_norm import LayerNorm

    class Row(LayerNorm):
        devices = frozenset({"cpu"})
        preferred_over = frozenset({"example:row", "example:torch"})

        def forward(self, x, weight, bias):
            return x + 1
"""

MODULE = (
    KERNEL
    + """
    register_kernel_type("LayerNormFwdOp", "row", Row)
"""
)

HOOKS = (
    KERNEL
    + """
    @hookimpl
    def tileops_register_kernels(register_kernel_type):
        register_kernel_type("LayerNormFwdOp", "row", Row)
"""
)

OBJECT = (
    KERNEL
    + """
    class Plugin:
        @hookimpl
        def tileops_register_kernels(self, register_kernel_type):
            register_kernel_type("LayerNormFwdOp", "row", Row)

        @hookimpl
        def tileops_register_targets(self, register_kernel_builder):
            register_kernel_builder("RMSNormFwdOp", "acme", lambda *specs, **params: lambda x, _: x - 7)

    plugin = Plugin()
"""
)

FUNCTION = (
    KERNEL
    + """
    def register():
        register_kernel_type("LayerNormFwdOp", "row", Row)
"""
)

CLASS = (
    KERNEL
    + """
    class Plugin:
        made = 0

        def __init__(self):
            Plugin.made += 1
            assert Plugin.made == 1
            register_kernel_type("LayerNormFwdOp", "row", Row)
"""
)

ASK = """
    import json, sys, warnings
    import torch
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from tileops import LayerNormFwdOp, backend
        from tileops.kernels.layer_norm import LayerNormCall
        call = LayerNormCall(torch.device("cpu"), 4, torch.float32)
        told = LayerNormFwdOp((4,)).explain("layer_norm", call)
    print(json.dumps({
        "keys": [verdict.key for verdict in told.verdicts if ":" in verdict.key],
        "winner": told.key,
        "states": {record.name: record.state.value for record in backend.status()},
        "warnings": [str(one.message) for one in caught],
        "imported": sorted(name for name in sys.modules if name.startswith("plug_") or name == "tilelang"),
    }))
"""


def asked(site: Any, policy: str | None = None) -> dict[str, Any]:
    """What a new process finds."""
    return json.loads(site.python(ASK, policy=policy).stdout)


def record(name: str) -> BackendRecord:
    (found,) = [one for one in registry().records if one.name == name and one.state is not State.SHADOWED]
    return found


# ------------------------------------------------------------------------------------------- in this process


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("source", "attribute"),
    [(MODULE, ""), (HOOKS, ""), (OBJECT, "plugin"), (OBJECT, "Plugin"), (FUNCTION, "register"), (CLASS, "Plugin")],
    ids=["module", "module with hooks", "object with hooks", "class with hooks", "function", "class"],
)
def test_an_entry_point_alone_is_enough_whatever_it_names(site: Any, source: str, attribute: str) -> None:
    site.backend("acme", source, attribute=attribute)
    assert LayerNormFwdOp((4,)).key_for("layer_norm", CALL) == "acme:row"
    assert record("acme").state is State.LOADED
    assert torch.equal(LayerNormFwdOp((4,))(torch.zeros(2, 4)), torch.ones(2, 4))


@pytest.mark.usefixtures("fresh")
def test_a_hook_may_register_a_target(site: Any) -> None:
    site.backend("acme", OBJECT, attribute="plugin")
    assert torch.equal(RMSNormFwdOp((4,), target="acme")(torch.ones(2, 4)), torch.full((2, 4), -6.0))
    assert "RMSNormFwdOp: target acme" in record("acme").registered


@pytest.mark.usefixtures("fresh")
def test_two_entry_points_of_one_distribution_are_one_backend(site: Any) -> None:
    site.module("plug_one", MODULE)
    site.module("plug_two", MODULE.replace('"row", Row', '"second", Row'))
    site.distribution("tileops-backend-acme", "[tileops.backends]\none = plug_one\ntwo = plug_two\nsame = plug_one\n")
    load()
    assert record("acme").registered == ("LayerNormFwdOp: acme:row", "LayerNormFwdOp: acme:second")
    assert record("acme").entry_points == ("plug_one", "plug_two")


@pytest.mark.usefixtures("fresh")
def test_one_failing_entry_point_fails_the_whole_backend(site: Any) -> None:
    site.module("plug_one", MODULE)
    site.module("plug_two", "raise OSError('no licence')\n")
    site.distribution("tileops-backend-acme", "[tileops.backends]\none = plug_one\ntwo = plug_two\n")
    with pytest.warns(BackendLoadWarning, match="acme"):
        load()
    keys = [verdict.key for verdict in LayerNormFwdOp((4,)).explain("layer_norm", CALL).verdicts]
    assert not [key for key in keys if key.startswith("acme")]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("distribution", "name"),
    [("tileops-backend-acme", "acme"), ("TileOps_Backend.Acme", "acme"), ("acme-kernels", "acme-kernels")],
)
def test_a_backend_is_called_as_its_distribution_is_without_our_prefix(site: Any, distribution: str, name: str) -> None:
    site.module("plug_named", MODULE)
    site.distribution(distribution, "[tileops.backends]\nentry = plug_named\n")
    assert LayerNormFwdOp((4,)).key_for("layer_norm", CALL) == f"{name}:row"


@pytest.mark.usefixtures("fresh")
def test_of_two_copies_of_a_distribution_the_first_on_the_path_counts(
    site: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.backend("acme", MODULE, version="1.0")
    second = tmp_path / "second"
    second.mkdir()
    other = type(site)(second)
    other.distribution("tileops-backend-acme", "[tileops.backends]\nacme = no_such_module\n", "2.0")
    monkeypatch.syspath_prepend(second)
    monkeypatch.syspath_prepend(site.folder)
    load()
    assert (record("acme").version, record("acme").state) == ("1.0", State.LOADED)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    "entry_points", ["[broken", "no section = at all\n", "[console_scripts]\n= = =\n", "\x00", "[tileops.backends\nx"]
)
def test_a_malformed_entry_points_file_elsewhere_costs_nobody_anything(site: Any, entry_points: str) -> None:
    site.distribution("unrelated", entry_points)
    site.backend("acme", MODULE)
    load()
    assert record("acme").state is State.LOADED
    assert "unrelated" not in {one.name for one in registry().records}


@pytest.mark.usefixtures("fresh")
def test_a_backend_without_readable_metadata_is_recorded_and_costs_nobody_anything(site: Any) -> None:
    folder = site.distribution("broken", "[tileops.backends]\nx = plug_x\n")
    folder.joinpath("METADATA").unlink()
    folder.joinpath("entry_points.txt").write_bytes(b"\xff\xfe[tileops.backends]\nx = plug_x\n")
    site.backend("acme", MODULE)
    with pytest.warns(BackendLoadWarning, match="skips the backend broken .*its metadata cannot be read"):
        load()
    assert record("broken").state is State.FAILED
    assert record("acme").state is State.LOADED


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("value", ["not a reference!", "plug_acme:", "1x:2y", ""])
def test_a_backends_own_malformed_entry_point_is_recorded_and_skipped(site: Any, value: str) -> None:
    site.distribution("tileops-backend-broken", f"[tileops.backends]\nbroken = {value}\n")
    site.backend("acme", MODULE)
    with pytest.warns(BackendLoadWarning, match="broken"):
        load()
    assert record("broken").state is State.FAILED
    assert record("acme").state is State.LOADED


@pytest.mark.usefixtures("fresh")
def test_an_entry_point_for_an_attribute_that_is_not_there_is_recorded_and_skipped(site: Any) -> None:
    site.backend("acme", MODULE, attribute="plugin")
    with pytest.warns(BackendLoadWarning, match="AttributeError.*plugin"):
        load()
    keys = [verdict.key for verdict in LayerNormFwdOp((4,)).explain("layer_norm", CALL).verdicts]
    assert "acme:row" not in keys


@pytest.mark.usefixtures("fresh")
def test_a_distribution_on_the_path_after_the_load_changes_nothing(site: Any) -> None:
    load()
    before = registry().records
    site.backend("acme", MODULE)
    load()
    assert registry().records == before


# ------------------------------------------------------------------------------------- processes of their own


def test_import_tileops_loads_nothing_and_imports_neither_tilelang_nor_a_backend(site: Any) -> None:
    site.backend("acme", "raise OSError('imported')\n")
    done = site.python("""
        import sys
        import tileops, tileops.backend, tileops.ops, tileops.norm
        from tileops.backend.registration import registry
        tileops.LayerNormFwdOp((4,)), tileops.RMSNormFwdOp((4,)), tileops.BatchNormFwdOp(), tileops.FusedAddRMSNormFwdOp()
        assert not registry().loaded
        print([name for name in sys.modules if name.partition(".")[0] in
               ("tilelang", "tvm", "plug_acme", "tileops_backend_example")])
    """)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("policy", "loaded"),
    [(None, ["acme", "example", "zeta"]), ("acme", ["acme"])],
)
def test_the_variable_decides_in_a_new_process_what_is_loaded(site: Any, policy: str | None, loaded: list[str]) -> None:
    site.backend("acme", MODULE)
    site.backend("zeta", MODULE)
    told = asked(site, policy)
    assert [name for name, state in told["states"].items() if state == "loaded"] == loaded
    assert sorted({key.partition(":")[0] for key in told["keys"]}) == loaded
    assert told["imported"] == [f"plug_{name}" for name in loaded if name != "example"]
    assert told["warnings"] == []


def test_mixed_names_end_the_call_with_a_sentence(site: Any) -> None:
    done = site.python(ASK, policy="acme,-example", check=False)
    assert done.returncode == 1
    assert "TILEOPS_BACKENDS='acme,-example' mixes names" in done.stderr.splitlines()[-1]


def test_a_broken_backend_costs_a_new_process_one_warning(site: Any) -> None:
    site.backend("acme", MODULE)
    site.backend("zeta", MODULE + "    raise OSError('no licence')\n")
    told = asked(site)
    (warning,) = told["warnings"]
    assert "zeta" in warning
    assert "OSError: no licence" in warning
    assert (told["states"]["acme"], told["states"]["zeta"]) == ("loaded", "failed")
    assert told["winner"] == "acme:row"


def test_the_warning_points_at_the_users_line(site: Any) -> None:
    site.backend("zeta", "raise OSError('no licence')\n")
    site.module(
        "users_program",
        """
        import torch
        from tileops import LayerNormFwdOp
        LayerNormFwdOp((4,))(torch.ones(2, 4, dtype=torch.float64))  # the line
    """,
    )
    done = site.python("import users_program")
    assert "users_program.py:4: BackendLoadWarning" in done.stderr


def test_with_warnings_as_errors_the_first_call_raises_and_everything_is_recorded(site: Any) -> None:
    site.backend("acme", MODULE)
    site.backend("beta", "raise OSError('no licence')\n")
    done = site.python(
        """
        import torch
        from tileops import LayerNormFwdOp, backend
        try:
            LayerNormFwdOp((4,))(torch.ones(2, 4))
        except backend.BackendLoadWarning as warning:
            print("beta" in str(warning))
        print(LayerNormFwdOp((4,))(torch.zeros(1, 4)).tolist())
        print({record.name: record.state.value for record in backend.status()}["beta"])
        """,
        "-W",
        "error",
    )
    assert done.stdout.splitlines() == ["True", "[[1.0, 1.0, 1.0, 1.0]]", "failed"]


def test_a_child_forked_after_use_goes_on(site: Any) -> None:
    site.backend("acme", MODULE)
    done = site.python(
        """
        import os, sys, torch
        from tileops import LayerNormFwdOp, backend
        torch.set_num_threads(1)
        op = LayerNormFwdOp((4,))
        before = op.explain(torch.ones(1, 4)).key
        op(torch.zeros(1, 4))
        child = os.fork()
        if child == 0:
            same = op.explain(torch.ones(1, 4)).key == before and op(torch.zeros(1, 4)).sum() == 4
            other = LayerNormFwdOp((8,))(torch.zeros(1, 8)).sum() == 8
            os._exit(0 if same and other and backend.status() else 3)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
        "-W",
        "ignore::DeprecationWarning",
    )
    assert done.returncode == 0


def test_a_child_forked_before_the_load_loads_for_itself(site: Any) -> None:
    site.backend("acme", MODULE)
    site.python("""
        import os, sys, torch
        from tileops import LayerNormFwdOp
        op = LayerNormFwdOp((4,))
        child = os.fork()
        key = op.explain(torch.ones(1, 4)).key
        if child == 0:
            os._exit(0 if key == "acme:row" else 3)
        assert key == "acme:row"
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)


def test_a_child_forked_while_another_thread_loads_loads_for_itself(site: Any) -> None:
    site.module("gate", "import threading\nentered, go = threading.Event(), threading.Event()\n")
    site.backend(
        "acme",
        dedent(KERNEL)
        + dedent("""
        @hookimpl
        def tileops_register_kernels(register_kernel_type):
            import gate
            register_kernel_type("LayerNormFwdOp", "row", Row)
            gate.entered.set()
            assert gate.go.wait(60)
    """),
    )
    site.python(
        """
        import os, signal, sys, threading, gate
        import tileops.backend.process
        from tileops import backend
        tileops.backend.process.FORK_PATIENCE = 0.2  # the load ends after the fork
        loader = threading.Thread(target=backend.load)
        loader.start()
        assert gate.entered.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends a child that waits for ever
            gate.go = threading.Event()
            gate.go.set()
            states = {record.name: record.state.value for record in backend.status()}
            os._exit(0 if states["acme"] == "loaded" else 3)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        gate.go.set()
        loader.join()
        sys.exit(code)
        """,
        "-W",
        "ignore::DeprecationWarning",
    )


def test_without_any_backend_the_call_says_what_to_install(site: Any) -> None:
    done = site.python("import torch, tileops; tileops.LayerNormFwdOp((4,))(torch.ones(2, 4))", policy="", check=False)
    assert done.returncode == 1
    assert "in-tree kernels do not run on cpu" in done.stderr
    assert "tileops-backend-example" in done.stderr
