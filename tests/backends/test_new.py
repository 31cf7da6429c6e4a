"""`tileops backends new`: the project that it writes is the example, renamed, whole or cut down to one op."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tileops.backend import State, load
from tileops.backend.registration import registry
from tileops.catalogue import IN_TREE_OPS
from tileops.cli import app
from tileops.cli.doctor.projects import toml
from tileops.cli.new import template_texts
from tileops.cli.pruning import pruned, without, without_unused_imports
from tileops.cli.template import renamed, template_files, template_folder
from typer.testing import CliRunner

VARIANTS = {"all": [], "whole op": ["--whole-op"], "whole RMS norm": ["--whole-op", "--op", "RMSNormFwdOp"]} | {
    op: ["--op", op] for op in IN_TREE_OPS
}


def run(*words: Any) -> Any:
    return CliRunner().invoke(app, ["backends", "new", *map(str, words)])


def made(tmp_path: Path, *words: str, name: str = "my-acme") -> Path:
    done = run(name, *words, "--into", tmp_path)
    assert done.exit_code == 0, done.output
    return tmp_path / f"tileops-backend-{name}"


def texts(folder: Path) -> dict[str, str]:
    return {name: path.read_text() for name, path in template_files(folder).items()}


# --------------------------------------------------------------------------------------------------- the whole


def test_without_options_it_is_the_example_with_another_name(tmp_path: Path) -> None:
    written = texts(made(tmp_path, name="acme"))
    assert written["LICENSE"] == template_texts()["LICENSE"]
    back = {path.replace("acme", "example"): text.replace("acme", "example") for path, text in written.items()}
    assert back == template_texts()


def test_the_project_has_all_that_a_published_backend_needs(tmp_path: Path) -> None:
    folder = made(tmp_path)
    for path in ("pyproject.toml", "README.md", "LICENSE", ".gitignore", ".github/workflows/tests.yml",
                 "src/tileops_backend_my_acme/__init__.py", "src/tileops_backend_my_acme/py.typed"):  # fmt: skip
        assert (folder / path).is_file(), path
    assert list(folder.glob("tests/test_*.py"))
    project = toml.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == "tileops-backend-my-acme"
    assert project["entry-points"]["tileops.backends"] == {"my-acme": "tileops_backend_my_acme"}


def test_json_names_the_project_and_its_files(tmp_path: Path) -> None:
    told = json.loads(run("acme", "--into", tmp_path, "--json").stdout)
    assert told["project"] == str(tmp_path / "tileops-backend-acme")
    assert told["files"] == sorted(texts(Path(told["project"])))


@pytest.mark.parametrize("words", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_is_clean_and_has_nothing_to_mend(tmp_path: Path, words: list[str]) -> None:
    folder = made(tmp_path, *words)
    assert not [path for path, text in texts(folder).items() if path != "LICENSE" and "example" in path + text]
    for check in (["check", "--isolated", "--select", "E9,F,I001", "--line-length", "120"],
                  ["format", "--isolated", "--check", "--line-length", "120"]):  # fmt: skip
        done = subprocess.run([sys.executable, "-m", "ruff", *check, "--no-cache", folder], capture_output=True, text=True, check=False)  # fmt: skip
        assert done.returncode == 0, done.stdout
    examined = CliRunner().invoke(app, ["backends", "doctor", str(folder)])
    assert "nothing to mend" in examined.stdout, examined.stdout


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("words", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_registers_what_was_asked_for_and_nothing_else(
    site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    folder = made(tmp_path, *words)
    site.distribution("tileops-backend-my-acme", "[tileops.backends]\nmy-acme = tileops_backend_my_acme\n")
    site.modules.add("tileops_backend_my_acme")
    monkeypatch.syspath_prepend(folder / "src")
    load()
    record = registry().record_of("my-acme")
    assert record is not None
    assert record.state is State.LOADED, record.traceback
    example = registry().record_of("example")
    assert example is not None
    wanted = [line.replace("example", "my-acme") for line in example.registered]
    if "--whole-op" in words:
        wanted = [line for line in wanted if "target" in line]
    elif words:
        wanted = [line for line in wanted if "target" not in line]
    if "--op" in words:
        wanted = [line for line in wanted if line.startswith(words[-1])]
    assert list(record.registered) == wanted
    assert wanted


@pytest.mark.parametrize("op", IN_TREE_OPS)
def test_cut_down_to_one_op_nothing_of_another_is_left(tmp_path: Path, op: str) -> None:
    others = [other for other in IN_TREE_OPS if other != op]
    source = {path: text for path, text in texts(made(tmp_path, "--op", op)).items() if path.endswith((".py", ".md"))}
    of_another = re.compile(rf"\b({'|'.join(others)})\b")
    assert not [path for path, text in source.items() if of_another.search(text)]
    rows = [line.split("`")[1] for line in source["README.md"].splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(
        Path(path).name for path in source if path.startswith("src/") and "common" not in path
    )


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a b"], "'a b' is no name of a backend; write letters, digits and hyphens"),
        (["../up"], "is no name of a backend"),
        (["1acme"], "is no name of a backend"),
        (["local"], "'local' is a name that tileops uses itself"),
        (["in-tree"], "'in-tree' is a name that tileops uses itself"),
        (["example"], "'example' is a name that tileops uses itself"),
        (["taken"], "tileops-backend-taken exists already; choose another name, or another folder with --into"),
        (["acme", "--op", "LayerNromFwdOp"], "no op is called 'LayerNromFwdOp'; known ops: "),
        (["acme", "--whole-op", "--op", "BatchNormFwdOp"], "has no target for BatchNormFwdOp; it has one for: RMSNormFwdOp"),
        (["acme", "--into", "nowhere"], "cannot be written: No such file or directory"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_one_sentence_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    (tmp_path / "tileops-backend-taken").mkdir()
    monkeypatch.chdir(tmp_path)
    done = run(*words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["tileops-backend-taken"]


@pytest.mark.parametrize("text", ["tileops-backend-acme", "Acme", "tileops_backend.ACME"])
def test_a_name_may_be_written_as_pip_would_take_it(tmp_path: Path, text: str) -> None:
    assert run(text, "--into", tmp_path).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["tileops-backend-acme"]


# ------------------------------------------------------------------------------------------------ the template


def test_the_template_is_the_example_where_it_is_edited() -> None:
    folder = template_folder()
    assert folder is not None
    assert folder.name == "tileops-backend-example"
    assert {"pyproject.toml", "README.md", "LICENSE"} <= set(template_files(folder))
    assert not [name for name in template_files(folder) if "__pycache__" in name]


@pytest.mark.parametrize("path", [path for path in template_texts() if path.endswith(".py")])
def test_the_name_of_the_example_is_never_an_identifier_of_its_own(path: str) -> None:
    """A backend's name may have hyphens, which an identifier cannot have."""
    tokens = tokenize.generate_tokens(io.StringIO(template_texts()[path]).readline)
    assert not [token.start for token in tokens if token.type == tokenize.NAME and token.string == "example"]


@pytest.mark.parametrize("path", [path for path in template_texts() if path != "LICENSE"])
def test_the_word_example_in_the_example_means_its_name(path: str) -> None:
    text = template_texts()[path]
    for phrase in ("for example", "an example", "example of", "examples", "Example", "example that"):
        assert phrase not in text


@given(st.from_regex(r"[a-z][a-z0-9]*(-[a-z0-9]+){0,2}", fullmatch=True))
def test_renaming_takes_the_form_that_the_place_needs(name: str) -> None:
    module = name.replace("-", "_")
    assert renamed("tileops_backend_example.kernels", name) == f"tileops_backend_{module}.kernels"
    assert renamed("tests/test_example.py", name) == f"tests/test_{module}.py"
    assert renamed('"example:row" tileops-backend-example', name) == f'"{name}:row" tileops-backend-{name}'


# ------------------------------------------------------------------------------------------------- cutting down


def test_a_statement_goes_with_the_block_that_it_would_leave_empty() -> None:
    source = "def register(add):\n    add(1)\n    if ready():\n        add(Old)\n    else:\n        warn()\n"
    assert without(source, frozenset({"Old"}))[0] == "def register(add):\n    add(1)\n"


def test_what_a_decorated_function_defined_is_told() -> None:
    source = "import hook\n\n\n# About old.\n@hook\ndef old():\n    '''Old.'''\n\n\ndef new():\n    '''Not old.'''\n"
    text, lost = without(source, frozenset({"old"}))
    assert text == "import hook\n\n\ndef new():\n    '''Not old.'''\n"
    assert lost == {"old"}


def test_of_an_import_only_the_names_in_use_stay() -> None:
    source = "from __future__ import annotations\n\nimport os\nfrom a import (\n    b,\n    c,\n)\n\nb()\n"
    assert without_unused_imports(source) == "from __future__ import annotations\n\nfrom a import b\n\nb()\n"


def test_a_module_that_nothing_imports_any_more_goes_also_one_imported_late() -> None:
    modules = {
        "p": "from p.a import a\nfrom p.b import b\n\nUSED = [a]\nb(1)\n",
        "p.a": "def a():\n    from p.late import late\n\n    return late\n",
        "p.b": "from p.only_b import x\n\n\ndef b(value):\n    return x\n",
        "p.late": "late = 1\n",
        "p.only_b": "x = 1\n",
    }
    kept, gone = pruned(modules, "p", {"b"})
    assert sorted(kept) == ["p", "p.a", "p.late"]
    assert kept["p"] == "from p.a import a\n\nUSED = [a]\n"
    assert {"b", "x", "p.b", "p.only_b"} <= gone
