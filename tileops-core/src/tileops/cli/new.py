"""Write the project of a new backend: the template under another name, whole or cut down to one op."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tileops.backend.discovery import RESERVED, normalised_name
from tileops.catalogue import find_op, op_names
from tileops.cli.arguments import UsageError, op_class
from tileops.cli.pruning import imported_modules, pruned, without, without_unused_imports
from tileops.cli.template import ORIGIN, renamed_files, template_files, template_folder

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_MODULE: Final = f"tileops_backend_{ORIGIN}"
_SOURCE: Final = "src/"
_KERNELS, _TARGETS = "tileops_register_kernels", "tileops_register_targets"


def new_project(name: str, op: str | None, into: Path, *, whole_op: bool) -> Path:
    """Write `tileops-backend-NAME` into a folder; the project's own folder.

    Args:
        name: The backend's name.
        op: The op whose kernels, or target, are kept; None for all.
        into: The folder that the project's folder is made in.
        whole_op: Whether to keep the target, which takes over whole ops, instead of the kernels.

    Raises:
        UsageError: The name cannot be one, the folder exists or cannot be written, or the template has nothing
            for that op.
    """
    name = checked_name(name)
    folder = into / f"tileops-backend-{name}"
    if folder.exists():
        raise UsageError(f"{folder} exists already; choose another name, or another folder with --into")
    files = template_texts()
    if op is not None or whole_op:
        files = cut_down(files, None if op is None else op_class(op).__name__, _TARGETS if whole_op else _KERNELS)
    try:
        write(folder, renamed_files(files, name))
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UsageError(f"{folder} cannot be written: {error.strerror}; choose another folder with --into") from None
    return folder


def checked_name(text: str) -> str:
    """The name of a backend that `text` gives, with or without `tileops-backend-`."""
    name = normalised_name(text).removeprefix("tileops-backend-")
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{text!r} is no name of a backend; write letters, digits and hyphens, such as acme or acme-npu"
        )
    if name in RESERVED or name == ORIGIN:
        raise UsageError(f"{name!r} is a name that tileops uses itself; choose another, such as acme")
    return name


def template_texts() -> dict[str, str]:
    """The template: path in the project → text."""
    folder = template_folder()
    if folder is None:
        raise UsageError("this installation of tileops-core has no template; install it from a wheel: pip install "
                         "--force-reinstall tileops-core")  # fmt: skip
    return {name: path.read_text(encoding="utf-8") for name, path in template_files(folder).items()}


def cut_down(files: Mapping[str, str], op: str | None, hook: str) -> dict[str, str]:
    """The files of a project that registers in one hook only, and for one op only where `op` names it."""
    kept = _cut_down(files, op, hook)
    if not _has_hook(kept, hook):
        served = [known for known in op_names() if _has_hook(_cut_down(files, known, hook), hook)]
        raise UsageError(
            f"the template has no {'target' if hook == _TARGETS else 'kernel'} for {op}; it has one for: "
            f"{', '.join(served)}. Begin with one of these, and replace it"
        )
    return kept


def _cut_down(files: Mapping[str, str], op: str | None, hook: str) -> dict[str, str]:
    unwanted = {_KERNELS, _TARGETS} - {hook}
    if op is not None:
        unwanted |= _mentioned_for_other_ops(op)
    sources = {_dotted(path): path for path in files if path.startswith(_SOURCE) and path.endswith(".py")}
    modules, gone = pruned({module: files[path] for module, path in sources.items()}, _MODULE, unwanted)
    kept = {path: text for path, text in files.items() if path not in sources.values()}
    kept |= {sources[module]: text for module, text in modules.items()}
    tests = [path for path in kept if path.startswith("tests/") and path.endswith(".py")]
    kept |= {path: _cut_down_test(kept[path], gone) for path in tests}
    names = {path.rpartition("/")[2] for path in kept}
    kept = {path: _rows_of(text, names) if path == "README.md" else text for path, text in kept.items()}
    return {path: text for path, text in sorted(kept.items()) if path not in tests or _is_of_use(path, text)}


def _mentioned_for_other_ops(op: str) -> set[str]:
    """Names that only the code for other ops has: those of the ops, and of the packages of their interfaces."""
    others = {name for name in op_names() if name != op}
    return others.union(*(_packages(name) for name in others)) - _packages(op)


def _packages(op: str) -> set[str]:
    cls = find_op(op)
    modules = [] if cls is None else [interface.__module__ for interface in cls.interfaces.values()]
    return {".".join(module.split(".")[:3]) for module in modules}


def _has_hook(files: Mapping[str, str], hook: str) -> bool:
    return f"def {hook}(" in files.get(f"{_SOURCE}{_MODULE}/__init__.py", "")


def _dotted(path: str) -> str:
    return path.removeprefix(_SOURCE).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _cut_down_test(text: str, gone: frozenset[str]) -> str:
    """A test module without the tests of what is gone; nothing of one that imports a module of ours that is."""
    if any(module in gone and module.startswith(_MODULE) for module in imported_modules(text)):
        return ""
    before = ""
    while text != before:
        before = text
        text, lost = without(text, gone, whole=True)
        text, gone = without_unused_imports(text), gone | lost
    return text


def _is_of_use(path: str, test: str) -> bool:
    """Whether a test module still tests something; what others use of it stays."""
    name = path.rpartition("/")[2]
    return not name.startswith("test_") or re.search(r"^(def test_|class Test)", test, re.MULTILINE) is not None


def _rows_of(readme: str, names: set[str]) -> str:
    """The README without the rows of its table that are about modules which are gone."""
    lines = readme.splitlines(keepends=True)
    rows = [re.match(r"\| `(?P<name>\w+\.py)`", line) for line in lines]
    return "".join(line for line, row in zip(lines, rows) if row is None or row["name"] in names)


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files of a project into a new folder."""
    folder.mkdir()
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
