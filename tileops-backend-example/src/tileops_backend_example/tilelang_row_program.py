# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""A float32 layer norm over contiguous rows as a TileLang program for `target="c"`, and how it is compiled.

TileLang writes C++ for one thread and compiles it with the system's compiler. What makes it fast:

- Sums run in `lanes` independent partial sums. A compiler may not reorder float additions, so one running
  sum would be one addition at a time; sixty-four of them are vectors, and round sixty-four times less often.
- It is started through ctypes: 1 µs of host time, where TileLang's own wrapper checks tensors for 20 µs.
  ctypes releases the GIL, so Python threads can run it side by side.

Three passes read the row, which stays in the caches. The mean of the first is rounded to float32, which loses
digits where the mean is large beside the spread. So the second pass, which sums the squares around that mean,
also sums the deviations themselves: their mean is what the rounding left over, and it is taken off as well.
"""

import ctypes
import functools
import hashlib
import math
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tilelang
import tilelang.language as T

__all__ = ["Launcher", "compile_row_norm"]

Launcher = Callable[[int, "int | None", "int | None", int, int], int]
"""Runs the program: addresses of x, weight, bias (None where absent) and y, and the number of rows.

It reads no state that a call changes, and may run in several threads at once.
"""

ADDENDS = 64
"""Additions into one partial sum before it is put aside: bounds the rounding error of long rows."""


def compile_row_norm(n: int, eps: float, has_weight: bool, has_bias: bool, lanes: int) -> Launcher:
    """Compile the layer norm of float32 rows of `n` elements, or load it from TileLang's disk cache.

    Args:
        n: Elements of a row, 1 <= n < 2**31.
        eps: Added to the variance; an argument of the program, so that every eps shares one compilation.
        has_weight: Whether rows are scaled by a weight.
        has_bias: Whether a bias is added.
        lanes: Partial sums of a row, a power of two.
    """
    # Sums are taken of x * scale, with scale the power of two that keeps the sum of any finite row finite.
    scale = math.ldexp(1.0, -(n - 1).bit_length())
    constants = (ctypes.c_float(value) for value in (eps, scale, 1.0 / (n * scale)))
    return functools.partial(_entry_point(n, has_weight, has_bias, lanes), *constants)


@functools.cache
def _entry_point(n: int, has_weight: bool, has_bias: bool, lanes: int) -> Callable[..., int]:
    """The compiled function, called `(eps, scale, rescale, x, weight, bias, y, rows)`."""
    kernel: Any = tilelang.compile(
        row_norm(n, has_weight, has_bias, lanes),
        target="c",
        execution_backend="cython",
        compile_flags=compile_flags(),
    )
    # Taken by item, a ctypes function is a new object each time: TileLang's own keeps its argument types.
    entry_point = kernel.adapter.lib["call"]
    # Parameters first, in their order, then the symbolic sizes.
    entry_point.argtypes = [ctypes.c_float] * 3 + [ctypes.c_void_p] * 4 + [ctypes.c_int64]
    return entry_point


def row_norm(n: int, has_weight: bool, has_bias: bool, lanes: int) -> Any:
    """The program. An absent weight or bias keeps its place among the parameters and is never read."""
    rows = T.dynamic("rows", "int64")
    chunks, tail = divmod(n, lanes)

    @T.prim_func
    def tileops_example_row_layer_norm(
        eps: T.float32,
        scale: T.float32,
        rescale: T.float32,
        x: T.Tensor((rows, n), "float32"),
        weight: T.Tensor((n,), "float32"),
        bias: T.Tensor((n,), "float32"),
        y: T.Tensor((rows, n), "float32"),
    ):
        with T.Kernel(rows) as row:
            sums = T.alloc_local((2, lanes), "float32")
            parts = T.alloc_local((2, lanes), "float32")
            stats = T.alloc_local((4,), "float32")

            # Stored, not named: the text of a named expression would be repeated wherever the name stands.
            stats[0] = 0.0
            _sum_row(sums, parts, x, row, stats, scale, chunks, tail, lanes, False)
            stats[0] = sums[0, 0] * rescale

            _sum_row(sums, parts, x, row, stats, scale, chunks, tail, lanes, True)
            stats[1] = sums[0, 0] * rescale
            # In a constant row both terms are rounding errors, and their difference may fall below zero. The
            # comparison keeps a NaN, which T.max would drop.
            stats[2] = sums[1, 0] * (scale * rescale) - stats[1] * stats[1]
            if stats[2] < 0.0:
                stats[2] = 0.0
            stats[2] = 1.0 / T.sqrt(stats[2] + eps)
            stats[3] = 0.0 - stats[1] * stats[2]

            for j in T.serial(n):
                value = (x[row, j] - stats[0]) * stats[2] + stats[3]
                if has_weight and has_bias:
                    y[row, j] = value * weight[j] + bias[j]
                elif has_weight:
                    y[row, j] = value * weight[j]
                elif has_bias:
                    y[row, j] = value + bias[j]
                else:
                    y[row, j] = value

    return tileops_example_row_layer_norm


@T.macro
def _sum_row(sums, parts, x, row, stats, scale, chunks: int, tail: int, lanes: int, squares: bool):
    """Leave in `sums[0, 0]` the sum of `(x - centre) * scale`, and in `sums[1, 0]` that of the squares.

    The centre is `stats[0]`; without `squares` it is taken for zero. The order of the additions depends on
    the row's length alone.
    """
    # About as many additions inside a block as there are blocks, which keeps both chains short.
    block = max(ADDENDS, math.isqrt(chunks))
    blocks = chunks // block
    _clear(sums, lanes)
    if blocks > 1:
        for b in T.serial(blocks):
            _clear(parts, lanes)
            for k in T.serial(block):
                _add(parts, x, row, stats, scale, (b * block + k) * lanes, lanes, squares)
            for j in T.serial(lanes):
                sums[0, j] = sums[0, j] + parts[0, j]
                if squares:
                    sums[1, j] = sums[1, j] + parts[1, j]
        for k in T.serial(chunks - blocks * block):
            _add(sums, x, row, stats, scale, (blocks * block + k) * lanes, lanes, squares)
    else:
        for k in T.serial(chunks):
            _add(sums, x, row, stats, scale, k * lanes, lanes, squares)
    _add(sums, x, row, stats, scale, chunks * lanes, tail, squares)
    _fold(sums, lanes, squares)


@T.macro
def _clear(sums, lanes: int):
    """Set all partial sums to zero."""
    for j in T.serial(lanes):
        sums[0, j] = 0.0
        sums[1, j] = 0.0


@T.macro
def _add(sums, x, row, stats, scale, first, count, squares: bool):
    """Add the `count` elements of the row from `first` on, each to the partial sum of its own lane."""
    for j in T.serial(count):
        if squares:
            deviation = x[row, first + j] - stats[0]
            sums[0, j] = sums[0, j] + deviation * scale
            sums[1, j] = sums[1, j] + deviation * deviation
        else:
            sums[0, j] = sums[0, j] + x[row, first + j] * scale


@T.macro
def _fold(sums, lanes: int, squares: bool):
    """Add the partial sums up in pairs, into the first."""
    for width in _halves(lanes):
        for j in T.serial(width):
            sums[0, j] = sums[0, j] + sums[0, j + width]
            if squares:
                sums[1, j] = sums[1, j] + sums[1, j + width]


def _halves(lanes: int) -> list[int]:
    """Half of the lanes, half of that, down to one."""
    return [lanes >> bit for bit in range(1, lanes.bit_length())]


def compile_flags() -> list[str]:
    """What the compiler is told beyond TileLang's own flags, which ask for no optimisation.

    g++ and clang++ take all of them. None lets the compiler reorder additions or forget about NaN. The
    warnings that are switched off are about TileLang's headers.
    """
    return ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-w", *_cpu_flags()]


def _cpu_flags() -> list[str]:
    """Flags for this machine's vector instructions, and a definition that names the CPU.

    TileLang's disk cache distinguishes flags and machine types ("x86_64"), not CPUs. In a home directory that
    unlike machines share, "native" alone would hand one CPU the other's instructions, and end in SIGILL. The
    definition means nothing to the program; it makes the CPU a part of the key.
    """
    native = {"x86_64": "-march=native", "aarch64": "-mcpu=native"}.get(platform.machine())
    cpu = _cpu_digest()
    # A CPU that cannot be told from others gets the code that every CPU of its type runs.
    return [native, f"-DTILEOPS_CPU=0x{cpu}"] if native and cpu else []


def _cpu_digest() -> str | None:
    """A digest of what Linux says of the CPUs' models and instruction sets; None where it says nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    facts = sorted({line for line in lines if line.partition(":")[0].strip().lower() in _CPU_FACTS})
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16] if facts else None


_CPU_FACTS = frozenset(
    # x86-64, then aarch64
    ("vendor_id", "cpu family", "model", "flags", "cpu implementer", "cpu variant", "cpu part", "features")
)
