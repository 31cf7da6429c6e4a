"""What every command does the same way: where it prints, how it stops, how it gives JSON."""

from __future__ import annotations

import json
import sys
from typing import Any, NoReturn

import typer
from rich.console import Console


def console() -> Console:
    """A console as wide as the terminal; wide enough for whole lines where there is none."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=160)


def stop(message: str, code: int) -> NoReturn:
    """End the command with a sentence."""
    typer.echo(f"tileops: {message}", err=True)
    raise typer.Exit(code)


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2))
