"""How row kernels reach their programs, which take x and y as (rows, n) and affine tensors as (n,)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch import Tensor

# Private names of torch. The first is what code that torch compiled allocates with: on an H200 it takes the host
# 1.3 µs where `empty_like` takes 2.0, which is 6 to 9 % of a short call.
_guards: Final = getattr(cast("Any", torch._C), "_dynamo", None)
_empty_strided_cuda: Final[Any] = getattr(getattr(_guards, "guards", None), "_empty_strided_cuda", None)
_current_device: Final[Any] = getattr(torch._C, "_cuda_getDevice", None)


class LaunchesRows:
    """The `forward` of row kernels. A kernel names it before its interface, and calls `_takes` when it is built."""

    _launch: Callable[..., Any]

    def _takes(self, n: int, dtype: torch.dtype, device: torch.device, launch: Callable[..., Any]) -> None:
        """Rows of `n` elements of `dtype` on `device`; `launch` takes x, the affine tensors and y."""
        self._n = n
        self._strides = (n, 1)
        self._dtype = dtype
        self._index = -1 if _empty_strided_cuda is None or _current_device is None else device.index
        self._launch = launch

    def forward(self, x: Tensor, *affine: Tensor | None) -> Tensor:
        """Launch the program on x as (rows, n). A view takes the host a microsecond: most calls need none."""
        weight, n = affine[0], self._n
        if x.ndim != 2 or (x.shape[1] != n or affine[-1] is not None if weight is None else weight.ndim != 1):
            return self._launch_views(x, affine)
        if self._index == _current_device():
            y = _empty_strided_cuda((x.shape[0], n), self._strides, self._dtype)
        else:
            y = torch.empty_like(x)
        self._launch(x, *affine, y)
        return y

    def _launch_views(self, x: Tensor, affine: tuple[Tensor | None, ...]) -> Tensor:
        """Likewise for tensors with other axes."""
        y = torch.empty_like(x)
        flat = [None if tensor is None else tensor.view(-1) for tensor in affine]
        self._launch(x.view(-1, self._n), *flat, y.view(-1, self._n))
        return y
