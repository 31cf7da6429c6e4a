"""Run an op once for a reader: which kernel ran, who ships it, why not the others, how right, how fast."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from torch import Tensor

from tileops.ops.op_base import Op
from tileops.ops.signature import kernel_arguments
from tileops.verdict import Selection, Verdict

LATER_CALLS = 10
"""Calls after the first whose median is shown."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One op on one set of tensors.

    Args:
        selection: Why its kernel ran, or which target took the op over.
        results: What the op returned, absent results left out, then the arguments that it wrote.
        error: The largest absolute difference from the reference in float64; None where nothing tells it.
        first: Seconds of the first call, selection and building included.
        later: Median seconds of later calls.
    """

    selection: Selection
    results: dict[str, Tensor]
    error: float | None
    first: float
    later: float


def run_op(op: Op, tensors: Sequence[Tensor | None]) -> Run:
    """Run `op` on copies of what it may write, and compare with the reference of its interface."""
    arguments = [None if tensor is None else tensor.clone() for tensor in tensors]
    device = next(tensor.device for tensor in tensors if tensor is not None)
    returned, first = _timed(lambda: op(*arguments), device)
    selection = op.explain(*tensors)  # after the call: a target may have declined it
    values = _as_tuple(returned)
    names = result_names(op, len(values))
    results = {name: value.clone() for name, value in zip(names, values) if value is not None}
    results |= {name: value.clone() for name, value in _written(op, selection, arguments)}
    error = _error(op, selection, tensors, list(results.values()))
    later = statistics.median(_timed(lambda: op(*arguments), device)[1] for _ in range(LATER_CALLS))
    return Run(selection, results, error, first, later)


def result_names(op: Op, count: int) -> tuple[str, ...]:
    """The names of an op's results, for files and reports."""
    return ("output", *(f"output_{index}" for index in range(1, count))) if len(op.results) != count else op.results


def _as_tuple(returned: Any) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", returned) if isinstance(returned, tuple) else (returned,)


def _timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    begun = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - begun


def _written(op: Op, selection: Selection, arguments: Sequence[Tensor | None]) -> Iterator[tuple[str, Tensor]]:
    """The arguments that the call wrote."""
    writes = op.interfaces[selection.interface].writes
    for name, argument in zip(op.argument_names, arguments):
        if name in writes and argument is not None:
            yield name, argument


def _error(op: Op, selection: Selection, tensors: Sequence[Tensor | None], results: Sequence[Tensor]) -> float | None:
    """The largest absolute difference from the interface's reference, computed in float64."""
    exact = [None if tensor is None else tensor.double() for tensor in tensors]
    interface = op.interfaces[selection.interface]
    reference: Any = interface.reference(selection.call, *kernel_arguments(op, exact))
    expected = [value for value in _as_tuple(reference) if value is not None]
    if len(expected) != len(results):
        return None
    differences = ((one.double() - other).abs().max().item() for one, other in zip(results, expected) if one.numel())
    return max(differences, default=0.0)


def show_run(console: Console, run: Run) -> None:
    """Print a run: the kernel, the others with their reasons, the error, the times."""
    show_selection(console, run.selection)
    lines = [f"first call {duration(run.first)}, later calls {duration(run.later)}"]
    if run.error is not None:
        lines.insert(0, f"largest error against the reference in float64: {run.error:.1e}")
    console.print(Padding("\n".join(lines), (0, 0, 0, 2)), highlight=False)


def show_selection(console: Console, selection: Selection) -> None:
    """Print a selection: every verdict in a table, then the winner or the error."""
    for line in (f"call: {selection.call}", *(f"scope: {said}" for said in selection.scope)):
        console.print(Padding(line, (0, 0, 0, 2)), highlight=False, markup=False)
    table = Table(box=None, padding=(0, 2, 0, 2), show_header=True, header_style="dim")
    for column in ("kernel", "verdict", "class", "shipped by"):
        table.add_column(column, overflow="fold")
    for verdict in selection.verdicts:
        mark = "bold green" if verdict.key == selection.key else "" if verdict.serves else "dim"
        table.add_row(verdict.key, selection.saying(verdict), verdict.cls.__name__, _shipped_by(verdict), style=mark)
    console.print(table, markup=False)
    if selection.failure is not None:
        console.print(Padding(f"error: {selection.headline}", (0, 0, 0, 2)), style="bold red", markup=False)
    else:
        selected = selection.key or f"target {selection.target}"
        console.print(Padding(f"selected: {selected}", (0, 0, 0, 2)), style="green", highlight=False)
    for line in (*selection.remarks, *selection.advice()):
        console.print(Padding(line, (0, 0, 0, 2)), highlight=False, markup=False)


def _shipped_by(verdict: Verdict) -> str:
    return verdict.owner.distribution or "this program"


def duration(seconds: float) -> str:
    """Seconds as a reader takes them in: `1.2 s`, `3.4 ms`, `56 µs`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds / 1e-6:.0f} µs"
