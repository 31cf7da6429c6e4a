"""What norms.py times: the calls, what each has to move, and the bar that its time is held to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEVEL = 1.02
"""Two medians of one kernel differ by this, in two processes of one run."""

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MIB = 1 << 20


@dataclass(frozen=True)
class Bar:
    """What a case's time is held to.

    Args:
        copy: At most so many times the copy of the same bytes.
        rival: At most so many times the fastest rival.
        margin: Microseconds that it may take beyond that.
    """

    copy: float | None = None
    rival: float | None = None
    margin: float = 0.0


@dataclass(frozen=True)
class Case:
    """One call.

    Args:
        op: The op, or `…_bwd` for its backward.
        shape: x's shape: rows and n, or (N, C, *spatial).
        dtype: x's dtype, as torch calls it.
        bar: What its time is held to.
        channels_last: Whether channels are innermost in memory.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str
    bar: Bar
    channels_last: bool = False

    @property
    def name(self) -> str:
        """How tables show it, below the name of its op."""
        return "×".join(map(str, self.shape)) + (" last" if self.channels_last else "")

    @property
    def moved(self) -> int:
        """Bytes that go through memory when every large input is read once and every large output written once."""
        return PASSES[self.op] * self.values

    @property
    def large(self) -> tuple[str, ...]:
        """The arguments of x's size."""
        beside = {"grad": self.op.endswith("_bwd"), "residual": self.op.startswith("fused_add")}
        return ("x", *(name for name, is_there in beside.items() if is_there))

    @property
    def channels(self) -> int:
        """The length of the weight and the bias."""
        by_rows = self.op.removesuffix("_bwd").removeprefix("fused_add_") in ROW_NORMS
        return self.shape[-1 if by_rows else 1]

    @property
    def values(self) -> int:
        """Bytes of x."""
        return math.prod(self.shape) * BYTES[self.dtype]


PASSES: Mapping[str, int] = {
    "layer_norm": 2,
    "rms_norm": 2,
    "fused_add_layer_norm": 4,
    "fused_add_rms_norm": 4,
    "layer_norm_bwd": 3,
    "rms_norm_bwd": 3,
    "batch_norm_train": 2,
    "batch_norm_infer": 2,
    "batch_norm_bwd": 3,
    "group_norm": 2,
    "group_norm_bwd": 3,
    "instance_norm": 2,
    "instance_norm_bwd": 3,
}
"""Tensors of x's size that each op reads or writes."""

ROWS = (
    (1, 4096), (1, 16384), (128, 4096), (2048, 1024), (2048, 2048), (2048, 4096), (4096, 4096),
    (2048, 8192), (8192, 8192), (32768, 1024), (2048, 16384), (512, 65536), (65536, 256), (16384, 5120),
    (1_000_000, 64), (1_000_000, 128),
)  # fmt: skip
SOME_ROWS = (
    (1, 4096), (128, 4096), (2048, 1024), (4096, 4096), (8192, 8192), (32768, 1024), (2048, 16384), (512, 65536),
    (65536, 256), (16384, 5120),
)  # fmt: skip
BATCHES = (
    (32, 64, 112, 112), (32, 256, 56, 56), (64, 512, 28, 28), (128, 2048, 7, 7), (8192, 1024), (2, 16, 64, 64),
    (256, 64, 56, 56),
)  # fmt: skip
GROUPS = ((32, 256, 56, 56), (64, 512, 28, 28), (128, 2048, 7, 7), (8, 320, 64, 64), (2, 512, 128, 128))
INSTANCES = ((32, 256, 56, 56), (64, 512, 28, 28), (8, 64, 256, 256), (4, 32, 128, 128))
NARROW = (64, 128)
FAR_AHEAD = ((8192, 1024), (32, 64, 112, 112), (256, 64, 56, 56))
"""Batches that the rivals are slow with."""

LAYER_NORM_BARS = {(65536, 256): 1.02, (512, 65536): 1.20, (16384, 5120): 1.05}


def cases() -> tuple[Case, ...]:
    """All of them, op by op."""
    ahead = Bar(rival=1.0)
    return (
        *(Case("layer_norm", shape, "bfloat16", _layer_norm_bar(shape)) for shape in ROWS),
        *(Case("rms_norm", shape, "bfloat16", _rms_norm_bar(shape)) for shape in ROWS),
        *(
            Case(f"fused_add_{norm}", shape, "bfloat16", _rms_norm_bar(shape))
            for norm in ROW_NORMS
            for shape in SOME_ROWS
        ),
        *(Case(f"{norm}_bwd", shape, "bfloat16", ahead) for norm in ROW_NORMS for shape in SOME_ROWS),
        *(Case("batch_norm_train", shape, "float16", _batch_norm_bar(shape, last), last) for shape, last in LAYOUTS),
        *(Case("batch_norm_infer", shape, "float16", Bar(copy=1.10), last) for shape, last in LAYOUTS),
        *(Case("batch_norm_bwd", shape, "float16", ahead, last) for shape, last in LAYOUTS),
        *(Case(f"group_norm{way}", shape, "float16", ahead) for way in ("", "_bwd") for shape in GROUPS),
        *(Case(f"instance_norm{way}", shape, "float16", ahead) for way in ("", "_bwd") for shape in INSTANCES),
    )


ROW_NORMS = ("layer_norm", "rms_norm")
LAYOUTS = [(shape, last) for last in (False, True) for shape in BATCHES if len(shape) > 2 or not last]


def _layer_norm_bar(shape: Sequence[int]) -> Bar:
    rows, n = shape
    if rows == 1:
        return Bar(rival=1.0, margin=0.3)
    if (rows, n) in LAYER_NORM_BARS:
        return Bar(copy=LAYER_NORM_BARS[rows, n])
    if n in NARROW:
        return Bar(copy=1.10)
    moved = 2 * rows * n * BYTES["bfloat16"]
    return Bar(copy=1.10 if moved >= 64 * MIB else 1.18 if moved >= 8 * MIB else None, rival=LEVEL)


def _rms_norm_bar(shape: Sequence[int]) -> Bar:
    rows, n = shape
    if rows == 1:
        return Bar(rival=1.0, margin=0.3)
    return Bar(copy=1.10 if n in NARROW else None, rival=1 / 0.98)


def _batch_norm_bar(shape: Sequence[int], channels_last: bool) -> Bar:
    return Bar(rival=1 / 1.25 if shape in FAR_AHEAD and not channels_last else 1.0)
