"""The `tileops` command: see what runs and why, on your own tensors or on none.

Exit codes: 0 for an answer, also where nothing serves a call that was only asked about; 1 where no kernel could
run; 2 for what was typed wrong, with one sentence and nothing written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from tileops.cli import backends
from tileops.cli.arguments import UsageError, call_on, kernel_interface, make_op, op_class
from tileops.cli.files import UNNAMED, check_writable, first_line, read_tensors, write_tensors
from tileops.cli.report import run_op, show_run, show_selection
from tileops.cli.terminal import console, print_json, stop
from tileops.errors import BackendError, InputError, ScopeError, SelectionError
from tileops.ops.op_base import Op
from tileops.scopes import selection

app = typer.Typer(
    help="Tensor operators that find their kernels: what runs, and why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(backends.app, name="backends")

DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="A torch device, or a board such as h200. Default: cuda if there is one, else cpu."),
]
PreferOption = Annotated[
    list[str] | None,
    typer.Option("--prefer", help="A backend or a kernel, such as acme or acme:row: taken first where several serve."),
]
ExcludeOption = Annotated[list[str] | None, typer.Option("--exclude", help="A backend or a kernel that is not taken.")]
RequireOption = Annotated[
    list[str] | None, typer.Option("--require", help="A backend or a kernel: nothing else is taken.")
]


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@app.command()
def demo() -> None:
    """Run photographs through batch, layer and RMS norm, and show which kernel ran and why."""
    from tileops.cli.demo import run_demo

    raise typer.Exit(run_demo(console()))


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="The op, such as BatchNormFwdOp.")],
    facts: Annotated[list[str] | None, typer.Argument(help="Facts of the call: n=32 c=64 dtype=float16 …")] = None,
    interface: Annotated[str | None, typer.Option(help="The kernel interface, where the op has several.")] = None,
    device: DeviceOption = None,
    prefer: PreferOption = None,
    exclude: ExcludeOption = None,
    require: RequireOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which kernel a call would get, and why not another. Nothing runs; the device need not be there."""
    try:
        cls = op_class(op)
        name = kernel_interface(cls, interface)
        call = call_on(device or _default_device(), cls.interfaces[name], facts or [])
        with selection(prefer=prefer, exclude=exclude, require=require):
            answer = cls.selection(name, call)
    except (UsageError, InputError, ScopeError) as error:
        stop(str(error), 2)
    if as_json:
        print_json(answer.as_json())
        return
    screen = console()
    screen.print(f"{answer.op}.{answer.interface}", style="bold")
    show_selection(screen, answer)


@app.command()
def run(
    op: Annotated[str, typer.Argument(help="The op, such as LayerNormFwdOp.")],
    more: Annotated[
        list[str] | None, typer.Argument(help="More FILE or name=value, as after --input and --param.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", help="A file of tensors, in the op's order, or ARGUMENT=FILE. Named tensors go by name."
        ),
    ] = None,
    params: Annotated[list[str] | None, typer.Option("--param", help="A parameter of the op: name=value.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the results here.")] = None,
    device: DeviceOption = None,
    prefer: PreferOption = None,
    exclude: ExcludeOption = None,
    require: RequireOption = None,
) -> None:
    """Run an op on tensors from files (.npy, .npz, .pt, .safetensors), and report which kernel ran."""
    screen = console()
    try:
        cls = op_class(op)
        files, settings = _sorted_out(cls, more or [], inputs or [], params or [])
        made = make_op(cls, settings)
        tensors = _tensors(made, files, device or _default_device())
        if out is not None:
            check_writable(out, 1)
        with torch.no_grad(), selection(prefer=prefer, exclude=exclude, require=require):
            made.check(*tensors)
            result = run_op(made, tensors)
        screen.print(f"[bold]{made}[/]", highlight=False)
        show_run(screen, result)
        if out is not None:
            write_tensors(out, result.results)
            screen.print(f"  wrote {', '.join(result.results)} to {out}")
    except SelectionError as error:
        stop(str(error), 2)
    except (UsageError, InputError, BackendError) as error:
        stop(first_line(error), 2)


def _sorted_out(cls: type[Op], more: list[str], inputs: list[str], params: list[str]) -> tuple[list[str], list[str]]:
    """Files and settings: a bare word after the options is a file, unless it sets a parameter of the op."""
    settings = [word for word in more if word.partition("=")[0] in cls.parameter_names() and "=" in word]
    return inputs + [word for word in more if word not in settings], params + settings


def _tensors(op: Op, files: list[str], device: str) -> tuple[Tensor | None, ...]:
    """The op's tensors from files: by name where there is one, else in the op's order."""
    names = op.argument_names
    found: dict[str, Tensor] = {}
    for word in files:
        label, equals, path = word.partition("=")
        label, path = (label, path) if equals and label in names else ("", word)
        for name, tensor in read_tensors(Path(path)).items():
            argument = label or name
            if argument == UNNAMED or argument not in names:
                if argument != UNNAMED:
                    raise UsageError(f"{path} holds {argument!r}, which {type(op).__name__} has no argument for; it has: "
                                     f"{', '.join(names)}")  # fmt: skip
                argument = next((known for known in names if known not in found), "")
            if argument in found or not argument:
                raise UsageError(f"{path} gives {argument or 'one tensor more than the op takes'} again; "
                                 f"{type(op).__name__} takes: {', '.join(names)}")  # fmt: skip
            found[argument] = tensor.to(device)
    if names[0] not in found:
        raise UsageError(f"{names[0]} is missing; give its file: --input x.npy")
    return tuple(found.get(name) for name in names)
