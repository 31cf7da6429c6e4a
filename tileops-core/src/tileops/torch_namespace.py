"""`torch.ops.tileops`, put where torch looks for it when `tileops` is imported.

It defines a torch op when that is first asked for: by an op's call, while dynamo traces one, or where a program
that another process exported is loaded. Until then neither an op nor the torch boundary is imported.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch

_OpNamespace: Final[Any] = cast("Any", torch)._ops._OpNamespace


class Namespace(_OpNamespace):
    """The torch ops of this library, and of whoever's op classes."""

    __module__ = "torch._ops"  # which graphs write into the names of their nodes

    def __getattr__(self, name: str) -> Any:
        if name.endswith("__"):  # `__self__` and its like
            return _OpNamespace.__getattr__(self, name)
        from tileops.torch_ops import packet

        return packet(self, name, _OpNamespace.__getattr__)

    def __setattr__(self, name: str, value: Any) -> None:
        getattr(value, "default", None)  # the overload is made before another thread can see its packet
        _OpNamespace.__setattr__(self, name, value)


if not isinstance(torch.ops.tileops, Namespace):
    cast("Any", torch.ops).tileops = Namespace("tileops")
