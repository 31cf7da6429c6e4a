"""A build backend that builds nothing: it tells whoever types `pip install .` here which folder to install."""

from __future__ import annotations

import sys
from typing import NoReturn

MESSAGE = (
    "This folder is a workspace, not a package. To try it: make demo. To work on it: make test. To install it: "
    "pip install ./tileops-core ./tileops-backend-example"
)


def _refuse(*_: object, **__: object) -> NoReturn:
    sys.exit(MESSAGE)


build_wheel = build_sdist = build_editable = _refuse
get_requires_for_build_wheel = get_requires_for_build_sdist = get_requires_for_build_editable = _refuse
