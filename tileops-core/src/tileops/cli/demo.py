"""The demonstration: photographs through three ops, and the same questions about a board that is not there."""

from __future__ import annotations

from typing import Any, cast

import torch
from rich.console import Console
from skimage import data  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor

from tileops.cli.report import run_op, show_run, show_selection
from tileops.errors import OpNotAvailableError
from tileops.norm import BatchNormFwdOp, LayerNormFwdOp, RMSNormFwdOp
from tileops.ops.op_base import Op

SIDE = 288
"""Pixels: the largest multiple of the patch side that every photograph has."""
PATCH = 16
BOARD = "h200"

Case = tuple[str, Op, tuple[Tensor | None, ...]]


def photographs() -> Tensor:
    """Four photographs that scikit-image ships, `(4, 3, 288, 288)`, float32, 0 to 1."""
    shipped = cast("Any", data)
    pictures: list[Any] = [shipped.astronaut(), shipped.coffee(), shipped.chelsea(), shipped.rocket()]
    cropped = [torch.from_numpy(picture[:SIDE, :SIDE].copy()) for picture in pictures]
    return torch.stack(cropped).permute(0, 3, 1, 2).float().contiguous() / 255


def patches(images: Tensor) -> Tensor:
    """The photographs cut into patches as a vision transformer reads them: `(4, 324, 768)`."""
    cut = images.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)
    return cut.permute(0, 2, 3, 1, 4, 5).reshape(images.shape[0], -1, images.shape[1] * PATCH * PATCH)


def cases(device: torch.device) -> list[Case]:
    """The ops of the demonstration with their tensors."""
    images = photographs().to(device)
    rows = patches(images).contiguous()
    channels, width = images.shape[1], rows.shape[-1]
    ones, zeros = torch.ones(channels, device=device), torch.zeros(channels, device=device)
    weight, bias = torch.ones(width, device=device), torch.zeros(width, device=device)
    mean, variance = images.mean(dim=(0, 2, 3)), images.var(dim=(0, 2, 3))
    return [
        ("batch norm in training", BatchNormFwdOp(training=True), (images, zeros.clone(), ones.clone(), ones, zeros)),
        ("batch norm in inference", BatchNormFwdOp(), (images, mean, variance, ones, zeros)),
        ("layer norm of patches", LayerNormFwdOp(width), (rows, weight, bias)),
        ("RMS norm of patches", RMSNormFwdOp(width, eps=1e-6), (rows, weight)),
    ]


def run_demo(console: Console) -> int:
    """Run the demonstration; the exit code."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console.print(
        f"Photographs through three ops on [bold]{device}[/]. For each: which kernel ran, and why not another."
    )
    everything = cases(device)
    for title, op, tensors in everything:
        assert tensors[0] is not None
        console.print(f"\n[bold]{title}[/]: {op} on x of shape {tuple(tensors[0].shape)}", highlight=False)
        try:
            with torch.no_grad():
                show_run(console, run_op(op, tensors))
        except OpNotAvailableError as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            return 1
    console.print(
        f"\n[bold]The same questions for an {BOARD.upper()}[/], which need not be there: nothing runs, nothing is built."
    )
    for title, op, tensors in everything:
        console.print(f"\n[bold]{title}[/]", highlight=False)
        show_selection(console, op.explain(*tensors, on=BOARD))
    return 0
