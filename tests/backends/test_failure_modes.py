"""What goes wrong with plugins in public, one reproduction each: real metadata on a real path.

The numbers are those of the survey that the issue about backends names. What concerns a whole process runs in a
child of a process that has imported torch and nothing of ours.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import signal
import sys
import warnings
from textwrap import dedent
from typing import Any

import packaging.requirements
import packaging.specifiers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tileops import LayerNormFwdOp, OpNotAvailableError
from tileops.backend import (
    BackendLoadError,
    BackendRecord,
    State,
    load,
    register_kernel_type,
    status,
    unregister_kernel_type,
)
from tileops.backend.compatibility import _stated_about_us, plainly_holds
from tileops.backend.policy import POLICY_VARIABLE
from tileops.backend.registration import registry
from tileops.errors import BackendLoadWarning, RegistrationError
from tileops.kernels.layer_norm import LayerNorm, LayerNormCall

here = pytest.mark.usefixtures("fresh", "only_the_site")

CALL = LayerNormCall(torch.device("cpu"), 4, torch.float32)

RELEASES = st.lists(st.integers(0, 12), min_size=1, max_size=4).map(lambda numbers: ".".join(map(str, numbers)))
VERSIONS = RELEASES | st.builds("{}{}".format, RELEASES, st.sampled_from(["rc1", ".dev2", ".post3", "+local"]))
SIMPLE = st.tuples(st.sampled_from([">=", "<=", ">", "<", "==", "!="]), RELEASES)
OTHERS = st.tuples(st.sampled_from([">=", "<=", ">", "<", "==", "!=", "~="]), VERSIONS)

KERNEL = """
    from tileops.backend import hookimpl, register_kernel_type
    from tileops.kernels.layer_norm import LayerNorm

    class Row(LayerNorm):
        devices = frozenset({"cpu"})

        def forward(self, x, weight, bias):
            return x + 1
"""

REGISTERS = (
    KERNEL
    + """
    register_kernel_type("LayerNormFwdOp", "row", Row)
"""
)

TELL = """
    import json
    from tileops import backend
    told = {record.name: [record.state.value, list(record.registered)] for record in backend.status()}
    print(json.dumps(told, sort_keys=True))
"""


def records(name: str) -> list[BackendRecord]:
    return [one for one in registry().told() if one.name == name]


def record(name: str) -> BackendRecord:
    (found,) = records(name)
    return found


def keys() -> list[str]:
    return [verdict.key for verdict in LayerNormFwdOp((4,)).explain("layer_norm", CALL).verdicts if ":" in verdict.key]


def no_kernel() -> str:
    """What a call says that no kernel serves."""
    with pytest.raises(OpNotAvailableError) as raised:
        LayerNormFwdOp((4,)).kernel_for("layer_norm", LayerNormCall(torch.device("meta"), 4, torch.float32))
    return str(raised.value)


# ------------------------------------------------------------------------------------- a backend that cannot run


@here
def test_01_a_backend_whose_import_fails_does_not_end_the_host(site: Any) -> None:
    site.backend("acme", "raise ImportError('no runtime')", version="2.5")
    site.backend("zeta", REGISTERS)
    with pytest.warns(BackendLoadWarning):
        load()
    told = record("acme")
    assert (told.state, told.distribution, told.version) == (State.FAILED, "tileops-backend-acme", "2.5")
    assert told.path == str(site.folder / "tileops_backend_acme-2.5.dist-info")
    assert "raise ImportError('no runtime')" in told.traceback
    assert keys() == ["zeta:row"]


@here
def test_02_a_failure_is_not_swallowed_it_warns_once_and_every_later_error_mentions_it(site: Any) -> None:
    site.backend("acme", "raise ImportError('no runtime')")
    with pytest.warns(BackendLoadWarning, match="acme .*ImportError: no runtime.*What to do") as caught:
        load()
    assert len(caught) == 1
    errors = [no_kernel(), no_kernel()]  # a second warning would be an error here
    assert all(
        "backend acme (tileops-backend-acme 1.0) failed to load: ImportError: no runtime" in one for one in errors
    )


@here
def test_03_a_wrapper_does_not_hide_the_real_cause(site: Any) -> None:
    library = site.folder / "libacme.so"
    library.write_text("no library")
    site.backend(
        "acme",
        f"""
        import ctypes
        try:
            ctypes.CDLL({str(library)!r})
        except OSError:
            raise ImportError("acme cannot start")
        """,
    )
    with pytest.raises(BackendLoadError, match="acme cannot start") as raised:
        load(strict=True)
    assert record("acme").reason.startswith("ImportError: acme cannot start (it began with OSError: ")
    assert "libacme.so" in record("acme").reason
    assert isinstance(raised.value.__cause__, ImportError)
    assert isinstance(raised.value.__cause__.__context__, OSError)


@pytest.mark.parametrize("first", ["plug_acme", "tileops", "tileops.norm"])
def test_04_a_backend_may_import_the_library_that_loads_it(site: Any, forked: Any, first: str) -> None:
    site.backend("acme", "import tileops, tileops.norm\ntileops.norm.LayerNormFwdOp((4,))\n" + dedent(REGISTERS))
    done = forked(site, f"import {first}\n" + dedent(TELL))
    assert json.loads(done.stdout)["acme"] == ["loaded", ["LayerNormFwdOp: acme:row"]]
    assert done.stderr == ""


GATES = "import threading\nentered, go = threading.Event(), threading.Event()\n"


def test_05_importing_a_backend_while_another_thread_makes_the_first_call_does_not_lock_up(
    site: Any, forked: Any
) -> None:
    site.module("gate", GATES)
    site.backend("acme", "import gate\ngate.entered.set()\nassert gate.go.wait(30)\n" + dedent(REGISTERS))
    done = forked(
        site,
        """
        import sys, threading, time
        import gate, torch
        from tileops import LayerNormFwdOp
        importing = threading.Thread(target=__import__, args=("plug_acme",))
        importing.start()
        assert gate.entered.wait(30)
        keys = []
        calling = threading.Thread(target=lambda: keys.append(LayerNormFwdOp((4,)).explain(torch.ones(1, 4)).key))
        calling.start()
        time.sleep(0.1)
        gate.go.set()
        importing.join(), calling.join()
        print(keys)
        """,
    )
    assert done.stdout.strip() == "['acme:row']"


def test_05_a_backend_that_asks_for_kernels_while_it_is_imported_does_not_lock_the_loader_out(
    site: Any, forked: Any
) -> None:
    site.module("gate", GATES)
    site.module("helper", "import gate\ngate.entered.set()\nassert gate.go.wait(30)\nfrom tileops import backend\n"
                "print([record.name for record in backend.status() if record.state.value == 'loaded'])\n")  # fmt: skip
    site.backend("acme", "import helper\n" + dedent(REGISTERS))
    done = forked(
        site,
        """
        import threading, time
        import gate
        from tileops import backend
        importing = threading.Thread(target=__import__, args=("helper",))
        importing.start()
        assert gate.entered.wait(30)
        loading = threading.Thread(target=backend.load)
        loading.start()  # waits for `helper`, whose body asks for what is loaded
        time.sleep(0.2)
        gate.go.set()
        loading.join(), importing.join()
        print([record.name for record in backend.status() if record.state.value == "loaded"])
        """,
    )
    assert done.stdout.splitlines() == ["[]", "['acme']"]


# ---------------------------------------------------------------------------------------------- broken metadata


@pytest.mark.usefixtures("fresh")
def test_06_of_two_copies_the_first_on_the_path_is_used_and_the_other_is_shadowed(
    site: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(POLICY_VARIABLE, "acme")
    site.backend("acme", REGISTERS)
    second = site.another(tmp_path / "second")
    second.backend("acme", "raise OSError('the wrong copy')", version="2.0")
    monkeypatch.syspath_prepend(second.folder)
    monkeypatch.syspath_prepend(site.folder)
    load()
    used, shadowed = records("acme")
    assert (used.version, used.state) == ("1.0", State.LOADED)
    assert (shadowed.version, shadowed.state) == ("2.0", State.SHADOWED)
    assert shadowed.reason == f"tileops-backend-acme 1.0 in {site.folder} is used in its place"
    assert "2.0" not in no_kernel()


@here
def test_07_an_empty_or_older_dist_info_does_not_shadow_the_real_one(site: Any) -> None:
    site.folder.joinpath("tileops_backend_acme-0.9.dist-info").mkdir()
    site.distribution("tileops-backend-acme", "[tileops.backends]\nacme = gone\n", "0.8")
    site.backend("acme", REGISTERS)
    load()
    assert [(one.version, one.state) for one in records("acme")] == [("1.0", State.LOADED), ("0.8", State.SHADOWED)]


@here
def test_08_a_stale_entry_point_says_that_its_module_is_gone(site: Any) -> None:
    site.distribution("tileops-backend-acme", "[tileops.backends]\nacme = gone.away\n")
    with pytest.warns(BackendLoadWarning, match="metadata is stale: pip uninstall tileops-backend-acme"):
        load()
    assert record("acme").reason == "ModuleNotFoundError: No module named 'gone'"


@here
def test_08_a_missing_dependency_is_not_taken_for_a_stale_entry_point(site: Any) -> None:
    site.backend("acme", "import acme_runtime.core")
    with pytest.warns(BackendLoadWarning, match="install acme_runtime, which it imports"):
        load()


@here
def test_09_an_entry_point_for_a_missing_attribute_names_module_and_attribute(site: Any) -> None:
    site.backend("acme", REGISTERS, attribute="autoload")
    with pytest.warns(BackendLoadWarning, match="AttributeError: module 'plug_acme' has no attribute 'autoload'"):
        load()
    assert (record("acme").state, keys()) == (State.FAILED, [])


@here
@pytest.mark.parametrize(
    "broken",
    [b"no section = at all\n", b"[console_scripts]\nno value\n", b"\xff\xfe\x00", b"[other]\na = not a value!\n"],
)
def test_10_a_malformed_entry_points_file_of_anybody_costs_nobody_anything(site: Any, broken: bytes) -> None:
    for place in ("aaa-unrelated", "zzz-unrelated"):
        site.distribution(place, "").joinpath("entry_points.txt").write_bytes(broken)
    site.backend("acme", REGISTERS)
    load()
    assert [one.name for one in registry().records] == ["acme"]
    assert keys() == ["acme:row"]


@pytest.mark.usefixtures("fresh")
def test_10_a_finder_of_somebody_else_that_fails_costs_nobody_anything(site: Any, monkeypatch: Any) -> None:
    class Finder:
        def find_spec(self, *_: Any) -> None: ...

        def find_distributions(self, context: Any) -> Any:
            raise OSError("no such place")

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    monkeypatch.setenv(POLICY_VARIABLE, "acme")
    site.backend("acme", REGISTERS)
    load()
    assert keys() == ["acme:row"]


@here
def test_11_the_scan_reads_requirements_of_backends_alone(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    class Counting(packaging.requirements.Requirement):
        def __init__(self, requirement: str) -> None:
            parsed.append(requirement)
            super().__init__(requirement)

    monkeypatch.setattr(packaging.requirements, "Requirement", Counting)
    for number in range(100):
        site.distribution(f"other{number}", "[console_scripts]\nx = y:z\n", metadata="Requires-Dist: tileops-core\n")
    site.backend("acme", REGISTERS, metadata="Requires-Dist: tileops-core~=0.1\nRequires-Dist: torch~=2.6\n")
    load()
    assert (parsed, keys()) == (["tileops-core~=0.1"], ["acme:row"])


# ------------------------------------------------------------------------------------- what an import does besides


def test_12_a_backend_that_imports_a_compiler_while_it_loads_is_noted(site: Any, forked: Any) -> None:
    site.module("tvm", "")
    site.backend("acme", "import tvm\n" + dedent(REGISTERS))
    done = forked(site, "from tileops import backend\nprint([one.notes for one in backend.status()][0])")
    assert done.stdout.strip() == "(\"changes the compilers that are imported from [] to ['tvm'] while it loads\",)"


def test_13_a_backend_that_changes_the_state_of_the_process_is_noted_and_refused_when_strict(
    site: Any, forked: Any
) -> None:
    site.backend(
        "acme",
        "import os, torch\nos.environ['ACME'] = '1'\ntorch.set_default_dtype(torch.float64)\n" + dedent(REGISTERS),
    )
    done = forked(
        site,
        """
        from tileops import backend
        print(*backend.status()[0].notes, sep="\\n")
        try:
            backend.load(strict=True)
        except backend.BackendLoadError as error:
            print("torch's default dtype" in str(error))
        """,
    )
    assert done.stdout.splitlines() == [
        "changes torch's default dtype from torch.float32 to torch.float64 while it loads",
        "sets variables of the environment while it loads: ACME",
        "True",
    ]


# --------------------------------------------------------------------------------------- several, and in any order


@here
def test_14_two_backends_with_one_key_are_both_there_and_the_call_names_both(site: Any) -> None:
    site.backend("acme", REGISTERS)
    site.backend("zeta", REGISTERS)
    load()
    selection = LayerNormFwdOp((4,)).explain("layer_norm", CALL)
    assert selection.contenders == ("acme:row", "zeta:row")
    assert "tileops-backend-acme 1.0" in str(selection)
    assert "tileops-backend-zeta 1.0" in str(selection)


@here
def test_15_a_backend_that_fails_midway_leaves_nothing(site: Any) -> None:
    second = '    register_kernel_type("LayerNormFwdOp", "second", Row)\n    raise OSError("no licence")\n'
    site.backend("acme", REGISTERS + second)
    with pytest.warns(BackendLoadWarning):
        load()
    assert (record("acme").registered, keys()) == ((), [])


def test_16_the_result_does_not_depend_on_the_hash_seed(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("zeta", "acme", "mid"):
        site.backend(name, REGISTERS)
    told = set[str]()
    for seed in ("0", "1"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        told.add(site.python(TELL, policy="-example").stdout)
    assert len(told) == 1
    assert list(json.loads(told.pop())) == ["acme", "example", "mid", "zeta"]


def test_17_the_first_call_finds_what_the_second_finds(site: Any, forked: Any) -> None:
    site.backend("acme", REGISTERS)
    done = forked(
        site, "import torch, tileops\nprint([tileops.LayerNormFwdOp((2,))(torch.zeros(2)).tolist() for _ in 'ab'])"
    )
    assert done.stdout.strip() == "[[1.0, 1.0], [1.0, 1.0]]"


def test_18_the_first_op_may_be_constructed_and_called_inside_a_compiled_function(site: Any, forked: Any) -> None:
    site.backend("acme", REGISTERS)
    done = forked(
        site,
        """
        import torch
        from tileops import LayerNormFwdOp

        @torch.compile(backend="eager", fullgraph=True)
        def model(x):
            return LayerNormFwdOp((4,))(x) * 2

        print(model(torch.zeros(1, 4)).tolist())
        """,
    )
    assert done.stdout.strip() == "[[2.0, 2.0, 2.0, 2.0]]"


# ------------------------------------------------------------------------------------------------- other processes


def test_19_a_fork_waits_for_what_another_thread_imports(site: Any, forked: Any) -> None:
    site.module("gate", GATES)
    site.backend("acme", "import gate\ngate.entered.set()\ngate.go.wait(1)\n" + dedent(REGISTERS))
    forked(
        site,
        """
        import os, signal, sys, threading
        import gate
        from tileops import backend
        loading = threading.Thread(target=backend.load)
        loading.start()
        assert gate.entered.wait(30)
        child = os.fork()
        signal.alarm(20)  # ends a child that waits for ever
        states = {record.name: record.state.value for record in backend.status()}
        if child == 0:
            os._exit(0 if states["acme"] == "loaded" else 3)
        loading.join()
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
    )


def test_20_an_op_that_another_process_unpickles_finds_the_backends_there(site: Any, forked: Any) -> None:
    pickled = pickle.dumps(LayerNormFwdOp((2,)))
    program = f"import pickle, torch\nprint(pickle.loads({pickled!r})(torch.zeros(2)).tolist())"
    missing = forked(site, program, check=False)
    assert "in-tree kernels do not run on cpu" in missing.stderr
    assert "install a backend" in missing.stderr
    site.backend("acme", REGISTERS)
    assert forked(site, program).stdout.strip() == "[1.0, 1.0]"


@here
def test_21_with_warnings_as_errors_everything_is_loaded_and_the_error_comes_once(site: Any) -> None:
    site.backend("acme", "raise OSError('no licence')")
    site.backend("beta", "raise OSError('no licence either')")
    site.backend("zeta", REGISTERS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("error", message=".*acme")
        with pytest.raises(BackendLoadWarning, match="acme"):
            LayerNormFwdOp((4,)).key_for("layer_norm", CALL)
    assert ["beta" in str(one.message) for one in caught] == [True]
    assert LayerNormFwdOp((4,)).key_for("layer_norm", CALL) == "zeta:row"


# ------------------------------------------------------------------------------------------------------- versions


@here
@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ("Requires-Dist: tileops-core<0.1\n", "needs tileops-core<0.1; tileops-core 0.1.0 is installed"),
        ("Requires-Dist: TileOps_Core (>=99)\n", "needs TileOps_Core>=99; tileops-core 0.1.0 is installed"),
        ("Requires-Dist: tileops>=9; python_version>'3'\n", "needs tileops>=9; tileops-core 0.1.0 is installed"),
        ("Requires-Python: >=3.99\n", "needs Python >=3.99; this is "),
    ],
)
def test_22_a_backend_for_another_release_is_incompatible_and_never_imported(
    site: Any, monkeypatch: pytest.MonkeyPatch, metadata: str, reason: str
) -> None:
    monkeypatch.setattr("tileops.backend.compatibility.core_version", lambda: "0.1.0")
    module = site.backend("acme", "raise OSError('imported')", metadata=metadata)
    with pytest.warns(BackendLoadWarning, match="install a release of tileops-backend-acme that runs here"):
        load()
    assert module not in sys.modules
    assert record("acme").state is State.INCOMPATIBLE
    assert record("acme").reason.startswith(reason)
    assert f"acme (tileops-backend-acme 1.0) is incompatible: {reason}" in no_kernel()


@here
@pytest.mark.parametrize(
    "metadata",
    [
        "Requires-Dist: tileops-core>=0.1,<0.2\n",
        "Requires-Dist: tileops-core<0.1; extra == 'old'\n",
        "Requires-Dist: tileops-core<0.1; python_version < '3'\n",
        "Requires-Dist: some-other<0.1\n",
        "Requires-Dist: tileops-core ==\n",
        "Requires-Python: three\n",
    ],
)
def test_23_a_backend_whose_statements_hold_or_say_nothing_is_loaded(
    site: Any, monkeypatch: pytest.MonkeyPatch, metadata: str
) -> None:
    monkeypatch.setattr("tileops.backend.compatibility.core_version", lambda: "0.1.0")
    site.backend("acme", REGISTERS, metadata=metadata)
    load()
    assert record("acme").state is State.LOADED


def in_packaging(clauses: list[tuple[str, str]], version: str) -> bool:
    return packaging.specifiers.SpecifierSet(written(clauses)).contains(version, prereleases=True)


def written(clauses: list[tuple[str, str]]) -> str:
    return " , ".join(f"{comparison} {bound}" for comparison, bound in clauses)


@given(clauses=st.lists(SIMPLE, max_size=3), version=RELEASES)
def test_comparing_numbers_decides_about_releases_as_packaging_does(clauses: Any, version: str) -> None:
    assert plainly_holds(written(clauses), version) == in_packaging(clauses, version)


@given(clauses=st.lists(OTHERS, max_size=3), version=VERSIONS)
def test_a_range_that_plainly_holds_a_version_holds_it_for_packaging_too(clauses: Any, version: str) -> None:
    with contextlib.suppress(packaging.specifiers.InvalidSpecifier):
        assert in_packaging(clauses, version) or not plainly_holds(written(clauses), version)


@here
def test_24_what_was_installed_in_place_into_a_running_process_asks_for_a_restart(site: Any) -> None:
    folder = site.distribution("tileops-backend-acme", "[tileops.backends]\nacme = not_on_the_path_yet\n")
    folder.joinpath("direct_url.json").write_text('{"url": "file:///src", "dir_info": {"editable": true}}')
    with pytest.warns(BackendLoadWarning, match="restart Python"):
        load()


@pytest.mark.usefixtures("fresh")
def test_25_leftover_egg_info_beside_the_real_metadata_changes_nothing(
    site: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(POLICY_VARIABLE, "acme")
    source = site.another(tmp_path / "source")
    source.distribution("tileops-backend-acme", "[tileops.backends]\nacme = plug_acme\n", suffix="egg-info")
    site.backend("acme", REGISTERS)
    monkeypatch.syspath_prepend(source.folder)
    monkeypatch.syspath_prepend(site.folder)
    load()
    assert [one.state for one in records("acme")] == [State.LOADED, State.SHADOWED]
    assert keys() == ["acme:row"]


# ----------------------------------------------------------------------------------------- leaving, and control


@here
@pytest.mark.parametrize("fault", ["SystemExit(3)", "type('Panic', (BaseException,), {})('native')"])
def test_26_a_backend_that_exits_or_panics_is_skipped(site: Any, fault: str) -> None:
    site.backend("acme", f"raise {fault}")
    site.backend("zeta", REGISTERS)
    with pytest.warns(BackendLoadWarning, match="acme"):
        load()
    assert (record("acme").state, keys()) == (State.FAILED, ["zeta:row"])


@here
def test_26_an_exit_that_a_signal_handler_asked_for_is_not_the_backends(site: Any) -> None:
    site.backend("acme", "import os, signal\nos.kill(os.getpid(), signal.SIGUSR1)\n" + dedent(REGISTERS))

    def handler(*_: Any) -> None:
        raise SystemExit(5)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(SystemExit, match="5"):
            load()
        assert registry().records == ()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert keys() == ["acme:row"]
    finally:
        signal.signal(signal.SIGUSR1, before)


@here
@pytest.mark.parametrize("policy", ["-acme", "-tileops-backend-acme", "-point", "-Tileops_Backend.Acme"])
def test_27_a_denied_backend_is_never_imported_whatever_it_is_called_by(
    site: Any, monkeypatch: Any, policy: str
) -> None:
    monkeypatch.setenv(POLICY_VARIABLE, policy)
    site.module("plug_acme", "raise OSError('imported')")
    site.distribution("tileops-backend-acme", "[tileops.backends]\npoint = plug_acme\n")
    load()
    assert record("acme").state is State.DISABLED
    assert "plug_acme" not in sys.modules


@here
def test_27_a_policy_that_comes_too_late_is_an_error_and_not_a_silence(site: Any) -> None:
    site.backend("acme", REGISTERS)
    load()
    with pytest.raises(RegistrationError, match=r"load\(exclude=\['acme'\]\) comes too late to decide about acme"):
        load(exclude=["acme"])
    load(exclude=())
    assert keys() == ["acme:row"]


@here
def test_28_a_hook_that_is_not_marked_is_an_error_and_not_a_silence(site: Any) -> None:
    site.backend("acme", KERNEL + "    def tileops_register_kernels(register_kernel_type): ...\n")
    with pytest.warns(
        BackendLoadWarning, match="tileops_register_kernels is not marked .*write @tileops.backend.hookimpl"
    ):
        load()
    assert record("acme").state is State.FAILED


@here
def test_28_a_backend_that_does_nothing_is_empty_and_says_so(site: Any) -> None:
    site.backend("acme", "x = 1")
    with pytest.warns(BackendLoadWarning, match="acme .*registered nothing"):
        load()
    assert record("acme").state is State.EMPTY
    assert "is empty: it loaded and registered nothing" in no_kernel()


@here
def test_29_a_kernel_that_is_taken_back_and_registered_again_serves_the_same_torch_op(site: Any) -> None:
    mine = type("Mine", (LayerNorm,), {"forward": lambda self, x, weight, bias: x + 1, "devices": frozenset({"cpu"})})
    x = torch.zeros(2, 4)
    operators = []
    for _ in range(3):
        register_kernel_type("LayerNormFwdOp", "mine", mine)
        assert torch.equal(torch.vmap(LayerNormFwdOp((4,)))(x[None]), x[None] + 1)
        operators.append(torch.ops.tileops.layer_norm.default)
        unregister_kernel_type("LayerNormFwdOp", "mine")
    assert operators == [operators[0]] * 3


@here
@pytest.mark.parametrize(("policy", "imported"), [("", []), ("acme", ["plug_acme"])])
def test_30_code_of_a_squatter_runs_only_where_the_policy_lets_it(
    site: Any, monkeypatch: pytest.MonkeyPatch, policy: str, imported: list[str]
) -> None:
    monkeypatch.setenv(POLICY_VARIABLE, policy)
    modules = [site.backend(name, REGISTERS) for name in ("acme", "acne")]
    load()
    assert [name for name in modules if name in sys.modules] == imported
    assert record("acne").state is State.DISABLED


def test_31_metadata_is_read_by_the_load_and_not_by_importing_the_library(site: Any, forked: Any) -> None:
    site.backend("acme", REGISTERS)
    done = forked(
        site,
        """
        import sys
        import tileops, tileops.backend, tileops.norm
        op = tileops.LayerNormFwdOp((4,))
        tileops.backend.note("a program may note something")
        names = ("pluggy", "plug_acme")
        print([name for name in names if name in sys.modules])
        tileops.backend.load()
        print([name for name in names if name in sys.modules])
        """,
    )
    assert done.stdout.splitlines() == ["[]", "['pluggy', 'plug_acme']"]


@here
def test_a_question_answers_though_every_backend_is_broken(site: Any) -> None:
    for name in ("acme", "zeta"):
        site.backend(name, "raise OSError('no licence')")
    with pytest.warns(BackendLoadWarning):
        assert [one.state for one in status()] == [State.FAILED, State.FAILED]


def test_a_requirement_of_an_extra_alone_is_passed_over_without_packaging(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    assert _stated_about_us("tileops-core[testing]>=9; extra == 'test'") is None


@pytest.mark.parametrize("marker", ["extra == 'test' or python_version > '3'", "python_version > '3'", "extra != 'x'"])
def test_a_requirement_whose_marker_is_more_than_an_extra_counts(marker: str) -> None:
    assert _stated_about_us(f"tileops-core>=9; {marker}") == ("tileops-core", ">=9")
