"""A small ResNet learns scikit-learn's digits with torch's batch norm, and with ours: the same loss at every step.

In double precision: in single, two runs that round differently part ways at the first pixel that a ReLU keeps in
one and drops in the other.

    pip install tileops-core tileops-backend-example scikit-learn
    python digits.py
"""

from __future__ import annotations

import copy

import tileops
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from sklearn.datasets import load_digits
from torch import Tensor, nn

EPOCHS = 3
BATCH = 64
LEARNING_RATE = 0.05
DTYPE = torch.float64
TOLERANCE = 1e-9


class Residual(nn.Module):
    """Two convolutions, each with a batch norm, beside a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet() -> nn.Module:
    """A ResNet for 8×8 pixels and ten digits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Residual(16, 16, stride=1),
        Residual(16, 32, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Pixels and digits, to learn from and to test with; the pixels around zero."""
    data = load_digits()
    pixels = torch.tensor(data.images, dtype=DTYPE)[:, None] / 8 - 1
    numbers = torch.tensor(data.target)
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(0))
    learn, test = order[:1536], order[1536:]
    return (pixels[learn], numbers[learn]), (pixels[test], numbers[test])


def train(model: nn.Module, pixels: Tensor, numbers: Tensor) -> list[float]:
    """Train in a fixed order; the loss of every step."""
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)
    losses: list[float] = []
    for epoch in range(EPOCHS):
        order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(epoch))
        for chosen in order.split(BATCH):
            loss = F.cross_entropy(model(pixels[chosen]), numbers[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def main() -> None:
    """Train two copies of one model, and compare their losses."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # for tensors as small as these, more threads cost more than they give
    learn, (pixels, numbers) = digits()
    theirs = resnet().to(DTYPE)
    ours = copy.deepcopy(theirs)
    report = tileops.nn.replace(ours)
    print(f"{len(report.replaced)} norms replaced, {len(report.left)} left")

    curves = [train(model, *learn) for model in (theirs, ours)]
    for step in (0, len(curves[0]) // 2, len(curves[0]) - 1):
        print(f"step {step:3}: loss {curves[0][step]:.4f} with torch's norms, {curves[1][step]:.4f} with ours")
    apart = max(abs(one - other) for one, other in zip(*curves))
    print(f"at most {apart:.1e} apart over {len(curves[0])} steps")
    if apart > TOLERANCE:
        raise SystemExit(f"the losses lie {apart:.1e} apart, more than {TOLERANCE:.0e}")

    with torch.no_grad():
        right = (ours.eval()(pixels).argmax(1) == numbers).float().mean()
    print(f"{right:.1%} of the digits it has not seen are read rightly")


if __name__ == "__main__":
    main()
