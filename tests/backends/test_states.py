"""What becomes of a backend: declining, strictness, policy by API, attribution, and what threads register."""

from __future__ import annotations

import importlib.metadata
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from textwrap import dedent
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tileops import LayerNormFwdOp, OpNotAvailableError
from tileops.backend import (
    BackendLoadError,
    BackendRecord,
    State,
    discovery,
    load,
    register_device_facts,
    register_kernel_builder,
    register_kernel_type,
    status,
)
from tileops.backend.policy import POLICY_VARIABLE
from tileops.backend.process import Process, process
from tileops.backend.registration import Registry, registry, update_registry
from tileops.errors import BackendLoadWarning, RegistrationError
from tileops.kernels.layer_norm import LayerNorm, LayerNormCall

pytestmark = pytest.mark.usefixtures("fresh", "only_the_site")

CALL = LayerNormCall(torch.device("cpu"), 4, torch.float32)

KERNEL = """
    from tileops.backend import Declined, hookimpl, register_kernel_type
    from tileops.kernels.layer_norm import LayerNorm

    class Row(LayerNorm):
        devices = frozenset({"cpu"})

        def forward(self, x, weight, bias):
            return x
"""
REGISTERS = (
    KERNEL
    + """
    register_kernel_type("LayerNormFwdOp", "row", Row)
"""
)


def record(name: str) -> BackendRecord:
    (found,) = [one for one in registry().told() if one.name == name]
    return found


def keys() -> list[str]:
    return [verdict.key for verdict in LayerNormFwdOp((4,)).explain("layer_norm", CALL).verdicts if ":" in verdict.key]


def mine() -> Any:
    return type("Mine", (LayerNorm,), {"forward": lambda self, x, weight, bias: x, "devices": frozenset({"cpu"})})


# -------------------------------------------------------------------------------------------------- declining


@pytest.mark.parametrize(
    ("source", "attribute"),
    [
        (REGISTERS + "    raise Declined('no npu here')\n", ""),
        (
            REGISTERS
            + "    @hookimpl\n    def tileops_register_kernels(register_kernel_type):\n"
            + "        raise Declined('no npu here')\n",
            "",
        ),
        (REGISTERS + "    def register():\n        raise Declined('no npu here')\n", "register"),
    ],
    ids=["import", "hook", "function"],
)
def test_a_backend_that_declines_is_left_out_without_a_warning_and_shown_on_use(
    site: Any, source: str, attribute: str
) -> None:
    site.backend("acme", source, attribute=attribute)
    load()
    told = record("acme")
    assert (told.state, told.reason, told.traceback, told.registered) == (State.DECLINED, "no npu here", "", ())
    with pytest.raises(OpNotAvailableError, match=r"acme \(tileops-backend-acme 1.0\) declined: no npu here"):
        LayerNormFwdOp((4,)).kernel_for("layer_norm", CALL)


def test_a_backend_that_declines_without_a_reason_is_said_to_give_none(site: Any) -> None:
    site.backend("acme", "from tileops.backend import Declined\nraise Declined\n")
    load()
    assert record("acme").reason == "it gives no reason"


def test_declining_is_no_error_when_strict(site: Any) -> None:
    site.backend("acme", REGISTERS + "    raise Declined('no npu here')\n")
    load(strict=True)
    assert record("acme").state is State.DECLINED


# -------------------------------------------------------------------------------------------------- strictness

PROBLEMS = {
    "fails": ("raise OSError('no licence')", "acme .*OSError: no licence. What to do: "),
    "is empty": ("x = 1", "acme .*registered nothing. What to do: "),
    "names an unknown op": (REGISTERS.replace("LayerNormFwdOp", "LayerNromFwdOp"), "did you mean 'LayerNormFwdOp'"),
    "prefers an unknown key": (
        REGISTERS + "    register_kernel_type('LayerNormFwdOp', 'two', "
        "type('Two', (Row,), {'preferred_over': frozenset({'acme:rwo'})}))\n",
        "'acme:rwo', a key unknown here; did you mean 'acme:row'",
    ),
}


@pytest.mark.filterwarnings("ignore::tileops.errors.BackendLoadWarning")
@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_is_warned_of_or_noted_is_an_error_when_strict_also_after_the_load(site: Any, problem: str) -> None:
    source, said = PROBLEMS[problem]
    site.backend("acme", source)
    for _ in range(2):
        with pytest.raises(BackendLoadError, match=said):
            load(strict=True)
    load()
    with pytest.raises(BackendLoadError, match=said):
        load(strict=True)


def test_the_error_of_a_strict_load_lists_everything_and_chains_the_first_cause(site: Any) -> None:
    site.backend("acme", "raise OSError('no licence')")
    site.backend("zeta", PROBLEMS["names an unknown op"][0])
    with pytest.raises(BackendLoadError, match=r"(?s)backend acme.*backend zeta") as raised:
        load(strict=True)
    assert isinstance(raised.value.__cause__, OSError)


def test_the_variable_makes_every_question_strict_until_the_backend_is_mended(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEOPS_BACKENDS_STRICT", "1")
    site.backend("acme", "raise OSError('no licence')")
    for ask in (load, status, lambda: LayerNormFwdOp((4,)).explain("layer_norm", CALL)):
        with pytest.raises(BackendLoadError, match="no licence"):
            ask()
    monkeypatch.setenv("TILEOPS_BACKENDS_STRICT", "0")
    with pytest.warns(BackendLoadWarning):
        load()


@pytest.mark.parametrize("said", ["", "0", "false", "OFF", "no"])
def test_a_variable_that_says_no_is_not_strict(site: Any, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("TILEOPS_BACKENDS_STRICT", said)
    site.backend("acme", REGISTERS.replace("LayerNormFwdOp", "LayerNromFwdOp"))
    load()
    assert record("acme").state is State.LOADED


def test_a_strict_load_of_backends_without_a_fault_is_a_load(site: Any) -> None:
    site.backend("acme", REGISTERS)
    load(strict=True)
    assert (registry().loaded, keys()) == (True, ["acme:row"])


# ----------------------------------------------------------------------------------------------- policy by API


@pytest.mark.parametrize(
    ("policy", "loaded"),
    [
        ({"only": ["acme"]}, ["acme"]),
        ({"only": "acme"}, ["acme"]),
        ({"only": ()}, []),
        ({"exclude": ["tileops-backend-acme"]}, ["zeta"]),
        ({"exclude": ()}, ["acme", "zeta"]),
    ],
)
def test_a_program_says_which_backends_are_loaded_in_place_of_the_variable(
    site: Any, monkeypatch: pytest.MonkeyPatch, policy: Any, loaded: list[str]
) -> None:
    monkeypatch.setenv(POLICY_VARIABLE, "nobody")
    for name in ("acme", "zeta"):
        site.backend(name, REGISTERS)
    load(**policy)
    assert keys() == [f"{name}:row" for name in loaded]
    assert all(one.reason.startswith("load(") for one in registry().records if one.state is State.DISABLED)


def test_names_to_load_and_names_to_leave_out_cannot_be_mixed() -> None:
    with pytest.raises(RegistrationError, match="give one"):
        load(only=["acme"], exclude=["zeta"])


def test_an_unknown_name_given_by_a_program_warns_with_the_known_ones(site: Any) -> None:
    site.backend("acme", REGISTERS)
    with pytest.warns(BackendLoadWarning, match=r"load\(exclude=\['acne'\]\) names 'acne'.*did you mean 'acme'"):
        load(exclude=["acne"])


def test_a_backend_cannot_say_which_backends_are_loaded_while_it_is_loaded(site: Any) -> None:
    site.backend("acme", REGISTERS + "    import tileops.backend\n    tileops.backend.load(exclude=['zeta'])\n")
    site.backend("zeta", REGISTERS)
    with pytest.warns(BackendLoadWarning, match=r"acme.*comes too late to decide about zeta"):
        load()
    assert keys() == ["zeta:row"]


# ------------------------------------------------------------------------------------------------- notes that go


def test_a_note_on_an_unknown_op_or_key_goes_when_it_appears(site: Any) -> None:
    site.backend("acme", REGISTERS.replace("LayerNormFwdOp", "LaterOp"))
    site.backend(
        "zeta",
        REGISTERS.replace("Row(LayerNorm):", "Row(LayerNorm):\n        preferred_over = frozenset({'local:mine'})"),
    )
    load()
    assert ["LaterOp" in note for note in record("acme").notes] == [True]
    assert ["'local:mine', a key unknown here" in note for note in record("zeta").notes] == [True]
    register_kernel_type("LayerNormFwdOp", "mine", mine())
    later = type("LaterOp", (LayerNormFwdOp,), {})((4,))
    assert (record("acme").notes, record("zeta").notes) == ((), ())
    assert LayerNormFwdOp((4,)).key_for("layer_norm", CALL) == "zeta:row"
    assert later.explain("layer_norm", CALL).contenders == ("acme:row", "zeta:row")


def test_what_a_skipped_backend_registers_later_is_not_taken_and_that_is_noted(site: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv(POLICY_VARIABLE, "-acme")
    module = site.backend("acme", REGISTERS)
    load()
    __import__(module)
    assert record("acme").notes == ("what it registers after the load is not taken: it is disabled",)
    assert keys() == []


def test_an_empty_backend_that_registers_later_is_loaded(site: Any) -> None:
    site.module("acme_plug.__init__", "")
    site.module("acme_plug.lazy", REGISTERS)
    site.distribution("tileops-backend-acme", "[tileops.backends]\nacme = acme_plug\n")
    with pytest.warns(BackendLoadWarning, match="registered nothing"):
        load()
    __import__("acme_plug.lazy")
    assert (record("acme").state, record("acme").reason, keys()) == (State.LOADED, "", ["acme:row"])


# -------------------------------------------------------------------------------------------------- attribution


def test_what_a_failed_import_registered_goes_and_its_second_import_counts(site: Any) -> None:
    site.module("state", "tries = []")
    site.module(
        "acme_plug.flaky",
        REGISTERS + "    import state\n    state.tries.append(1)\n    assert len(state.tries) > 1\n",
    )
    site.module(
        "acme_plug.__init__",
        "try:\n    import acme_plug.flaky\nexcept AssertionError:\n    import acme_plug.flaky\n",
    )
    site.distribution("tileops-backend-acme", "[tileops.backends]\nacme = acme_plug\n")
    load()
    assert record("acme").registered == ("LayerNormFwdOp: acme:row",)
    (verdict,) = [one for one in LayerNormFwdOp((4,)).explain("layer_norm", CALL).verdicts if one.key == "acme:row"]
    assert verdict.cls is sys.modules["acme_plug.flaky"].Row


def test_what_a_part_registered_whose_import_failed_is_left_out_with_a_note(site: Any) -> None:
    site.module("acme_plug.part", REGISTERS + "    raise OSError('no licence')\n")
    site.module("acme_plug.__init__", "try:\n    import acme_plug.part\nexcept OSError:\n    pass\n")
    site.distribution("tileops-backend-acme", "[tileops.backends]\nacme = acme_plug\n")
    load()
    assert keys() == []
    assert record("acme").notes == ("what acme_plug.part registered is left out: its import failed",)


def test_a_part_that_was_imported_before_its_backend_failed_once_is_not_lost(site: Any) -> None:
    site.module("state", "tries = []")
    site.module("acme_plug.part", REGISTERS)
    site.module(
        "acme_plug.__init__", "import acme_plug.part, state\nstate.tries.append(1)\nassert len(state.tries) > 1\n"
    )
    site.distribution("tileops-backend-acme", "[tileops.backends]\nacme = acme_plug\n")
    with pytest.raises(AssertionError):
        __import__("acme_plug")
    load()
    assert keys() == ["acme:row"]


def test_a_namespace_package_does_not_make_its_parts_one_backend(site: Any) -> None:
    site.module("vendor.acme.__init__", REGISTERS)
    site.module("vendor.zeta.__init__", REGISTERS)
    site.module("vendor.program", REGISTERS.replace('"row"', '"mine"'))
    for name in ("acme", "zeta"):
        site.distribution(f"tileops-backend-{name}", f"[tileops.backends]\n{name} = vendor.{name}\n")
    load()
    __import__("vendor.program")
    assert keys() == ["acme:row", "local:mine", "zeta:row"]


def test_of_two_distributions_with_one_entry_point_the_second_is_shadowed(site: Any) -> None:
    site.module("plug_shared", REGISTERS)
    for name in ("acme", "acme-renamed"):
        site.distribution(f"tileops-backend-{name}", "[tileops.backends]\nx = plug_shared\n")
    load()
    assert (record("acme").state, record("acme-renamed").state) == (State.LOADED, State.SHADOWED)
    assert record("acme-renamed").reason == "tileops-backend-acme 1.0 has the entry point 'plug_shared' too"
    assert keys() == ["acme:row"]


def test_two_distributions_may_enter_one_module_by_functions_of_their_own(site: Any) -> None:
    site.module(
        "plug_shared",
        KERNEL
        + """
    def first():
        register_kernel_type("LayerNormFwdOp", "one", Row)

    def second():
        register_kernel_type("LayerNormFwdOp", "two", Row)
    """,
    )
    site.distribution("tileops-backend-acme", "[tileops.backends]\nx = plug_shared:first\n")
    site.distribution("tileops-backend-zeta", "[tileops.backends]\nx = plug_shared:second\n")
    load()
    assert keys() == ["acme:one", "zeta:two"]


def test_module_calls_hooks_and_a_function_may_be_mixed(site: Any) -> None:
    site.module(
        "plug_acme",
        REGISTERS
        + """
    def register():
        register_kernel_type("LayerNormFwdOp", "by_function", Row)

    @hookimpl
    def tileops_register_kernels(register_kernel_type):
        register_kernel_type("LayerNormFwdOp", "by_hook", Row)
    """,
    )
    site.distribution("tileops-backend-acme", "[tileops.backends]\na = plug_acme\nb = plug_acme:register\n")
    load()
    assert keys() == ["acme:by_function", "acme:by_hook", "acme:row"]


# ------------------------------------------------------------------------------------------- faults that hide well


def test_an_error_that_cannot_say_what_it_is_fails_only_its_backend(site: Any) -> None:
    site.backend("acme", "class Mute(Exception):\n    def __str__(self):\n        raise ValueError\nraise Mute\n")
    site.backend("zeta", REGISTERS)
    with pytest.warns(BackendLoadWarning, match="Mute: it cannot say what it is"):
        load()
    assert keys() == ["zeta:row"]


@pytest.mark.parametrize(
    ("register", "said"),
    [
        (lambda: register_kernel_type(LayerNormFwdOp, "row", mine()), "is not an op: give the name of its class"),  # type: ignore[arg-type]
        (lambda: register_kernel_builder(None, "npu", lambda: None), "is not an op"),  # type: ignore[arg-type]
        (lambda: register_device_facts(torch.device("cpu"), lambda device: None), "is not a device type"),  # type: ignore
        (lambda: register_device_facts("npu", None), "which nobody can call"),  # type: ignore[arg-type]
        (lambda: __import__("tileops").backend.note(3), "3 is not a note"),
    ],
)
def test_a_name_that_is_no_name_is_refused_where_it_is_given(register: Any, said: str) -> None:
    with pytest.raises(RegistrationError, match=said):
        register()


def test_a_first_call_in_inference_mode_leaves_a_backends_tensors_fit_for_autograd(site: Any) -> None:
    site.backend("acme", "import torch\nconstant = torch.ones(4)\n" + dedent(REGISTERS))
    with torch.inference_mode():
        LayerNormFwdOp((4,)).explain("layer_norm", CALL)
    assert not sys.modules["plug_acme"].constant.is_inference()


# ----------------------------------------------------------------------------------------------- threads, order


def test_threads_that_register_together_lose_nothing() -> None:
    load()
    barrier = threading.Barrier(32)

    def register(number: int) -> None:
        barrier.wait(timeout=30)
        register_kernel_type("LayerNormFwdOp", f"k{number}", mine())

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(register, range(32)))
    assert sorted(keys()) == sorted(f"local:k{number}" for number in range(32))


def test_parts_of_a_backend_that_threads_import_before_the_load_lose_nothing(site: Any) -> None:
    site.module("acme_plug.__init__", "")
    for number in range(16):
        site.module(f"acme_plug.part{number}", REGISTERS.replace('"row"', f'"k{number}"'))
    site.distribution("tileops-backend-acme", "[tileops.backends]\nacme = acme_plug\n")
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(__import__, [f"acme_plug.part{number}" for number in range(16)]))
    assert len(keys()) == 16


ORDER_SOURCES = {
    "acme": REGISTERS,
    "beta": "import plug_acme\nraise OSError('no licence')\n",
    "mid": "from tileops.backend import Declined\nraise Declined('no npu here')\n",
    "zeta": "import plug_acme\n" + dedent(REGISTERS),
}


@settings(max_examples=24, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(6)))
@pytest.mark.filterwarnings("ignore::tileops.errors.BackendLoadWarning")
def test_the_order_in_which_distributions_are_found_changes_nothing(
    site: Any, monkeypatch: pytest.MonkeyPatch, order: list[int]
) -> None:
    if not list(site.folder.iterdir()):
        for name, source in ORDER_SOURCES.items():
            site.backend(name, source)
        site.distribution("tileops-backend-acme", "[tileops.backends]\nacme = gone\n", "0.9")
        site.distribution("acme", "[tileops.backends]\nacme = plug_zeta\n")
    found = sorted(importlib.metadata.distributions(path=[str(site.folder)]), key=lambda one: str(one._path))
    monkeypatch.setattr(discovery, "_distributions", lambda: [found[place] for place in order])
    for name in [name for name in sys.modules if name.startswith("plug_")]:
        del sys.modules[name]
    vars(process).update(vars(Process()))
    update_registry(lambda _: Registry())
    told = [(one.name, one.version, one.state, one.reason, one.registered, one.notes) for one in status()]
    assert [(name, version, state.value) for name, version, state, *_ in told] == [
        ("acme", "1.0", "loaded"),
        ("beta", "1.0", "failed"),
        ("mid", "1.0", "declined"),
        ("tileops-backend-acme", "1.0", "loaded"),
        ("tileops-backend-acme", "0.9", "shadowed"),
        ("zeta", "1.0", "shadowed"),
    ]


def test_of_copies_in_one_folder_the_latest_version_counts_in_every_order(site: Any, monkeypatch: Any) -> None:
    for version in ("1.9", "1.10", "nonsense"):
        site.distribution("tileops-backend-acme", "[tileops.backends]\nacme = plug_acme\n", version)
    found = list(importlib.metadata.distributions(path=[str(site.folder)]))
    for order in permutations(found):
        monkeypatch.setattr(discovery, "_distributions", lambda order=order: order)
        assert [copy.version for copy in discovery.installed_backends()] == ["1.10", "1.9", "nonsense"]
