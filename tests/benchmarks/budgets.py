"""The budgets of the library, each a ratio of two things timed in one run, or a count. `make bench` runs this.

Usage: python tests/benchmarks/budgets.py [--json FILE] [--check] [NAME …]
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import bounded_tables
import cold_start
import compiled_graphs
import definitions
import hit_path
import tileops
import torch
from record import Measure, Record
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

MEASURES: dict[str, Measure] = {
    "look-up": hit_path.look_up,
    "op-call": hit_path.op_call,
    "front-doors": hit_path.front_doors,
    "frames": hit_path.frames,
    "forbidden": hit_path.forbidden,
    "row-counts": bounded_tables.row_counts,
    "in-tree": bounded_tables.in_tree,
    "cycling": bounded_tables.cycling,
    "definition": definitions.definition,
    "scan": cold_start.scan,
    "imports": cold_start.imports,
    "first-call": cold_start.first_call,
    "graph-nodes": compiled_graphs.nodes,
}
STYLES = {"met": "green", "noise": "yellow", "missed": "bold red", "regressed": "bold red", "skipped": "dim"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and say with `--check` whether a budget is missed or has regressed by more than its noise."""
    options = _options(arguments)
    torch.set_num_threads(1)
    records = _measured(options.names or list(MEASURES))
    Console().print(table_of(records))
    if options.json is not None:
        options.json.write_text(json.dumps(report_of(records), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    missed = [record.budget.name for record in records if record.state in ("missed", "regressed")]
    return 1 if options.check and missed else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to measure, of: {', '.join(MEASURES)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    parser.add_argument(
        "--check", action="store_true", help="exit 1 where a budget is missed, or has regressed, by more than its noise"
    )
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(MEASURES))
    if unknown:
        parser.error(f"nothing is called {', '.join(unknown)}; known: {', '.join(MEASURES)}")
    return options


def _measured(names: Sequence[str]) -> list[Record]:
    records: list[Record] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for name in names:
            task = progress.add_task(f"measuring {name} …", total=None)
            records += MEASURES[name]()
            progress.remove_task(task)
    return records


def table_of(records: Sequence[Record]) -> Table:
    """The records as a table."""
    table = Table(title="Budgets: ratios of things timed in one run", show_lines=True)
    for heading in ("what", "measured", "budget", "usual", "noise", "spread", ""):
        table.add_column(heading, justify="left" if heading == "what" else "right", no_wrap=heading != "what")
    for record in records:
        budget = record.budget
        table.add_row(
            f"[bold]{budget.name}[/]  {budget.sentence}\n[dim]{record.detail}[/]",
            "–" if record.value is None else f"{shown(record.value)} {budget.unit}",
            f"≤ {shown(budget.most)}",
            "–" if budget.usual is None else shown(budget.usual),
            f"{budget.noise:.0%}" if budget.noise else "none",
            f"{record.spread:.0%}" if record.spread else "–",
            f"[{STYLES[record.state]}]{record.state}[/]",
        )
    return table


def shown(value: float) -> str:
    """A ratio or count with the digits that mean something."""
    return f"{value:.3g}" if value % 1 else f"{value:g}"


def report_of(records: Sequence[Record]) -> dict[str, object]:
    """The records as JSON holds them, with what they were measured on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "budgets": [record.as_json() for record in records],
    }


if __name__ == "__main__":
    tileops.backend.load(only=())  # what is installed takes no part, whichever budget comes first
    sys.exit(main())
