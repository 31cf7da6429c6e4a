"""The one load of a process: its lock, its waiters, its transactions, its policy. Metadata is real, on a real path."""

from __future__ import annotations

import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from textwrap import dedent
from typing import Any

import pytest
import torch
from tileops import LayerNormFwdOp, OpNotAvailableError
from tileops.backend import (
    BackendRecord,
    State,
    load,
    register_kernel_type,
    registered_targets,
    status,
    unregister_kernel_type,
)
from tileops.backend.policy import POLICY_VARIABLE
from tileops.backend.registration import registry
from tileops.errors import BackendLoadWarning, RegistrationError
from tileops.kernels.layer_norm import LayerNorm, LayerNormCall

pytestmark = pytest.mark.usefixtures("fresh", "only_the_site")

CALL = LayerNormCall(torch.device("cpu"), 4, torch.float32)

KERNELS = """
    import torch
    from tileops.kernels.layer_norm import LayerNorm

    class Row(LayerNorm):
        devices = frozenset({"cpu"})

        def forward(self, x, weight, bias):
            return x

    class Other(Row):
        preferred_over = frozenset({"row"})
"""

REGISTERS = (
    KERNELS
    + """
    from tileops.backend import register_kernel_type
    register_kernel_type("LayerNormFwdOp", "row", Row)
"""
)


def record(name: str) -> BackendRecord:
    (found,) = [one for one in registry().told() if one.name == name]
    return found


def keys() -> list[str]:
    return [verdict.key for verdict in LayerNormFwdOp((4,)).explain("layer_norm", CALL).verdicts if ":" in verdict.key]


def test_a_backend_is_loaded_by_the_first_miss_and_only_once(site: Any) -> None:
    site.backend("acme", REGISTERS)
    assert not registry().loaded
    assert LayerNormFwdOp((4,)).key_for("layer_norm", CALL) == "acme:row"
    records = registry().records
    load()
    load()
    assert registry().records is records
    assert record("acme").state is State.LOADED


@pytest.mark.parametrize(
    "question", [status, registered_targets, lambda: LayerNormFwdOp((4,)).explain("layer_norm", CALL)]
)
def test_a_question_about_backends_loads_them(site: Any, question: Any) -> None:
    site.backend("acme", REGISTERS)
    question()
    assert registry().loaded
    assert keys() == ["acme:row"]


def test_neither_constructing_nor_registering_loads_anything(site: Any) -> None:
    module = site.backend("acme", "raise SystemExit('imported')")
    LayerNormFwdOp((4,))
    mine = type("Mine", (LayerNorm,), {"forward": lambda self, x, weight, bias: x, "devices": frozenset({"cpu"})})
    register_kernel_type("LayerNormFwdOp", "mine", mine)
    assert not registry().loaded
    assert module not in sys.modules


def test_a_record_says_what_where_and_which_version(site: Any) -> None:
    site.backend("acme", REGISTERS, version="2.5")
    load()
    told = record("acme")
    assert (told.distribution, told.version, told.state) == ("tileops-backend-acme", "2.5", State.LOADED)
    assert str(site.folder) in told.path
    assert told.entry_points == ("plug_acme",)
    assert told.registered == ("LayerNormFwdOp: acme:row",)
    assert (told.reason, told.traceback) == ("", "")


def test_records_are_in_order_of_name(site: Any) -> None:
    for name in ("zeta", "acme", "mid"):
        site.backend(name, REGISTERS)
    load()
    assert [one.name for one in registry().records] == ["acme", "mid", "zeta"]


# ------------------------------------------------------------------------------------------- whole or not at all


BROKEN = {
    "import": (REGISTERS + "    raise OSError('no licence')\n", "OSError: no licence"),
    "syntax": ("def (:\n", "SyntaxError"),
    "missing": ("import module_that_nobody_has\n", "ModuleNotFoundError"),
    "exit": (REGISTERS + "    raise SystemExit(3)\n", "SystemExit"),
    "unfit": (REGISTERS + "    register_kernel_type('LayerNormFwdOp', 'bad', object)\n", "implements no interface"),
    "twice": (REGISTERS + "    register_kernel_type('LayerNormFwdOp', 'row', Other)\n", "already"),
    "generals": (
        KERNELS
        + """
    from tileops.backend import register_kernel_type
    for key in ("one", "two"):
        register_kernel_type("LayerNormFwdOp", key, type(key, (Row,), {"general": True}))
    """,
        "both general",
    ),
    "cycle": (
        KERNELS
        + """
    from tileops.backend import register_kernel_type
    register_kernel_type("LayerNormFwdOp", "row", type("A", (Row,), {"preferred_over": frozenset({"other"})}))
    register_kernel_type("LayerNormFwdOp", "other", Other)
    """,
        "form a cycle",
    ),
    "hook": (
        """
    from tileops.backend import hookimpl

    @hookimpl
    def tileops_register_kernel(register_kernel_type): ...
    """,
        "tileops_register_kernel",
    ),
    "argument": (
        """
    from tileops.backend import hookimpl

    @hookimpl
    def tileops_register_kernels(register_kernels): ...
    """,
        "register_kernels",
    ),
    "in_hook": (
        KERNELS
        + """
    from tileops.backend import hookimpl

    @hookimpl
    def tileops_register_kernels(register_kernel_type):
        register_kernel_type("LayerNormFwdOp", "row", Row)
        raise OSError("no licence")
    """,
        "OSError: no licence",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_backend_is_skipped_whole_with_one_warning_and_a_record(site: Any, fault: str) -> None:
    source, said = BROKEN[fault]
    site.backend("acme", source)
    site.backend("zeta", REGISTERS)
    with pytest.warns(BackendLoadWarning) as caught:
        load()
    (warning,) = caught
    told = record("acme")
    for part in ("tileops skips the backend acme (tileops-backend-acme 1.0)", said, "TILEOPS_BACKENDS=-acme"):
        assert part in str(warning.message)
    assert told.state is State.FAILED
    assert said in told.reason
    assert "Traceback" in told.traceback
    assert told.registered == ()
    assert keys() == ["zeta:row"]


def test_a_failed_backend_is_shown_in_every_later_selection_error(site: Any) -> None:
    site.backend("acme", "raise OSError('no licence')")
    with pytest.warns(BackendLoadWarning):
        load()
    for _ in range(2):
        with pytest.raises(
            OpNotAvailableError, match=r"acme \(tileops-backend-acme 1\.0\) failed to load: OSError: no licence"
        ):
            LayerNormFwdOp((4,)).kernel_for("layer_norm", CALL)


def test_a_backend_that_registers_nothing_is_empty_and_warned_about(site: Any) -> None:
    site.backend("acme", "x = 1")
    with pytest.warns(BackendLoadWarning, match="acme .*registered nothing"):
        load()
    assert record("acme").state is State.EMPTY


def test_a_backend_with_a_note_only_is_loaded_and_its_note_is_shown_in_later_errors(site: Any) -> None:
    site.backend("acme", "import tileops.backend\ntileops.backend.note('no compiler on this machine')\n")
    load()
    assert record("acme").notes == ("no compiler on this machine",)
    with pytest.raises(OpNotAvailableError, match="acme .*no compiler on this machine"):
        LayerNormFwdOp((4,)).kernel_for("layer_norm", CALL)


def test_a_warning_that_is_an_error_truncates_nothing(site: Any) -> None:
    site.backend("acme", "raise OSError('no licence')")
    site.backend("beta", "raise OSError('no licence either')")
    site.backend("zeta", REGISTERS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BackendLoadWarning):
            load()
        assert [one.state for one in registry().records] == [State.FAILED, State.FAILED, State.LOADED]
        assert LayerNormFwdOp((4,)).key_for("layer_norm", CALL) == "zeta:row"


def test_a_keyboard_interrupt_ends_the_load_and_the_next_one_loses_nobody(site: Any) -> None:
    site.module("state", "interrupted = []")
    site.backend("acme", REGISTERS)
    site.backend(
        "mid",
        "import state\nif not state.interrupted:\n    state.interrupted.append(1)\n    raise KeyboardInterrupt\n"
        + dedent(REGISTERS),
    )
    with pytest.raises(KeyboardInterrupt):
        load()
    load()
    assert {one.name: one.state for one in registry().records} == {"acme": State.LOADED, "mid": State.LOADED}
    assert keys() == ["acme:row", "mid:row"]


# ------------------------------------------------------------------------------------------------ attribution


def test_a_backend_that_imports_a_good_one_and_fails_leaves_the_good_one(site: Any) -> None:
    site.backend("acme", "import plug_zeta\nraise OSError('no licence')\n")
    site.backend("zeta", REGISTERS)
    with pytest.warns(BackendLoadWarning, match="acme"):
        load()
    assert (record("acme").state, record("zeta").state) == (State.FAILED, State.LOADED)
    assert keys() == ["zeta:row"]


def test_a_backend_that_imports_a_loaded_one_and_fails_leaves_the_loaded_one(site: Any) -> None:
    site.backend("acme", REGISTERS)
    site.backend("zeta", "import plug_acme\nraise OSError('no licence')\n")
    with pytest.warns(BackendLoadWarning, match="zeta"):
        load()
    assert keys() == ["acme:row"]


def test_registrations_belong_to_the_module_that_makes_them_and_not_to_who_imports_it(site: Any) -> None:
    site.backend("acme", "import plug_zeta\n" + dedent(REGISTERS))
    site.backend("zeta", REGISTERS)
    load()
    assert record("acme").registered == ("LayerNormFwdOp: acme:row",)
    assert record("zeta").registered == ("LayerNormFwdOp: zeta:row",)


def test_a_module_that_was_imported_before_the_load_loses_nothing(site: Any) -> None:
    module = site.backend("acme", REGISTERS)
    __import__(module)
    assert not registry().loaded
    assert LayerNormFwdOp((4,)).key_for("layer_norm", CALL) == "acme:row"


def test_a_loaded_backend_may_register_more_later(site: Any) -> None:
    site.module("acme_plug.__init__", REGISTERS)
    site.module("acme_plug.more", "from acme_plug import *\nregister_kernel_type('LayerNormFwdOp', 'other', Other)\n")
    site.distribution("tileops-backend-acme", "[tileops.backends]\nacme = acme_plug\n")
    load()
    __import__("acme_plug.more")
    assert keys() == ["acme:other", "acme:row"]
    assert LayerNormFwdOp((4,)).key_for("layer_norm", CALL) == "acme:other"
    assert "LayerNormFwdOp: acme:other" in record("acme").registered


def test_a_part_of_a_loaded_backend_that_another_imports_while_it_loads_is_not_lost(site: Any) -> None:
    site.module("acme_plug.__init__", REGISTERS)
    site.module("acme_plug.more", "from acme_plug import *\nregister_kernel_type('LayerNormFwdOp', 'other', Other)\n")
    site.distribution("tileops-backend-acme", "[tileops.backends]\nacme = acme_plug\n")
    site.backend("zeta", "import acme_plug.more\n" + dedent(REGISTERS))
    load()
    assert keys() == ["acme:other", "acme:row", "zeta:row"]


def test_a_backend_that_another_tried_to_import_is_blamed_for_its_own_fault(site: Any) -> None:
    site.backend("acme", "try:\n    import plug_zeta\nexcept OSError:\n    pass\n" + dedent(REGISTERS))
    site.backend("zeta", REGISTERS + "    raise OSError('no licence')\n")
    with pytest.warns(BackendLoadWarning, match="zeta"):
        load()
    assert record("zeta").reason == "OSError: no licence"
    assert keys() == ["acme:row"]


def test_a_module_of_a_skipped_backend_that_is_imported_later_registers_nothing(site: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv(POLICY_VARIABLE, "-acme")
    module = site.backend("acme", REGISTERS)
    load()
    __import__(module)
    assert keys() == []


def test_a_helper_module_elsewhere_registers_for_the_backend_that_is_loading(site: Any) -> None:
    site.module(
        "shared_helper",
        KERNELS
        + """
    from tileops.backend import register_kernel_type

    def register():
        register_kernel_type("LayerNormFwdOp", "row", Row)
    """,
    )
    site.backend("acme", "import shared_helper\nshared_helper.register()\n")
    load()
    assert keys() == ["acme:row"]


def test_bare_keys_of_two_backends_do_not_meet(site: Any) -> None:
    site.backend("acme", REGISTERS + "    register_kernel_type('LayerNormFwdOp', 'other', Other)\n")
    site.backend("zeta", REGISTERS)
    load()
    selection = LayerNormFwdOp((4,)).explain("layer_norm", CALL)
    assert selection.contenders == ("acme:other", "zeta:row")
    for part in ("tileops-backend-acme 1.0, tileops-backend-zeta 1.0", 'tileops.selection(prefer="acme:other")'):
        assert part in str(selection)


def test_a_cycle_across_two_backends_is_nobodys_fault(site: Any) -> None:
    for mine, theirs in (("acme", "zeta"), ("zeta", "acme")):
        site.backend(
            mine,
            KERNELS
            + f"""
    from tileops.backend import register_kernel_type
    register_kernel_type("LayerNormFwdOp", "row", type("R", (Row,), {{"preferred_over": frozenset({{"{theirs}:row"}})}}))
    """,
        )
    load()
    assert LayerNormFwdOp((4,)).explain("layer_norm", CALL).contenders == ("acme:row", "zeta:row")


def test_two_backends_that_claim_one_target_for_one_op_are_told_apart(site: Any) -> None:
    source = """
    from tileops.backend import register_kernel_builder
    register_kernel_builder("LayerNormFwdOp", "npu", lambda *specs, **params: None)
    """
    site.backend("acme", source)
    site.backend("zeta", source)
    with pytest.warns(BackendLoadWarning, match="zeta.*target 'npu' has a builder.*tileops-backend-acme 1.0"):
        load()
    assert registered_targets() == ["npu"]
    assert record("acme").state is State.LOADED


def test_two_backends_that_read_the_facts_of_one_device_type_are_told_apart(site: Any) -> None:
    source = """
    from tileops.backend import DeviceFacts, register_device_facts
    register_device_facts("npu", lambda device: DeviceFacts(arch=1))
    """
    site.backend("acme", source)
    site.backend("zeta", source)
    with pytest.warns(BackendLoadWarning, match="zeta.*npu"):
        load()


def test_two_distributions_with_one_short_name_do_not_swallow_each_other(site: Any) -> None:
    site.backend("acme", REGISTERS)
    site.module("plain_acme", REGISTERS)
    site.distribution("acme", "[tileops.backends]\nacme = plain_acme\n")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load()
    told = {one.distribution: one for one in registry().records}
    assert set(told) == {"acme", "tileops-backend-acme"}
    served = [one for one in told.values() if one.state is State.LOADED]
    assert len(keys()) == len(served)
    assert len(served) + len(caught) == 2


@pytest.mark.parametrize("name", ["local", "in-tree"])
def test_a_backend_cannot_take_a_name_of_ours(site: Any, name: str) -> None:
    site.backend(name, REGISTERS)
    with pytest.warns(BackendLoadWarning, match=f"a backend cannot be called '{name}'"):
        load()
    assert keys() == []


def test_an_unknown_op_of_a_backend_is_kept_and_noted_with_the_nearest_name(site: Any) -> None:
    site.backend("acme", REGISTERS.replace("LayerNormFwdOp", "LayerNromFwdOp"))
    load()
    (note,) = record("acme").notes
    assert "'LayerNromFwdOp', an op that this release does not have; did you mean 'LayerNormFwdOp'?" in note
    with pytest.raises(OpNotAvailableError, match="LayerNromFwdOp"):
        LayerNormFwdOp((4,)).kernel_for("layer_norm", CALL)


def test_a_preferred_key_that_this_release_does_not_have_is_noted_with_the_nearest_name(site: Any) -> None:
    site.backend(
        "acme",
        KERNELS
        + """
    from tileops.backend import register_kernel_type
    register_kernel_type("LayerNormFwdOp", "row", type("R", (Row,), {"preferred_over": frozenset({"held_rwo"})}))
    """,
    )
    load()
    assert record("acme").state is State.LOADED
    assert any("held_rwo" in note and "held_row" in note for note in record("acme").notes)


# ---------------------------------------------------------------------------------------------------- threads


def test_threads_that_ask_together_load_once_and_all_see_everything(site: Any) -> None:
    site.module("counter", "loads = []")
    site.backend("acme", "import counter\ncounter.loads.append(1)\n" + dedent(REGISTERS))
    barrier = threading.Barrier(16)

    def ask(_: int) -> str:
        barrier.wait(timeout=30)
        return LayerNormFwdOp((4,)).key_for("layer_norm", CALL)

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(ask, range(16))) == {"acme:row"}
    import counter  # type: ignore[import-not-found]

    assert counter.loads == [1]


def test_a_thread_that_asks_during_a_load_waits_for_its_end(site: Any) -> None:
    site.module("gate", "import threading\nentered, go = threading.Event(), threading.Event()\n")
    site.backend("acme", "import gate\ngate.entered.set()\nassert gate.go.wait(30)\n" + dedent(REGISTERS))
    import gate  # type: ignore[import-not-found]

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(load)
        assert gate.entered.wait(30)
        second = pool.submit(LayerNormFwdOp((4,)).key_for, "layer_norm", CALL)
        assert not second.done()
        gate.go.set()
        assert second.result(timeout=30) == "acme:row"
        first.result(timeout=30)


def test_a_backend_that_asks_for_kernels_while_it_loads_sees_what_is_committed_so_far(site: Any) -> None:
    site.backend("acme", REGISTERS)
    site.backend(
        "zeta",
        """
    import torch
    from tileops import LayerNormFwdOp
    from tileops.backend import note
    from tileops.kernels.layer_norm import LayerNormCall
    call = LayerNormCall(torch.device("cpu"), 4, torch.float32)
    note(LayerNormFwdOp((4,)).key_for("layer_norm", call))
    """,
    )
    load()
    assert record("zeta").notes == ("acme:row",)


# ----------------------------------------------------------------------------------------------------- policy


@pytest.mark.parametrize(
    ("policy", "loaded"),
    [
        (None, ["acme", "zeta"]),
        ("", []),
        ("  ", []),
        ("acme", ["acme"]),
        ("acme,zeta", ["acme", "zeta"]),
        (" zeta , acme ,", ["acme", "zeta"]),
        ("-acme", ["zeta"]),
        ("-acme,-zeta", []),
        ("tileops-backend-acme", ["acme"]),
        ("-tileops-backend-acme", ["zeta"]),
        ("point-of-zeta", ["zeta"]),
    ],
)
def test_the_policy_says_which_backends_are_loaded(
    site: Any, monkeypatch: pytest.MonkeyPatch, policy: str | None, loaded: list[str]
) -> None:
    site.backend("acme", REGISTERS)
    site.module("zeta_plug", REGISTERS)
    site.distribution("tileops-backend-zeta", "[tileops.backends]\npoint-of-zeta = zeta_plug\n")
    if policy is not None:
        monkeypatch.setenv(POLICY_VARIABLE, policy)
    load()
    states = {one.name: one.state for one in registry().records}
    assert states == {name: State.LOADED if name in loaded else State.DISABLED for name in ("acme", "zeta")}
    assert keys() == [f"{name}:row" for name in loaded]


def test_a_denied_backend_is_never_imported_and_its_record_says_why(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POLICY_VARIABLE, "-acme")
    module = site.backend("acme", REGISTERS)
    load()
    assert module not in sys.modules
    assert record("acme").reason == "TILEOPS_BACKENDS='-acme' leaves it out"
    with pytest.raises(OpNotAvailableError, match="acme .*is disabled: TILEOPS_BACKENDS='-acme' leaves it out"):
        LayerNormFwdOp((4,)).kernel_for("layer_norm", CALL)


@pytest.mark.parametrize("policy", ["Tileops_Backend_Acme", "tileops.backend.acme", "ACME"])
def test_a_distribution_may_be_named_as_pip_lets_it_be_named(
    site: Any, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setenv(POLICY_VARIABLE, policy)
    site.backend("acme", REGISTERS)
    load()
    assert record("acme").state is State.LOADED


def test_mixing_names_to_load_with_names_to_leave_out_is_an_error_that_shows_both_ways(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(POLICY_VARIABLE, "acme,-zeta")
    for _ in range(2):
        with pytest.raises(RegistrationError, match="mixes names .*'acme' or '-zeta'"):
            load()
    monkeypatch.setenv(POLICY_VARIABLE, "acme")
    site.backend("acme", REGISTERS)
    load()
    assert registry().loaded


@pytest.mark.parametrize("policy", ["acne", "-acne"])
def test_an_unknown_name_in_the_policy_warns_with_the_known_ones(
    site: Any, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setenv(POLICY_VARIABLE, policy)
    site.backend("acme", REGISTERS)
    with pytest.warns(BackendLoadWarning, match=r"names 'acne'.*known: acme; did you mean 'acme'\?") as caught:
        load()
    assert len(caught) == 1


def test_what_a_program_registers_itself_is_there_whatever_the_policy(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(POLICY_VARIABLE, "")
    mine = type("Mine", (LayerNorm,), {"forward": lambda self, x, weight, bias: x, "devices": frozenset({"cpu"})})
    register_kernel_type("LayerNormFwdOp", "mine", mine)
    assert LayerNormFwdOp((4,)).key_for("layer_norm", CALL) == "local:mine"


def test_a_facts_reader_of_a_backend_that_fails_warns_once_and_names_the_distribution(site: Any) -> None:
    site.backend(
        "acme",
        KERNELS
        + """
    from tileops.backend import register_device_facts, register_kernel_type

    def read(device):
        raise OSError("driver gone")

    register_device_facts("meta", read)
    register_kernel_type("LayerNormFwdOp", "row", type("R", (Row,), {"devices": frozenset({"meta"}), "supported_archs": frozenset({7})}))
    """,
    )
    load()
    call = LayerNormCall(torch.device("meta"), 4, torch.float32)
    with pytest.warns(RuntimeWarning, match="OSError: driver gone") as caught:
        selections = [LayerNormFwdOp((4,)).explain("layer_norm", call) for _ in range(2)]
    assert [selection.key for selection in selections] == [None, None]
    assert len(caught) == 1
    assert "tileops-backend-acme" in str(caught[0].message)


def test_what_a_backend_registered_is_not_the_programs_to_take_back(site: Any) -> None:
    site.backend("acme", REGISTERS)
    load()
    for key in ("row", "acme:row"):
        with pytest.raises(RegistrationError, match="the program has registered no"):
            unregister_kernel_type("LayerNormFwdOp", key)
    assert keys() == ["acme:row"]
