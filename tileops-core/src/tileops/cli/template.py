"""The project that a new backend begins as: the example backend, with its name replaced.

Standard library only: the build hook of tileops-core, which copies the template into the wheel, reads this file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ORIGIN: Final = "example"
"""The name that the template has where a new backend has its own. In the template, the word means nothing else."""

BUNDLED: Final = "backend_template"
"""The folder that the wheel and the sdist carry the template in."""

_NOT_SOURCE: Final = re.compile(r"__pycache__|dist|build|\..*_cache|\.hypothesis|\.venv|.*\.egg-info")
"""What tools leave in a project's folder."""

_VERBATIM: Final = frozenset({"LICENSE"})


def template_folder() -> Path | None:
    """Where the template is: in the installed package, or beside the source of an editable install."""
    package = Path(__file__).parent
    places = [package / BUNDLED]
    if len(package.parents) > 2:
        places += source_folders(package.parents[2])
    return next((place for place in places if (place / "pyproject.toml").is_file()), None)


def source_folders(project: Path) -> list[Path]:
    """Where the template may be, seen from the source of tileops-core: in its sdist, or in the repository."""
    return [project / BUNDLED, project.parent / f"tileops-backend-{ORIGIN}"]


def template_files(folder: Path) -> dict[str, Path]:
    """The files of the template: path in the project → path here, in order of the former."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: files[name] for name in sorted(files) if not any(map(_NOT_SOURCE.fullmatch, name.split("/")))}


def renamed_files(files: Mapping[str, str], name: str) -> dict[str, str]:
    """The files of a project under another name; those of others, such as the licence, word for word."""
    return {renamed(path, name): text if path in _VERBATIM else renamed(text, name) for path, text in files.items()}


def renamed(text: str, name: str) -> str:
    """`text` with the template's name replaced by `name`, as a word; inside of an identifier, in that form.

    With `my-acme`, `tileops-backend-example` becomes `tileops-backend-my-acme`, and `tileops_backend_example`
    becomes `tileops_backend_my_acme`.
    """
    pattern = rf"(?P<word>(?<!\w){ORIGIN}(?!\w))|{ORIGIN}"
    return re.sub(pattern, lambda found: name if found["word"] else name.replace("-", "_"), text)
