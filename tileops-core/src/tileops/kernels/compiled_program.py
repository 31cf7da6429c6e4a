# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""How every TileLang program of the library is traced and compiled."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Hashable
from typing import Any

import tilelang
import tilelang.language as T

# The suffix "a" opens the features of exactly one architecture; it costs nothing where none is used.
_ARCH_SPECIFIC = frozenset({90, 100, 120})

_PASSES = {
    # The program masks its own accesses: no bounds are added to them.
    "tl.disable_safe_memory_legalize": True,
    # Each shared buffer keeps its own memory: reuse would cost a barrier to save a few bytes.
    "tl.disable_shared_memory_reuse": True,
}

# Re-entrant: tracing a program parses the macros that it is the first to use.
_tracing = threading.RLock()  # not Final: a forked child gets a new one


def _renew_lock() -> None:
    global _tracing  # noqa: PLW0603 - nobody in the child can release the parent's lock
    _tracing = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def traced(decorator: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`decorator`, which is `T.prim_func` or `T.macro`, in one thread at a time.

    TileLang parses the function's text, and CPython 3.11 counts how deep a parser is for all threads together. Where
    a garbage collection lets a second thread parse in between, that is "AST constructor recursion depth mismatch".
    """

    def decorate(function: Any) -> Any:
        with _tracing:
            return decorator(function)

    return decorate


@functools.cache
def compiled_once(make: Callable[..., Any], arch: int, *facts: Hashable, **further: Hashable) -> Callable[..., Any]:
    """The entry point of the program `make(*facts, **further)` for `arch`, which all entries that want the same one share.

    Kept for the life of the process, as TileLang keeps what it compiled.
    """
    return compile_program(make(*facts, **further), arch)


def macro(function: Callable[..., Any]) -> Callable[..., Any]:
    """`T.macro` for the functions of a module: the text of one is parsed when a program first uses it.

    Parsing takes 5 to 10 ms a macro, and a program uses a few of those that its modules hold.
    """
    parsed = functools.cache(lambda: traced(T.macro)(function))

    @functools.wraps(function)
    def use(*args: Any) -> Any:
        return parsed()(*args)

    return use


def compile_program(prim_func: Any, arch: int) -> Callable[..., Any]:
    """Compile `prim_func` for `arch` (major * 10 + minor) and return its bare entry point.

    The entry point takes torch tensors in the order of the program's parameters, outputs included, checks
    their shapes and dtypes, and launches on torch's current stream; no Python frame lies between. It owns
    the compiled module.
    """
    return _compiled(prim_func, arch, _PASSES)


def compile_sized_program(prim_func: Any, arch: int, registers: int) -> Callable[..., Any]:
    """Like `compile_program`, for a program whose blocks are as large as each launch asks for: `(WARP, warps)`.

    TileLang places barriers, and the compiler limits registers, by a block size that is known. So the program
    holds every barrier that it needs, and a thread takes at most `registers`.
    """
    return _compiled(
        prim_func, arch, {**_PASSES, "tl.disable_thread_storage_sync": True}, [f"--maxrregcount={registers}"]
    )


def _compiled(prim_func: Any, arch: int, passes: dict[str, bool], flags: list[str] | None = None) -> Callable[..., Any]:
    suffix = "a" if arch in _ARCH_SPECIFIC else ""
    kernel = tilelang.compile(
        prim_func,
        out_idx=None,
        target={"kind": "cuda", "arch": f"sm_{arch}{suffix}"},
        pass_configs=passes,
        compile_flags=flags,
    )
    return kernel.adapter.get_exportable_executable()["main"]
