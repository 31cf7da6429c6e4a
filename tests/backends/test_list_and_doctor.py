"""`tileops backends list` and `doctor`: what they say of good, broken and unfinished backends."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from tileops.backend import BackendError, BackendRecord, load
from tileops.cli import app
from tileops.cli.doctor import environment
from tileops.cli.doctor.environment import Distribution, check_owners, check_record, check_requirements
from tileops.cli.doctor.projects import read_project
from typer.testing import CliRunner

ROWS = """
    from tileops.backend import hookimpl
    from tileops.kernels.rms_norm import RMSNorm

    class Row(RMSNorm):
        devices = frozenset({"cpu"})

        def forward(self, x, weight):
            return x

    @hookimpl
    def tileops_register_kernels(register_kernel_type):
        register_kernel_type("RMSNormFwdOp", "row", Row)
"""

PYPROJECT = """
    [build-system]
    requires = ["hatchling"]
    build-backend = "hatchling.build"

    [project]
    name = "tileops-backend-acme"
    version = "1.0"
    dependencies = ["tileops-core>=0.1,<0.2"]

    [project.entry-points."tileops.backends"]
    acme = "tileops_backend_acme"
"""


def run(*words: Any) -> Any:
    return CliRunner().invoke(app, ["backends", *map(str, words)])


# ------------------------------------------------------------------------------------------------------- list


@pytest.mark.usefixtures("fresh", "only_the_site")
class TestList:
    def test_each_backend_has_its_state_and_what_it_registered(self, site: Any) -> None:
        site.backend("acme", ROWS)
        site.backend("zeta", "raise OSError('no licence')\n")
        done = run("list")
        assert done.exit_code == 0
        assert [line.rstrip() for line in done.stdout.splitlines()] == [
            "acme (tileops-backend-acme 1.0): loaded",
            "  RMSNormFwdOp: acme:row",
            "zeta (tileops-backend-zeta 1.0): failed",
            "  OSError: no licence",
        ]

    def test_json_holds_every_field_of_the_records(self, site: Any) -> None:
        site.backend("acme", ROWS, version="2.5")
        (told,) = json.loads(run("list", "--json").stdout)["backends"]
        assert told["state"] == "loaded"
        assert (told["name"], told["distribution"], told["version"]) == ("acme", "tileops-backend-acme", "2.5")
        assert (told["registered"], told["notes"]) == (["RMSNormFwdOp: acme:row"], [])
        assert told["entry_points"] == ["plug_acme"]

    def test_verbose_shows_the_traceback_and_the_path(self, site: Any) -> None:
        site.backend("zeta", "raise OSError('no licence')\n")
        assert "Traceback" not in run("list").stdout
        shown = run("list", "--verbose").stdout
        assert "Traceback (most recent call last)" in shown
        assert "plug_zeta.py" in shown
        assert "tileops_backend_zeta-1.0.dist-info" in shown

    def test_it_answers_where_every_backend_is_broken(self, site: Any) -> None:
        site.backend("exits", "import sys\nsys.exit(3)\n")
        site.backend("panics", "class Panic(BaseException): pass\nraise Panic('native')\n")
        site.backend("syntax", "def (:\n")
        site.distribution("tileops-backend-stale", "[tileops.backends]\nstale = module_that_is_gone\n")
        site.distribution("tileops-backend-malformed", "[tileops.backends]\nmalformed = not a reference!\n")
        site.distribution("unrelated", "[broken")
        done = run("list", "--json")
        assert done.exit_code == 0
        told = json.loads(done.stdout)["backends"]
        assert {one["name"]: one["state"] for one in told} == dict.fromkeys(
            ("exits", "malformed", "panics", "stale", "syntax"), "failed"
        )

    def test_a_registration_for_an_unknown_op_is_shown_with_the_nearest_name(self, site: Any) -> None:
        site.backend("acme", ROWS.replace('"RMSNormFwdOp"', '"RMSNormFwOp"'))
        shown = run("list").stdout
        assert "note: registers for 'RMSNormFwOp', an op that this release does not have" in shown
        assert "did you mean 'RMSNormFwdOp'?" in shown

    def test_what_a_backend_prints_does_not_spoil_json(self, site: Any) -> None:
        site.backend("acme", "print('hello')\n" + dedent(ROWS))
        done = run("list", "--json")
        assert json.loads(done.stdout)["backends"]
        assert "hello" in done.stderr

    def test_it_answers_where_a_load_makes_an_error_of_what_it_shows(
        self, site: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def strict() -> None:
            load()
            raise BackendError("a backend failed, and that is an error here")

        site.backend("acme", ROWS)
        monkeypatch.setattr(environment, "status", strict)
        assert "acme:row" in run("list").stdout
        assert run("doctor").exit_code == 0

    def test_a_variable_that_mixes_names_is_a_sentence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TILEOPS_BACKENDS", "acme,-zeta")
        done = run("list")
        assert done.exit_code == 2
        assert "TILEOPS_BACKENDS='acme,-zeta' mixes names" in done.stderr

    def test_without_a_backend_it_says_which_to_install(self) -> None:
        assert "pip install tileops-backend-example" in run("list").stdout


# ------------------------------------------------------------------------------------------- doctor: a project


@pytest.fixture
def project(tmp_path: Path) -> Any:
    """Writes a project without a fault, but for what is replaced in its files."""

    def write(pyproject: tuple[str, str] = ("", ""), source: str = ROWS, name: str = "__init__", **more: str) -> Path:
        package = tmp_path / "acme" / "src" / "tileops_backend_acme"
        package.mkdir(parents=True)
        (tmp_path / "acme" / "pyproject.toml").write_text(dedent(PYPROJECT).replace(*pyproject))
        for module, text in {name: source, **more}.items():
            (package / f"{module}.py").write_text(dedent(text))
        (package / "py.typed").touch()
        return tmp_path / "acme"

    return write


def findings(place: Any) -> list[dict[str, str]]:
    done = run("doctor", place, "--json")
    found = json.loads(done.stdout)["findings"]
    assert done.exit_code == any(one["severity"] == "error" for one in found)
    return found


def test_a_project_without_a_fault_has_nothing_to_mend(project: Any) -> None:
    done = run("doctor", project())
    assert done.exit_code == 0
    assert "nothing to mend" in done.stdout


def test_the_example_has_nothing_to_mend() -> None:
    assert findings("tileops-backend-example") == []


PROJECT_FAULTS = {
    "a misspelt group": ('"tileops.backends"', '"tileops.backend"', "error", "nobody reads the entry-point group 'tileops.backend'"),
    "an unquoted group": ('"tileops.backends"', "tileops.backends", "error", "as a group in a group"),
    "no group": ('entry-points."tileops.backends"', "scripts", "error", "it is no backend"),
    "another name": ("tileops-backend-acme", "acme-kernels", "warning", "so is the backend"),
    "our own name": ("tileops-backend-acme", "tileops-backend-local", "error", "uses itself"),
    "a missing module": ('"tileops_backend_acme"', '"tileops_backend_amce"', "error", "has no module 'tileops_backend_amce'"),
    "a missing attribute": ('_acme"', '_acme:rwo"', "error", "defines no 'rwo'"),
    "no reference": ('"tileops_backend_acme"', '"tileops backend"', "error", "no reference to a module"),
    "the other project": ("tileops-core>", "tileops>", "error", "the wheel of another project"),
    "no core": ('"tileops-core>=0.1,<0.2"', "", "error", "it does not require tileops-core"),
    "an old range": (">=0.1,<0.2", "<0.0.1", "error", "not loaded here"),
    "an open range": (">=0.1,<0.2", ">=0.1", "warning", "takes every later release"),
    "torch to build": ('["hatchling"]', '["hatchling", "torch>=2"]', "warning", "building it requires torch"),
    "a compiler to build": ('["hatchling"]', '["hatchling", "tilelang"]', "warning", "building it requires tilelang"),
    "dynamic dependencies": ("dependencies = [", 'dynamic = ["dependencies"]\nkeywords = [', "hint", "only known when"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "severity", "said"), PROJECT_FAULTS.values(), ids=PROJECT_FAULTS)
def test_a_fault_of_the_metadata_is_found(project: Any, old: str, new: str, severity: str, said: str) -> None:
    found = [one for one in findings(project((old, new))) if said in one["what"]]
    assert [one["severity"] for one in found] == [severity]
    assert found[0]["mend"]


SOURCE_FAULTS = {
    "a private module": ("import tileops.backend.loading", "error", "tileops.backend.loading is private"),
    "a private name": ("import tileops; tileops._HOME", "error", "tileops._HOME is private"),
    "a module written out": ("import tileops; tileops.backend.loading.load()", "error", "tileops.backend.loading is private"),
    "a private import": ("from tileops.ops import op_base", "error", "tileops.ops.op_base is private"),
    "a name of a private module": ("from tileops.ops.op_base import Op", "error", "tileops.ops.op_base.Op is private"),
    "a module that is not there": ("from tileops.kernels.layernorm import LayerNorm", "error", "did you mean 'tileops.kernels.layer_norm'?"),
    "a name that is not there": ("from tileops.backend import hookimp", "error", "did you mean 'hookimpl'?"),
    "a compiler": ("import tilelang", "error", "tilelang is imported when the backend is loaded"),
    "a compiler in a condition": ("try:\n    import triton.language as tl\nexcept ImportError:\n    pass", "error", "triton is imported"),
    "an unknown op": ("OPS = ['LayerNromFwdOp']", "warning", "no op 'LayerNromFwdOp'; did you mean 'LayerNormFwdOp'?"),
    "an unknown key": ("class A(Row):\n    preferred_over = frozenset({'held_rwo'})", "warning", "did you mean 'held_row'?"),
    "no key": ("def f(register_kernel_type):\n    register_kernel_type('RMSNormFwdOp', 'Row', Row)", "error", "'Row' is no key"),
    "an unknown hook": ("@hookimpl\ndef tileops_register_kernel(register_kernel_type): ...", "error", "no hook is called 'tileops_register_kernel'"),
    "an unmarked hook": ("def tileops_register_targets(register_kernel_builder): ...", "error", "never called"),
    "a misspelt argument": ("@hookimpl\ndef tileops_register_targets(register_kernel_bilder): ...", "error", "takes 'register_kernel_bilder'"),
    "no devices": ("class A(RMSNorm):\n    def forward(self, x, weight): ...", "hint", "A states no devices"),
    "no Python": ("def (:", "error", "it is no Python"),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "severity", "said"), SOURCE_FAULTS.values(), ids=SOURCE_FAULTS)
def test_a_fault_of_the_source_is_found_where_it_stands(project: Any, lines: str, severity: str, said: str) -> None:
    source = dedent(ROWS) + "\nfrom tileops_backend_acme import more\n"
    found = [one for one in findings(project(source=source, more=lines)) if said in one["what"]]
    assert [one["severity"] for one in found] == [severity]
    assert found[0]["where"].startswith("tileops_backend_acme/more.py")


NO_FAULTS = {
    "a compiler where it is needed": "def build():\n    import tilelang",
    "a compiler for type checkers": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tilelang",
    "an op of its own": "class AcmeOp: ...\nOPS = ['AcmeOp']",
    "a key of its own": "class A(Row):\n    preferred_over = frozenset({'row', 'zeta:row', 'in-tree'})",
    "an architecture": "class A(RMSNorm):\n    supported_archs = frozenset({90})\n    def forward(self, x, weight): ...",
    "devices of its base": "class A(Row): ...",
    "an op's own module": "import tileops.ops.norm.layer_norm\ntileops.ops.norm.layer_norm.LayerNormFwdOp",
    "a relative import": "from . import __init__ as me\nfrom .more import me as again",
}


@pytest.mark.parametrize("lines", NO_FAULTS.values(), ids=NO_FAULTS)
def test_what_is_as_it_should_be_is_not_found(project: Any, lines: str) -> None:
    source = dedent(ROWS) + "\nfrom tileops_backend_acme import more\n"
    more = f"from tileops.kernels.rms_norm import RMSNorm\nfrom tileops_backend_acme import Row\n{lines}"
    assert findings(project(source=source, more=more)) == []


def test_a_compiler_that_a_module_imports_which_nothing_imports_at_load_is_as_it_should_be(project: Any) -> None:
    source = dedent(ROWS) + "\ndef build():\n    from tileops_backend_acme import program\n"
    assert findings(project(source=source, program="import tilelang")) == []


def test_a_backend_that_registers_nothing_is_found(project: Any) -> None:
    (found,) = findings(project(source="answer = 42\n"))
    assert found["what"] == "nothing in it registers anything"


def test_a_package_without_the_mark_of_types_gets_a_hint(project: Any) -> None:
    folder = project()
    (folder / "src" / "tileops_backend_acme" / "py.typed").unlink()
    (found,) = findings(folder)
    assert (found["severity"], found["mend"]) == ("hint", "add an empty file tileops_backend_acme/py.typed")


def test_nothing_of_the_project_is_run(project: Any) -> None:
    source = dedent(ROWS) + "\nraise SystemExit('was run')\n"
    assert findings(project(source=source)) == []


def test_findings_are_in_order_of_severity_file_and_line(project: Any) -> None:
    source = dedent(ROWS) + "\n" * 90 + "import tileops.backend.loading\nimport tileops.backend.records\n"
    found = findings(project((">=0.1,<0.2", ">=0.1"), source="import tileops.backend.hooks\n" + source))
    lines = [int(one["where"].rpartition(":")[2]) for one in found[:3]]
    assert lines == sorted(lines)
    assert [one["severity"] for one in found] == ["error", "error", "error", "warning"]


# ------------------------------------------------------------------------------- doctor: a wheel, an installed one


def wheel(folder: Path, metadata: str, entry_points: str, source: str) -> Path:
    path = folder / "tileops_backend_acme-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        info = "tileops_backend_acme-1.0.dist-info"
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tileops-backend-acme\nVersion: 1.0\n{metadata}"
        )
        file.writestr(f"{info}/entry_points.txt", entry_points)
        file.writestr("tileops_backend_acme/__init__.py", dedent(source))
        file.writestr("tileops_backend_acme/py.typed", "")
    return path


def test_a_wheel_is_examined_like_a_project(tmp_path: Path) -> None:
    good = wheel(
        tmp_path, "Requires-Dist: tileops-core<0.2,>=0.1\n", "[tileops.backends]\na = tileops_backend_acme\n", ROWS
    )
    assert findings(good) == []
    bad = wheel(
        tmp_path, "Requires-Dist: tileops\n", "[tileops.backend]\na = tileops_backend_acme\n", "import triton\n"
    )
    whats = " ".join(one["what"] for one in findings(bad))
    for said in ("nobody reads", "the wheel of another project", "does not require tileops-core", "triton is imported"):
        assert said in whats


@pytest.mark.usefixtures("fresh")
def test_an_installed_backend_is_examined_by_name_and_not_imported(site: Any) -> None:
    site.module("plug_acme", dedent(ROWS) + "raise SystemExit('was run')\nfrom tileops.ops.op_base import Op\n")
    folder = site.distribution("tileops-backend-acme", "[tileops.backends]\nacme = plug_acme\n")
    folder.joinpath("RECORD").write_text("plug_acme.py,,\n")
    for name in ("acme", "tileops-backend-acme", "Tileops_Backend.Acme"):
        whats = [one["what"] for one in findings(name)]
        assert "it does not require tileops-core" in whats
        assert any("tileops.ops.op_base.Op is private" in what for what in whats)


@pytest.mark.usefixtures("fresh")
def test_an_editable_install_is_compared_with_its_project(site: Any, project: Any) -> None:
    source = project()
    folder = site.distribution("tileops-backend-acme", "[tileops.backends]\nacme = tileops_backend_acme\n")
    direct = {"url": source.as_uri(), "dir_info": {"editable": True}}
    folder.joinpath("direct_url.json").write_text(json.dumps(direct))
    assert findings("acme") == []
    folder.joinpath("entry_points.txt").write_text("[tileops.backends]\nacme = older\n")
    assert findings("acme")[0]["what"] == "the installed entry points are older than this file"


@pytest.mark.parametrize(
    ("write", "said"),
    [
        ({}, "has no pyproject.toml"),
        ({"pyproject.toml": "[project"}, "cannot be read"),
        ({"pyproject.toml": "[tool.poetry]\nname = 'acme'"}, "does not state its entry points under [project]"),
        ({"pyproject.toml": '[project]\nname = "a"\ndynamic = ["entry-points"]'}, "build a wheel and give that"),
    ],
)
def test_a_folder_that_cannot_be_examined_is_a_sentence(tmp_path: Path, write: dict[str, str], said: str) -> None:
    for name, text in write.items():
        (tmp_path / name).write_text(text)
    done = run("doctor", tmp_path)
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_is_no_backend_at_all_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.whl").write_text("no zip")
    for place, said in ((tmp_path / "broken.whl", "cannot be read as a wheel"), ("nowhere", "no installed backend")):
        done = run("doctor", place)
        assert done.exit_code == 2
        assert said in done.stderr


# -------------------------------------------------------------------------------------- doctor: the environment


def distribution(name: str, folder: str = "/site", *, owns: bool = False, foreign: bool = False) -> Distribution:
    return Distribution(name, "1.0", f"{folder}/{name}.dist-info", owns, foreign)


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ([distribution("tileops-core"), distribution("tileops", owns=True)], "has overwritten files of tileops-core"),
        ([distribution("tileops-core"), distribution("tileops")], "has the package name of tileops-core"),
        ([distribution("tileops-core"), distribution("acme", owns=True)], "has overwritten files of tileops-core"),
        ([distribution("tileops-core", "/one"), distribution("tileops-core", "/two")], "it is installed 2 times"),
        ([distribution("tileops-core", "/one", owns=True)], "is imported, which it did not install"),
        ([distribution("tileops-core"), distribution("acme")], None),
    ],
)
def test_the_package_belongs_to_one_distribution(installed: list[Distribution], said: str | None) -> None:
    whats = [found.what for found in check_owners(installed)]
    assert len(whats) == (said is not None)
    assert all(said is not None and said in what for what in whats)


def test_a_distribution_that_requires_the_other_projects_wheel_is_found() -> None:
    (found,) = check_requirements([distribution("tileops-core"), distribution("vendor", foreign=True)])
    assert found.where == "vendor 1.0"
    assert "pip install --no-deps vendor" in found.mend


@pytest.mark.usefixtures("fresh")
def test_owners_and_requirements_are_read_from_real_metadata(site: Any) -> None:
    owner = site.distribution("tileops", "")
    owner.joinpath("RECORD").write_text("tileops/__init__.py,sha256=x,1\n")
    needs = site.distribution("vendor", "")
    with needs.joinpath("METADATA").open("a") as file:
        file.write("Requires-Dist: tileops (>=0.1)\nRequires-Dist: torch; extra == 'x'\n")
    site.distribution("broken", "").joinpath("METADATA").write_bytes(b"\xff\xfe")
    found = findings_of_environment()
    assert found["tileops 1.0"]["severity"] == "error"
    assert "requires 'tileops'" in found["vendor 1.0"]["what"]


def findings_of_environment() -> dict[str, dict[str, str]]:
    done = run("doctor", "--json")
    found = json.loads(done.stdout)["findings"]
    assert done.exit_code == any(one["severity"] == "error" for one in found)
    return {one["where"]: one for one in found}


@pytest.mark.usefixtures("fresh")
def test_a_backend_that_failed_is_an_error_and_one_that_is_empty_a_warning(site: Any) -> None:
    site.backend("acme", "raise OSError('no licence')\n")
    site.backend("zeta", "answer = 42\n")
    site.backend("mid", ROWS.replace('"RMSNormFwdOp"', '"RMSNormFwOp"'))
    found = findings_of_environment()
    assert found["acme (tileops-backend-acme 1.0)"]["severity"] == "error"
    assert "OSError: no licence" in found["acme (tileops-backend-acme 1.0)"]["what"]
    assert "TILEOPS_BACKENDS=-acme" in found["acme (tileops-backend-acme 1.0)"]["mend"]
    assert found["zeta (tileops-backend-zeta 1.0)"]["severity"] == "warning"
    assert "did you mean 'RMSNormFwdOp'?" in found["mid (tileops-backend-mid 1.0)"]["what"]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("text", "severity", "said"),
    [
        ("acne", "warning", "did you mean 'acme'?"),
        ("acme,-zeta", "error", "mixes names"),
        ("acme", None, ""),
        ("", None, ""),
    ],
)
def test_the_variable_is_examined(
    site: Any, monkeypatch: pytest.MonkeyPatch, text: str, severity: str | None, said: str
) -> None:
    site.backend("acme", ROWS)
    monkeypatch.setenv("TILEOPS_BACKENDS", text)
    found = findings_of_environment().get("TILEOPS_BACKENDS")
    assert (None if found is None else found["severity"]) == severity
    assert found is None or said in found["what"]


def test_this_environment_is_in_order() -> None:
    done = run("doctor")
    assert done.exit_code == 0, done.stdout


def test_the_place_of_a_project_is_what_was_given(project: Any) -> None:
    folder = project()
    assert read_project(os.fspath(folder)).title == f"tileops-backend-acme 1.0 ({folder})"


def test_a_loaded_backend_with_a_note_of_its_own_is_in_order() -> None:
    assert list(check_record(BackendRecord("acme", notes=("the compiled kernel is left out: no acme-cc",)))) == []
