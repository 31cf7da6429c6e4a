"""What the processes run. Each function returns nothing, or what a test wants to see, and asserts the rest.

Every process draws the same tensors from the same seeds, and compares with what one process gets from all of them.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import tileops
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from tileops import functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

CHANNELS = 4


@functools.cache
def mesh(*shape: int) -> DeviceMesh:
    """One mesh of each shape: torch does not compile calls on several that are equal."""
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(kind, shape or (dist.get_world_size(),))


def drawn(*shape: int, seed: int = 0, mean: float = 0.0) -> Tensor:
    """The same on every process."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + mean
    return values.cuda() if dist.get_backend() == "nccl" else values


def named(placement: str) -> Placement:
    """`S0`, `R` or `P`."""
    return Shard(int(placement[1:])) if placement[0] == "S" else Replicate() if placement == "R" else Partial()


def placed(value: Tensor, *placements: str, on: DeviceMesh | None = None) -> DTensor:
    """A DTensor that requires grad. Each process holds a share of a pending sum."""
    on = on or mesh()
    kinds = [named(one) for one in placements]
    if "P" in placements:
        shares = dist.get_world_size()
        return DTensor.from_local(value / shares, on, kinds, run_check=False).detach().requires_grad_()
    return distribute_tensor(value, on, kinds).requires_grad_()


def moved(mode: CommDebugMode) -> dict[str, int]:
    """What moved between processes in a block, by the names of the collectives."""
    return {re.sub(r"^.*\.|(_into)?_tensor$", "", str(op)): count for op, count in mode.get_comm_counts().items()}


def both_ways(
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
    sharded: list[DTensor],
    *,
    rtol: float = 1e-4,
    atol: float = 1e-4,
) -> dict[str, Any]:
    """Call forward and backward on DTensors and on the whole tensors in float64, and compare.

    Returns:
        What moved in each direction, and where results and the first gradient are.
    """
    whole = [one.full_tensor().detach().double().requires_grad_() for one in sharded]
    with CommDebugMode() as forward:
        y = ours(*sharded)
    expected = theirs(*whole)
    assert_close(y.full_tensor().double(), expected, rtol=rtol, atol=atol)
    assert y.shape == expected.shape
    grad = drawn(*expected.shape, seed=9)
    sharded_grad = distribute_tensor(grad, y.device_mesh, y.placements)
    with CommDebugMode() as backward:
        y.backward(sharded_grad)
    expected.backward(grad.double())
    for own, other in zip(sharded, whole):
        assert own.grad is not None
        assert other.grad is not None
        assert own.grad.dtype is own.dtype
        assert_close(own.grad.full_tensor().double(), other.grad, rtol=rtol, atol=atol)
    assert sharded[0].grad is not None
    return {
        "forward": moved(forward),
        "backward": moved(backward),
        "y": str(y.placements),
        "grad": str(sharded[0].grad.placements),
    }


# ------------------------------------------------------------------------------------------------------- row norms


def row_norm(name: str, shape: tuple[int, ...], *placements: str, mesh_of: tuple[int, ...] = ()) -> dict[str, Any]:
    on = mesh(*mesh_of)
    n = shape[-1]
    x = placed(drawn(*shape), *placements, on=on)
    affine = [placed(drawn(n, seed=seed, mean=1), *["R"] * on.ndim, on=on) for seed in (1, 2)]
    if name == "layer_norm":
        return both_ways(
            lambda x, w, b: functional.layer_norm(x, (n,), w, b),
            lambda x, w, b: F.layer_norm(x, (n,), w, b),
            [x, *affine],
        )
    return both_ways(
        lambda x, w: functional.rms_norm(x, (n,), w, 1e-5), lambda x, w: F.rms_norm(x, (n,), w, 1e-5), [x, affine[0]]
    )


def sum_and_norm(name: str, placement: str) -> dict[str, int]:
    op = getattr(tileops, name)()
    whole = [drawn(5, 4, 6), drawn(5, 4, 6, seed=1), drawn(6, seed=2)]
    sharded = [placed(one, where).detach() for one, where in zip(whole, (placement, placement, "R"))]
    with CommDebugMode() as mode:
        results = op(*sharded)
    for own, other in zip(results, op(*whole)):
        assert own.placements == results[0].placements
        assert_close(own.full_tensor(), other)
    return moved(mode)


def normalised_shapes_in_turn() -> None:
    """The axis that is sharded is a leading one in the first call, and a normalised one in the second."""
    x = placed(drawn(3, 8, 4), "S1")
    for shape in ((4,), (8, 4), (4,)):
        both_ways(
            lambda x, shape=shape: functional.layer_norm(x, shape), lambda x, shape=shape: F.layer_norm(x, shape), [x]
        )
        x.grad = None


def row_norm_without_gradients() -> None:
    x = placed(drawn(6, 8), "S0")
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            y = functional.layer_norm(x, (8,))
            assert_close(y.to_local(), F.layer_norm(x.to_local(), (8,)))
            assert y.placements == x.placements


# ------------------------------------------------------------------------------------------------------ batch norm


def batch_norm(
    shape: tuple[int, ...], *placements: str, training: bool = True, mean: float = 0.0, channels_last: bool = False,
    mesh_of: tuple[int, ...] = (), affine: bool = True,
) -> dict[str, Any]:  # fmt: skip
    on = mesh(*mesh_of)
    value = drawn(*shape, mean=mean)
    if channels_last:
        value = value.contiguous(memory_format=torch.channels_last)
    x = placed(value, *placements, on=on)
    everywhere = ["R"] * on.ndim
    parameters = [placed(drawn(CHANNELS, seed=seed, mean=1), *everywhere, on=on) for seed in (1, 2)] if affine else []
    start = torch.full_like(drawn(CHANNELS), mean), torch.ones_like(drawn(CHANNELS))
    running = [placed(one, *everywhere, on=on).detach() for one in start]
    expected_running = [one.double() for one in start]
    moved = both_ways(
        lambda x, *affine: functional.batch_norm(x, *running, *affine, training=training),
        lambda x, *affine: F.batch_norm(x, *expected_running, *affine, training=training),
        [x, *parameters],
        rtol=1e-3 if mean else 1e-4,
        atol=1e-3 if mean else 1e-4,
    )
    for own, other in zip(running, expected_running):
        assert_close(own.to_local().double(), other, rtol=1e-4, atol=1e-4)
    return moved


def an_empty_batch() -> None:
    x = placed(drawn(0, CHANNELS), "S0")
    running = [placed(drawn(CHANNELS, seed=seed), "R").detach() for seed in (1, 2)]
    before = [one.to_local().clone() for one in running]
    assert functional.batch_norm(x, *running, training=True).shape == (0, CHANNELS)
    assert functional.instance_norm(x[..., None].expand(-1, -1, 3), *running).shape == (0, CHANNELS, 3)
    assert_close([one.to_local() for one in running], before)


def sample_norm(name: str, shape: tuple[int, ...], *placements: str, running: str = "") -> dict[str, Any]:
    """Group norm, or instance norm: with running statistics that it updates, or by them."""
    x = placed(drawn(*shape, mean=1), *placements)
    parameters = [placed(drawn(CHANNELS, seed=seed, mean=1), "R") for seed in (1, 2)]
    start = [drawn(CHANNELS, seed=seed).abs() + 0.5 for seed in (3, 4)] if running else []
    kept, expected = [placed(one, "R").detach() for one in start], [one.double() for one in start]

    def norm(module: Any, statistics: list[Tensor], x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        if name == "group_norm":
            return module.group_norm(x, 2, w, b)
        return module.instance_norm(x, *(statistics or (None, None)), w, b, use_input_stats=running != "by")

    ours, theirs = functools.partial(norm, functional, kept), functools.partial(norm, F, expected)
    moved = both_ways(ours, theirs, [x, *parameters])
    for own, other in zip(kept, expected):
        assert_close(own.to_local().double(), other, rtol=1e-4, atol=1e-4)
    return moved


def modules_that_are_distributed() -> None:
    """Three steps of modules whose parameters and statistics are on every process, and of plain ones."""
    model = nn.Sequential(
        nn.Linear(8, CHANNELS),
        tileops.nn.BatchNorm1d(CHANNELS),
        tileops.nn.LayerNorm(CHANNELS),
        tileops.nn.BatchNorm1d(CHANNELS, momentum=None),
    )
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=seed))
    model = model.to(drawn(1).device)
    plain = copy.deepcopy(model)
    sharded = distribute_module(model, mesh())
    for seed in range(3):
        whole = drawn(16, 8, seed=seed)
        for one, x in ((plain, whole), (sharded, distribute_tensor(whole, mesh(), [Shard(0)]))):
            one(x).square().sum().backward()
    for own, other in zip(sharded.parameters(), plain.parameters()):
        assert_close(own.grad.full_tensor(), other.grad, rtol=1e-3, atol=1e-3)
    for own, other in zip(sharded.buffers(), plain.buffers()):
        assert_close(own.full_tensor(), other, rtol=1e-3, atol=1e-3)


# -------------------------------------------------------------------------------------------------------- compiled


def compiled(backend: str, what: str) -> None:
    """A compiled call on DTensors and its backward give what the eager ones do; statistics are written."""
    torch._dynamo.reset()

    def layer(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return functional.layer_norm(x, (CHANNELS,), w, b) * 2

    def batch(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return functional.batch_norm(x, mean, variance, w, b, training=True) * 2

    function = layer if what == "layer" else batch
    results = []
    for run in (function, torch.compile(function, fullgraph=True, backend=backend)):
        x = placed(drawn(16, CHANNELS, mean=1), "S0")
        w, b = (placed(drawn(CHANNELS, seed=seed, mean=1), "R") for seed in (1, 2))
        running = [placed(drawn(CHANNELS, seed=seed).abs(), "R").detach() for seed in (3, 4)]
        y = run(x, w, b, *running)
        y.square().sum().backward()
        results.append([y, *(one.grad for one in (x, w, b)), *running])
    for own, other in zip(*results):
        assert own.placements == other.placements
        assert_close(own.full_tensor(), other.full_tensor())


# ---------------------------------------------------------------------------------------------------- whole models


class Block(nn.Module):
    """A block before whose parts are norms, with a batch norm at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.rms = nn.RMSNorm(8)
        self.mix = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.batch = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.batch(x + self.mix(self.rms(x)))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).to(drawn(1).device)


def trained(model: nn.Module) -> list[float]:
    """Five steps, each process on batches of its own; its losses."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for step in range(5):
        x = drawn(4, 5, 8, seed=10 * step + dist.get_rank())
        loss = (model(x) - x.roll(1, 0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def wrapped(how: str, model: nn.Module) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model)
    for block in model.children():
        fully_shard(block, mesh=mesh())
    return fully_shard(model, mesh=mesh())


def training(how: str) -> None:
    """A model trains as with torch's norms, wrapped by DDP or FSDP2."""
    ours = blocks()
    assert len(tileops.nn.replace(ours).replaced) == 6
    assert_close(trained(wrapped(how, ours)), trained(wrapped(how, blocks())), rtol=1e-4, atol=1e-4)


def sequence_parallel() -> None:
    """A norm whose input is sharded along the sequence, its weights by torch's own style."""
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    norm = tileops.nn.LayerNorm(8).to(drawn(1).device)
    sharded = parallelize_module(copy.deepcopy(norm), mesh(), SequenceParallel())
    x = drawn(2, 8, 8)
    y = sharded(distribute_tensor(x, mesh(), [Shard(1)]))
    assert y.placements == (Shard(1),)
    assert_close(y.full_tensor(), norm(x))


# ---------------------------------------------------------------------------------------------------------- errors


def refused(what: str) -> str:
    """The sentence that a call is refused with."""
    x, w = placed(drawn(8, CHANNELS), "S0"), drawn(CHANNELS)
    calls: dict[str, Callable[[], Any]] = {
        "plain weight": lambda: functional.layer_norm(x, (CHANNELS,), w),
        "plain x": lambda: functional.layer_norm(drawn(8, CHANNELS), (CHANNELS,), placed(w, "R")),
        "another mesh": lambda: functional.layer_norm(
            x, (CHANNELS,), placed(w, "R", "R", on=mesh(1, dist.get_world_size()))
        ),
        "sharded statistics": lambda: functional.batch_norm(
            x, *(placed(w, "S0").detach() for _ in "mv"), training=True
        ),
        "sharded statistics of instances": lambda: functional.instance_norm(
            x[..., None].expand(-1, -1, 3), *(placed(w, "S0").detach() for _ in "mv")
        ),
        "one value": lambda: functional.batch_norm(placed(drawn(1, CHANNELS), "S0"), None, None, training=True),
        "another shape": lambda: functional.layer_norm(x, (CHANNELS,), placed(drawn(3), "R")),
    }
    try:
        calls[what]()
    except tileops.InputError as error:
        return str(error)
    raise AssertionError(f"{what} is not refused")
