"""Wheels, installed by pip into environments of their own, and a user's script that never changes.

Our distributions are built here. Everything else is shared with the environment that runs this, by links: its
own installs of ours are left out, and no index is asked.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from textwrap import dedent

import pytest
from tileops.cli.template import template_files

ROOT = Path(__file__).parents[2]

SCRIPT = """
    import torch
    from tileops.norm import LayerNormFwdOp, RMSNormFwdOp

    x = torch.ones(2, 64)
    for op in (LayerNormFwdOp((64,)), RMSNormFwdOp((64,), target="zeta")):
        try:
            print(f"{op(x)[0, 0]:g}", op.explain(x).key)
        except Exception as error:
            print(*str(error).splitlines(), sep=" | ")
"""
"""What the user of an op runs, whatever is installed. It prints one line for each op."""

KERNEL = """
    from tileops.backend import hookimpl
    from tileops.kernels.layer_norm import LayerNorm

    class Row(LayerNorm):
        devices = frozenset({"cpu"})

        def forward(self, x, weight, bias):
            return x + ADDED

    @hookimpl
    def tileops_register_kernels(register_kernel_type):
        register_kernel_type("LayerNormFwdOp", "row", Row)
"""

TARGET = """
    from tileops.backend import hookimpl

    def build_rms_norm(x, weight, *, normalized_shape, eps):
        return lambda x, weight: x + 6

    @hookimpl
    def tileops_register_targets(register_kernel_builder):
        register_kernel_builder("RMSNormFwdOp", "zeta", build_rms_norm)
"""

NO_KERNEL = "in-tree kernels do not run on cpu"


class Environment:
    """A virtual environment with tileops-core from its wheel, in which pip installs what a test asks for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "env" / "bin" / "python"

    def run(self, *words: str | Path, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run Python with these words, beside no source of ours."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TILEOPS"))}
        done = subprocess.run([self.python, *words], cwd=self.folder, env=inherited | environment, capture_output=True,
                              text=True, timeout=300, check=False)  # fmt: skip
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def pip(self, *words: str | Path) -> None:
        """Run pip on this environment, from the one that runs this."""
        command = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            self.python,
            "--disable-pip-version-check",
            "--quiet",
            *words,
        ]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def install(self, *what: str | Path) -> None:
        """Install wheels or projects. No index is asked, and no requirement."""
        self.pip("install", "--no-index", "--no-deps", "--no-build-isolation", "--no-compile", *what)

    def script(self, **environment: str) -> list[str]:
        """The lines that the user's script prints, each time of a new process."""
        return self.run("-W", "ignore", "-c", dedent(SCRIPT), **environment).stdout.splitlines()

    def wheel(self, name: str, source: str, version: str = "1.0") -> Path:
        """A vendor's wheel `tileops-backend-NAME` with one module."""
        stem, module = f"tileops_backend_{name}-{version}", f"tileops_backend_{name}"
        files = {
            f"{module}.py": dedent(source),
            f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: tileops-backend-{name}\nVersion: {version}\n"
            "Requires-Dist: tileops-core<0.2,>=0.1\n",
            f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{stem}.dist-info/entry_points.txt": f"[tileops.backends]\n{name} = {module}\n",
        }
        path = self.folder / f"{stem}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as file:
            for inside, text in files.items():
                file.writestr(inside, text)
            file.writestr(f"{stem}.dist-info/RECORD", "".join(f"{inside},,\n" for inside in files))
        return path


def build(project: str, folder: Path) -> Path:
    """The wheel of one of our distributions."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / project]
    subprocess.run(command, cwd=ROOT / project, check=True, capture_output=True)
    return next((folder / project).glob("*.whl"))


def link_packages(folder: Path) -> None:
    """Link everything that this interpreter can import and that pip has installed, but for ours."""
    folder.mkdir()
    for place in map(Path, sys.path):
        if place.name in ("site-packages", "dist-packages"):
            for path in place.iterdir():
                ours = "tileops" in path.name or path.suffix == ".pth"
                if not ours and not (folder / path.name).exists():
                    (folder / path.name).symlink_to(path)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both our distributions, built."""
    folder = tmp_path_factory.mktemp("dist")
    return {project: build(project, folder) for project in ("tileops-core", "tileops-backend-example")}


@pytest.fixture(scope="module")
def first(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The environment that those of the tests are copies of."""
    folder = tmp_path_factory.mktemp("first")
    made = Environment(folder)
    venv.EnvBuilder(symlinks=True).create(folder / "env")
    link_packages(folder / "shared")
    packages = next((folder / "env" / "lib").glob("python*")) / "site-packages"
    (packages / "shared.pth").write_text(f"{folder / 'shared'}\n")
    made.install(wheels["tileops-core"])
    return made


@pytest.fixture
def environment(first: Environment, tmp_path: Path) -> Environment:
    """An environment with tileops-core and no backend."""
    shutil.copytree(first.folder / "env", tmp_path / "env", symlinks=True)
    return Environment(tmp_path)


# ---------------------------------------------------------------------------------------------------- vendors


def test_a_vendors_kernel_comes_is_upgraded_and_goes(environment: Environment) -> None:
    environment.install(environment.wheel("acme", KERNEL.replace("ADDED", "1")))
    assert environment.script()[0] == "2 acme:row"
    environment.install("--upgrade", environment.wheel("acme", KERNEL.replace("ADDED", "10"), "1.1"))
    assert environment.script()[0] == "11 acme:row"
    environment.pip("uninstall", "--yes", "tileops-backend-acme")
    assert environment.script()[0].startswith(NO_KERNEL)


def test_a_vendors_target_takes_an_op_over_for_whoever_names_it(environment: Environment) -> None:
    assert environment.script()[1].startswith("RMSNormFwdOp: no target is called 'zeta'")
    environment.install(environment.wheel("zeta", TARGET))
    kernels, target = environment.script()
    assert kernels.startswith(NO_KERNEL)
    assert target.startswith("7")


def test_two_vendors_that_overlap_are_named_until_the_user_says_which(environment: Environment) -> None:
    environment.install(*(environment.wheel(name, KERNEL.replace("ADDED", "1")) for name in ("acme", "zeta")))
    said = environment.script()[0]
    assert "dispatch is ambiguous" in said
    assert "tileops-backend-acme 1.0" in said
    assert "tileops-backend-zeta 1.0" in said
    assert 'tileops.set_default_selection(prefer="acme")' in said
    assert environment.script(TILEOPS_BACKENDS="-acme")[0] == "2 zeta:row"


def test_a_vendor_that_breaks_costs_the_other_nothing(environment: Environment) -> None:
    broken = environment.wheel("broken", KERNEL + "    import libbroken\n")
    exits = environment.wheel("exits", "import sys\nsys.exit(3)\n")
    environment.install(broken, exits, environment.wheel("acme", KERNEL.replace("ADDED", "1")))
    assert environment.script()[0] == "2 acme:row"
    listed = environment.run("-m", "tileops", "backends", "list", "--json")
    told = {one["name"]: one for one in json.loads(listed.stdout)["backends"]}
    assert {name: one["state"] for name, one in told.items()} == {
        "acme": "loaded",
        "broken": "failed",
        "exits": "failed",
    }
    assert "libbroken" in told["broken"]["reason"]
    examined = environment.run("-m", "tileops", "backends", "doctor", check=False)
    assert examined.returncode == 1
    assert "leave it out with TILEOPS_BACKENDS=-broken" in examined.stdout


# ------------------------------------------------------------------------------------------ our own, and new ones


@pytest.mark.parametrize("beside_the_example", [False, True])
def test_a_new_project_is_installed_and_its_tests_pass(
    environment: Environment, wheels: dict[str, Path], beside_the_example: bool
) -> None:
    if beside_the_example:
        environment.install(wheels["tileops-backend-example"])
    environment.run("-m", "tileops", "backends", "new", "acme", "--op", "RMSNormFwdOp")
    environment.install("./tileops-backend-acme")
    done = environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tileops-backend-acme")
    assert " passed" in done.stdout
    assert "failed" not in done.stdout


def test_the_wheel_carries_the_template_that_is_edited(wheels: dict[str, Path]) -> None:
    wheel = zipfile.ZipFile(wheels["tileops-core"])
    names = [name for name in wheel.namelist() if name.startswith("tileops/cli/backend_template/")]
    carried = {name.removeprefix("tileops/cli/backend_template/"): wheel.read(name) for name in names}
    edited = {name: path.read_bytes() for name, path in template_files(ROOT / "tileops-backend-example").items()}
    assert carried == edited
    assert edited
