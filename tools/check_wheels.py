"""Build both wheels, install them where no source is, and run the tests against them.

The empty environment shares torch and everything else with the one that runs this, through one line in a .pth
file: what a .pth file of the shared folder says (the editable installs) does not count there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECTS = ("tileops-core", "tileops-backend-example")
TESTS = ("tests/core", "tests/ops", "tileops-backend-example/tests")


def main() -> None:
    """Build, look into the wheels, install, test."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wheels = [build(name, folder / "dist") for name in PROJECTS]
        for wheel in wheels:
            check_contents(wheel)
        python = environment(folder / "env", wheels)
        check_origin(python, folder)
        run_tests(python, folder / "project")


def build(name: str, dist: Path) -> Path:
    """The wheel of one project; its sdist is built on the way, so that both are known to be complete."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(dist / name)], cwd=ROOT / name, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    return next((dist / name).glob("*.whl"))


def check_contents(wheel: Path) -> None:
    """Each wheel is typed, licensed, and holds no tests but the kit."""
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in ("py.typed", "LICENSE", "entry_points.txt"):
        if not any(name.endswith(wanted) for name in names):
            sys.exit(f"{wheel.name} has no {wanted}")
    stray = [name for name in names if "test" in name.lower() and not name.startswith("tileops/testing/")]
    if stray:
        sys.exit(f"{wheel.name} holds {', '.join(stray)}")


def environment(folder: Path, wheels: list[Path]) -> Path:
    """A new environment with only the wheels in it, and everything else shared."""
    venv.EnvBuilder(with_pip=True).create(folder)
    python = folder / "bin" / "python"
    arguments = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", *map(str, wheels)]
    subprocess.run([python, "-m", "pip", "install", *arguments], check=True)
    shared = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *_base_packages()])
    own = next((folder / "lib").glob("python*")) / "site-packages"
    (own / "shared.pth").write_text("\n".join(shared) + "\n")
    return python


def _base_packages() -> list[str]:
    """The base interpreter's packages, where this environment shares them too."""
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


def check_origin(python: Path, folder: Path) -> None:
    """What is imported is what was installed."""
    code = "import tileops, tileops_backend_example as e; print(tileops.__file__); print(e.__file__)"
    printed = subprocess.run([python, "-c", code], cwd=folder, check=True, capture_output=True, text=True).stdout
    if any(not line.startswith(str(folder / "env")) for line in printed.split()):
        sys.exit(f"the wheels are not what is imported: {printed}")


def run_tests(python: Path, folder: Path) -> None:
    """Run the tests on a copy that has no source beside it."""
    for path in TESTS:
        shutil.copytree(ROOT / path, folder / path, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(ROOT / path, folder / path)
    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([python, "-m", "pytest", "-q", *TESTS], cwd=folder, check=True, env=environment)


if __name__ == "__main__":
    main()
