"""The documentation is part of the tests: every page is executed, from its first line to its last.

| block | what happens to it |
|---|---|
| ```` ```python ```` | runs; the blocks of one page share one namespace |
| ```` ```python ```` that starts with `>>>` | runs, and its results and error texts are compared |
| ```` ```python ````, ```` ```toml ```` that starts with `# some/file.py` | is written to that file of the page's project |
| ```` ```console ```` | each `$ command` runs, and what it prints is compared; `pip install` installs the page's project |

`...` in a result stands for any text. Versions of our own distributions compare equal. A page starts with an
empty project folder, which is importable, and with no backend loaded; what it registers goes when it ends.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sybil import Example, Sybil
from sybil.evaluators import doctest as sybil_doctest
from sybil.integration.pytest import SybilItem
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser
from sybil.parsers.rest import DocTestParser
from sybil.sybil import SybilCollection

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it along
    import tomli as tomllib

ROOT = Path(__file__).parent
os.environ["TILEOPS_CACHE_DIR"] = ""  # what was tuned on this machine is no part of any test
OPTIONS = doctest.ELLIPSIS
FILE_NAME = re.compile(r"# (?P<path>[\w./-]+\.(?:py|toml))\n")
TRAILING_SPACE = re.compile(r"[ \t]+$", re.MULTILINE)
OUR_VERSIONS = re.compile(r"\b(tileops-(?:core|backend-example)) \d[\w.+]*")


class Checker(sybil_doctest.OutputChecker):
    """Compares what is shown with what came, whatever the versions of our own distributions."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        """Whether `got` is what the page shows."""
        shown, came = (TRAILING_SPACE.sub("", OUR_VERSIONS.sub(r"\1 X", text)) for text in (want, got))
        return super().check_output(shown, came, optionflags)


# ------------------------------------------------------------------------------------------------- one page


class Page:
    """The project folder of a page, and the state of the library to return to.

    Args:
        folder: The project folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, path: str, text: str) -> None:
        """Write a file of the project."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        importlib.invalidate_caches()

    def install(self) -> None:
        """Install the project: write the metadata that pip would, and begin again as a new process does."""
        project = tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]
        groups = project.get("entry-points", {})
        lines = [
            f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items()
        ]
        folder = project["name"].replace("-", "_")
        metadata = f"{folder}-{project['version']}.dist-info"
        stated = [("Name", project["name"]), ("Version", project["version"])]
        stated += [("Requires-Python", project["requires-python"])] if "requires-python" in project else []
        stated += [("Requires-Dist", requirement) for requirement in project.get("dependencies", [])]
        lines_of_metadata = "".join(f"{name}: {value}\n" for name, value in [("Metadata-Version", "2.1"), *stated])
        self.write(f"{metadata}/METADATA", lines_of_metadata)
        self.write(f"{metadata}/entry_points.txt", "\n".join(lines))
        forget_modules(self.folder)
        as_in_a_new_process()

    def run(self, command: str) -> str:
        """Run a command line in the project folder, and return what it prints."""
        words = shlex.split(command)
        settings = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
        if words[:2] == ["pip", "install"]:
            self.install()
            return ""
        environment = os.environ | {
            "COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb", "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
        } | settings  # fmt: skip
        arguments = [sys.executable, "-m", *words]
        done = subprocess.run(
            arguments, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, check=False,
        )  # fmt: skip
        return done.stdout


def as_in_a_new_process() -> None:
    """Forget registrations, look-ups, entries and what is installed."""
    from tileops.backend import registration
    from tileops.backend.process import Process, process
    from tileops.ops.op_base import clear

    vars(process).update(vars(Process()))
    registration.update_registry(lambda _: registration.Registry())
    clear()


@contextlib.contextmanager
def library_state() -> Iterator[None]:
    """Begin as a new process does; put everything back at the end."""
    from tileops import catalogue
    from tileops.backend import registration
    from tileops.backend.process import process
    from tileops.ops import op_base

    for op in catalogue.IN_TREE_OPS:  # ours stay when the page ends; only the page's own go
        catalogue.find_op(op)
    registry, state = registration.registry(), dict(vars(process))
    op_classes, names = list(op_base._op_classes), dict(catalogue._classes)
    as_in_a_new_process()
    try:
        yield
    finally:
        op_base._op_classes[:] = op_classes
        catalogue._classes.clear()
        catalogue._classes.update(names)
        vars(process).update(state)
        registration.update_registry(lambda _: registry)
        op_base.clear()


def forget_modules(folder: Path) -> None:
    """Forget the modules that a page wrote and imported."""
    for name, module in list(sys.modules.items()):
        if folder in Path(getattr(module, "__file__", None) or "/").parents:
            del sys.modules[name]


def begin_page(namespace: dict[str, Any]) -> None:
    """Give a page its project folder, and the library as a new process finds it."""
    stack = contextlib.ExitStack()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tileops-page-")))
    stack.enter_context(library_state())
    stack.callback(os.environ.__setitem__, "TILEOPS_CACHE_DIR", "")
    os.environ["TILEOPS_CACHE_DIR"] = str(folder / "cache")
    stack.callback(setattr, sys, "dont_write_bytecode", sys.dont_write_bytecode)
    sys.dont_write_bytecode = True  # a file that is written again within a second would be read from its cache
    sys.path.insert(0, str(folder))
    stack.callback(sys.path.remove, str(folder))
    stack.callback(forget_modules, folder)
    namespace.clear()
    namespace.update(__name__="__main__", _page=Page(folder), _stack=stack, _ran=set[int]())


def begin_guide(namespace: dict[str, Any]) -> None:
    """Begin a page that may show the kernels of the example backend."""
    example = pytest.importorskip("tileops_backend_example.tilelang_row")
    missing = example.toolchain_missing()
    if missing is not None:
        pytest.skip(f"pages show the compiled kernel of tileops-backend-example: {missing}")
    begin_page(namespace)


def end_page(namespace: dict[str, Any]) -> None:
    """Put back what `begin_page` changed; a page that was skipped changed nothing."""
    if "_stack" in namespace:
        namespace["_stack"].close()


# --------------------------------------------------------------------------------------------------- blocks


class PythonParser(PythonCodeBlockParser):
    """Python blocks: files of the project, shown results, or code."""

    def __init__(self) -> None:
        super().__init__(doctest_optionflags=OPTIONS)
        self.doctest_parser.evaluator.runner._checker = Checker()

    def __call__(self, document: Any) -> Iterator[Any]:
        """The regions of a page."""
        for region in super().__call__(document):
            if isinstance(region.parsed, str) and FILE_NAME.match(region.parsed):
                region.evaluator = write_file
            yield region


def write_file(example: Example) -> None:
    """Write a block to the file that its first line names."""
    named = FILE_NAME.match(example.parsed)
    if named is not None:
        example.namespace["_page"].write(named["path"], example.parsed)


def run_commands(example: Example) -> str | None:
    """Run the commands of a block; what differs from the page, or None."""
    checker = Checker()
    for part in re.split(r"^\$ ", example.parsed, flags=re.MULTILINE)[1:]:
        command, _, want = part.partition("\n")
        while command.endswith("\\"):
            more, _, want = want.partition("\n")
            command = f"{command[:-1]} {more}"
        got = example.namespace["_page"].run(command)
        if not checker.check_output(want.rstrip() + "\n", got.rstrip() + "\n", OPTIONS):
            return f"$ {command}\nprints:\n{got}\nand the page shows:\n{want}"
    return None


PAGES = Sybil(
    parsers=[
        PythonParser(),
        CodeBlockParser("toml", write_file),
        CodeBlockParser("console", run_commands),
    ],
    patterns=["README.md", "CONTRIBUTING.md", "docs/*.md", "docs/*/*.md"],
    excludes=["tileops-*/*.md"],
    setup=begin_guide,
    teardown=end_page,
)
DOCSTRINGS = Sybil(
    parsers=[PythonParser(), DocTestParser(optionflags=OPTIONS)],
    patterns=["tileops-core/src/tileops/*.py", "tileops-core/src/tileops/*/*.py", "tileops-core/src/tileops/*/*/*.py"],
    setup=begin_page,
    teardown=end_page,
)

pytest_collect_file = SybilCollection([PAGES, DOCSTRINGS]).pytest()


@pytest.hookimpl(trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Run the blocks above an example that is asked for alone, or whose page several workers share."""
    if not isinstance(item, SybilItem):
        return
    ran: set[int] = item.example.namespace["_ran"]
    for example in item.example.document.examples():
        if example.line < item.example.line and example.line not in ran:
            ran.add(example.line)
            example.evaluate()
    ran.add(item.example.line)
