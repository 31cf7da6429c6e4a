"""The conformance kit: what every kernel of a backend must hold to, as tests that its author inherits.

    from tileops.testing import ConformanceTests


    class TestAcme(ConformanceTests):
        backend = "acme"

pytest and hypothesis are imported when a name is used: `pip install 'tileops-core[testing]'` has both.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tileops.testing.conformance import ConformanceTests
    from tileops.testing.samples import Limits

__all__ = ["ConformanceTests", "Limits"]

_ON_FIRST_USE: Final = {"ConformanceTests": "conformance", "Limits": "samples"}
_EXTRA: Final = ("pytest", "hypothesis")


def __getattr__(name: str) -> object:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(__all__)}")
    try:
        module = importlib.import_module(f"{__name__}.{_ON_FIRST_USE[name]}")
    except ModuleNotFoundError as missing:
        if missing.name not in _EXTRA:
            raise
        raise ImportError(
            f"{__name__}.{name} needs {missing.name}, which is not installed: pip install 'tileops-core[testing]'"
        ) from None
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
