"""The modules that a backend may import from, and what they have. See docs/guide/compatibility.md."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Final

import tileops
from tileops.catalogue import IN_TREE_OPS

_PUBLIC: Final = frozenset({
    "tileops", "tileops.backend", "tileops.functional", "tileops.nn", "tileops.norm", "tileops.ops", "tileops.testing",
    *IN_TREE_OPS.values(),
})  # fmt: skip
"""Beside these, `tileops.kernels.<op>`: the package of an op's kernel interfaces."""


@functools.cache
def all_modules() -> frozenset[str]:
    """Every module of this release, public or not."""
    from tileops.cli.template import BUNDLED

    root = Path(tileops.__file__).parent
    paths = [path.relative_to(root.parent).with_suffix("") for path in root.rglob("*.py") if BUNDLED not in path.parts]
    return frozenset(".".join(path.parts).removesuffix(".__init__") for path in paths)


@functools.cache
def public_modules() -> tuple[str, ...]:
    """The public modules of this release, sorted."""
    kernels = Path(tileops.__file__).parent / "kernels"
    packages = {f"tileops.kernels.{path.parent.name}" for path in kernels.glob("*/__init__.py")}
    return tuple(sorted((_PUBLIC & all_modules()) | packages))


def names_of(module: str) -> tuple[str, ...]:
    """The public names of a public module."""
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or [name for name in vars(found) if not name.startswith("_")]
    return tuple(sorted(names))


def public_home(name: str) -> str | None:
    """The public module that a name can be imported from, the shortest; None where there is none."""
    homes = [module for module in public_modules() if name in names_of(module)]
    return min(homes, key=len, default=None)
