"""What inductor writes where a compiled program calls a torch op of ours.

Left to itself it writes a call of the torch op, which passes torch's dispatcher on its way back to Python: more than
an eager call costs. Inductor has a table of ops whose calls are written in another way. In it ours are written as
calls of what `tileops.torch_ops.launcher` returns, which goes to a kernel that was selected before, or to the torch
op. Generated code stays on disk and meets later releases, so that name and its arguments stay for ever, as schemas do.
"""

from __future__ import annotations

import ast
import sys
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final

_TABLE: Final = "torch._inductor.codegen.custom_extern_kernel_codegen"
"""Private, of torch 2.11 and later; where it is missing, inductor calls the torch op. A test names what is used."""

_written: Final[set[str]] = set()


def table() -> Any:
    """The module of inductor's table; None where this process does not use inductor, or this torch has none."""
    return sys.modules.get(_TABLE)


def have_inductor_launch(name: str, count: int) -> None:
    """Enter the torch op called `name` and its inner one in inductor's table, once, where this process uses inductor.

    Args:
        name: The name of the public one.
        count: How many tensors it takes, before its parameters.
    """
    found = table()
    if found is None or name in _written:
        return
    _written.add(name)
    for defined in (name, f"_{name}"):
        codegen = found.CustomCodegen(python=partial(_write_call, defined, count))
        found.CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.tileops.{defined}.default"] = codegen


def _write_call(defined: str, count: int, node: Any, write_line: Callable[[Any], None]) -> None:
    """Write one call. Inductor gives its node, and what takes a line."""
    from torch._inductor.codegen import wrapper
    from torch._inductor.virtualized import V

    program: Any = V.graph.wrapper_code
    arguments = [*node.codegen_args(), *node.codegen_kwargs()]
    parameters = ", ".join(arguments[count:])
    in_python = type(program) in (wrapper.PythonWrapperCodegen, wrapper.SubgraphPythonWrapperCodegen)
    if not (in_python and _is_constant(parameters)):
        write_line(wrapper.ExternKernelAllocLine(program, node))  # as of an op that is not in the table
        return
    launch = f"{defined}_{zlib.crc32(parameters.encode()):08x}"
    program.add_import_once("import tileops.torch_ops")
    program.add_import_once(f"{launch} = tileops.torch_ops.launcher({defined!r}, {parameters})")
    write_line(f"{node.get_name()} = {launch}({', '.join(arguments[:count])})")


def _is_constant(parameters: str) -> bool:
    """Whether these parameters are the same in every run: no size among them that varies."""
    parsed = ast.walk(ast.parse(f"parameters({parameters})"))
    return {one.id for one in parsed if isinstance(one, ast.Name)} <= {"parameters", "torch"}
