"""Copies the example backend into the wheel and the sdist, as the template of `tileops backends new`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class TemplateHook(BuildHookInterface):
    """Adds the files of the template to what is built. An editable install reads them where they are."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files; without a template there is nothing to build."""
        if version == "editable":
            return
        project = Path(self.root)
        template = _module(project / "src" / "tileops" / "cli" / "template.py")
        folders = [folder for folder in template.source_folders(project) if folder.is_dir()]
        if not folders:
            raise FileNotFoundError(f"the template is not at {' or '.join(map(str, template.source_folders(project)))}")
        inside = "" if self.target_name == "sdist" else "tileops/cli/"
        for name, path in template.template_files(folders[0]).items():
            build_data["force_include"][str(path)] = f"{inside}{template.BUNDLED}/{name}"


def _module(path: Path) -> Any:
    """A module of the package, which is not importable while it is being built."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
