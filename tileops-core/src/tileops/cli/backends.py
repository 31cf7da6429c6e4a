"""`tileops backends`: which there are and what became of them, what is wrong with one, and how to begin one."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding

from tileops.backend import BackendRecord, State
from tileops.cli.arguments import UsageError
from tileops.cli.doctor.declarations import check_declarations
from tileops.cli.doctor.environment import check_environment, loaded_records
from tileops.cli.doctor.findings import has_errors, in_order, show_findings
from tileops.cli.doctor.imports import check_imports
from tileops.cli.doctor.metadata import check_metadata
from tileops.cli.doctor.projects import read_project
from tileops.cli.new import new_project
from tileops.cli.terminal import console, print_json, stop
from tileops.errors import BackendError, BackendLoadWarning

app = typer.Typer(help="Backends: list them, examine one, begin one.", no_args_is_help=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_backends(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show paths and tracebacks, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the installed backends: what became of each, what it registered, what it left out."""
    with _quiet():
        try:
            records = loaded_records()
        except BackendError as error:
            stop(str(error), 2)
    if as_json:
        print_json({"backends": [_as_json(record) for record in records]})
        return
    screen = console()
    for record in records:
        _show_record(screen, record, verbose=verbose)
    if not records:
        screen.print("no backend is installed; for ops on a CPU: pip install tileops-backend-example")


@contextlib.contextmanager
def _quiet() -> Any:
    """Load backends without a warning about what is about to be shown, and with what they print on stderr."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore", BackendLoadWarning)
        yield


def _as_json(record: BackendRecord) -> dict[str, Any]:
    return dataclasses.asdict(record) | {"state": record.state.value}


_STYLES = {State.LOADED: "bold green", State.FAILED: "bold red"}


def _show_record(screen: Console, record: BackendRecord, *, verbose: bool) -> None:
    screen.print(f"{record.title}: {record.state.value}", style=_STYLES.get(record.state, "bold yellow"), markup=False)
    lines = [*filter(None, [record.reason]), *record.registered, *(f"note: {note}" for note in record.notes)]
    if verbose:
        lines += [f"entry point: {value}" for value in record.entry_points]
        lines += [*filter(None, [record.path]), *record.traceback.splitlines()]
    for line in lines:
        screen.print(Padding(line, (0, 0, 0, 2)), markup=False)


@app.command()
def doctor(
    backend: Annotated[
        str | None, typer.Argument(help="A project's folder, a wheel, or the name of an installed backend.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what is wrong with a backend, without running it, or with this environment; and how to mend it.

    The exit code is 1 where there is an error.
    """
    if backend is None:
        title = f"this environment ({sys.prefix})"
        with _quiet():
            findings = in_order(check_environment())
    else:
        try:
            project = read_project(backend)
        except UsageError as error:
            stop(str(error), 2)
        title = project.title
        findings = in_order([*check_metadata(project), *check_imports(project), *check_declarations(project)])
    if as_json:
        print_json({"examined": title, "findings": [found.as_json() for found in findings]})
    else:
        show_findings(console(), title, findings)
    raise typer.Exit(1 if has_errors(findings) else 0)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="The backend's name, such as acme: for tileops-backend-acme.")],
    op: Annotated[str | None, typer.Option(help="Keep the kernels of this op only.")] = None,
    whole_op: Annotated[
        bool, typer.Option("--whole-op", help="Take over whole ops by a target instead of adding kernels.")
    ] = False,
    into: Annotated[Path, typer.Option(help="The folder to make the project's folder in.")] = Path(),
    as_json: JsonOption = False,
) -> None:
    """Write the project of a new backend: kernels that run, tests that pass, ready to be installed."""
    try:
        folder = new_project(name, op, into, whole_op=whole_op)
    except UsageError as error:
        stop(str(error), 2)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    if as_json:
        print_json({"project": str(folder), "files": files})
        return
    screen = console()
    screen.print(f"wrote {folder}", style="bold", markup=False)
    for line in ("\n".join(files), f"next: pip install -e {folder} && pytest {folder}"):
        screen.print(Padding(line, (0, 0, 0, 2)), markup=False)
