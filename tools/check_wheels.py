"""Build both wheels, install them where no source is, run the tests against them, and begin a backend with them.

Each wheel is built from its sdist, so that both are known to be complete.

The empty environment shares torch and everything else with the one that runs this, through one line in a .pth
file: what a .pth file of the shared folder says (the editable installs) does not count there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECTS = ("tileops-core", "tileops-backend-example")
TEMPLATE = "tileops/cli/backend_template/"
WORKERS = ("-n", "auto", "--maxprocesses", "8", "--dist", "loadfile")
TESTS = ("tests/core", "tests/ops", "tileops-backend-example/tests")


def main() -> None:
    """Build, look into the wheels, install, begin a backend, test."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wheels = [build(name, folder / "dist") for name in PROJECTS]
        for wheel in wheels:
            check_contents(wheel)
        python = environment(folder / "env", wheels)
        check_origin(python, folder)
        check_new_backend(python, folder)
        run_tests(python, folder / "project")


def build(name: str, dist: Path) -> Path:
    """The wheel of one project, from its sdist."""
    sdist = hatchling("sdist", ROOT / name, dist / name)
    with tarfile.open(sdist) as archive:
        archive.extractall(dist / "sources", filter="data")
    return hatchling("wheel", dist / "sources" / sdist.name.removesuffix(".tar.gz"), dist / name)


def hatchling(target: str, project: Path, dist: Path) -> Path:
    """What hatchling builds from a project."""
    before = set(dist.glob("*"))
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(dist)], cwd=project, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    (built,) = set(dist.glob("*")) - before
    return built


def check_contents(wheel: Path) -> None:
    """Each wheel is typed, licensed, and holds no tests but the kit and those of the template."""
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in ("py.typed", "LICENSE", "entry_points.txt"):
        if not any(name.endswith(wanted) for name in names):
            sys.exit(f"{wheel.name} has no {wanted}")
    kept = (TEMPLATE, "tileops/testing/")
    stray = [name for name in names if "test" in name.lower() and not any(part in name for part in kept)]
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


def check_new_backend(python: Path, folder: Path) -> None:
    """The wheel and the source begin the same backend; it installs, and its tests pass beside the example."""
    written = [new_backend(Path(sys.executable), folder / "edited"), new_backend(python, folder / "carried")]
    if contents(written[0]) != contents(written[1]):
        sys.exit("tileops backends new writes another project from the wheel than from the source")
    arguments = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([python, "-m", "pip", "install", *arguments, written[1]], check=True, cwd=folder)
    subprocess.run([python, "-m", "pytest", "-q", written[1]], check=True, cwd=written[1])
    subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", written[1].name], check=True)


def new_backend(python: Path, folder: Path) -> Path:
    """The project that `tileops backends new` writes in an environment."""
    folder.mkdir()
    subprocess.run([python, "-m", "tileops", "backends", "new", "acme"], check=True, cwd=folder,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    return folder / "tileops-backend-acme"


def contents(project: Path) -> dict[Path, bytes]:
    """The files of a project."""
    return {path.relative_to(project): path.read_bytes() for path in project.rglob("*") if path.is_file()}


def run_tests(python: Path, folder: Path) -> None:
    """Run the tests on a copy that has no source beside it."""
    for path in TESTS:
        shutil.copytree(ROOT / path, folder / path, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ("pyproject.toml", "tests/conftest.py", "tests/warm_parent.py"):
        shutil.copy(ROOT / path, folder / path)
    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([python, "-m", "pytest", "-q", *WORKERS, *TESTS], cwd=folder, check=True, env=environment)


if __name__ == "__main__":
    main()
