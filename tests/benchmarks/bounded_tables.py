"""Budgets of what a process keeps: builds, misses, and the size of its tables."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import tileops
import torch
from hit_path import Nothing, registered
from record import Budget, Record
from tileops.backend import register_kernel_type, unregister_kernel_type
from tileops.kernels.batch_norm import BatchNormTrain, BatchNormTrainCall
from tileops.kernels.layer_norm import LayerNorm, LayerNormCall
from tileops.norm import BatchNormFwdOp, LayerNormFwdOp
from tileops.ops import entries
from tileops.ops.op_base import LOOK_UPS
from tileops_backend_example.torch_batch_norm import TorchBatchNormTrain
from tileops_backend_example.torch_layer_norm import TorchLayerNorm

BUILDS = Budget(
    "builds", "Builds of one implementation for 2,000 row counts through one layer norm or batch norm", 1, unit="builds"
)
MISSES = Budget("misses", "Misses of 2,000 row counts through one layer norm or batch norm", 12, unit="misses")
IN_TREE_BUILDS = Budget(
    "in-tree builds",
    "Build identities of one in-tree implementation for 2,000 batch sizes of one batch norm, on a stated H200",
    most=1,
    unit="builds",
)
IN_TREE_WINNERS = Budget(
    "in-tree winners",
    "In-tree implementations that 2,000 batch sizes of one batch norm select, on a stated H200",
    most=2,
    unit="kernels",
)
CYCLING = Budget("cycling", "Misses over distinct specs, when 10,000 specs are cycled through three times", most=1.0)
BOUND = Budget("bound", "Look-ups kept over the bound, after half as many specs again as the bound", most=1.0)

ROW_COUNTS = range(2, 2002)
SPECS = 10_000


class Misses:
    """Counts misses: an implementation that always refuses is asked once in each."""

    def __init__(self, op: str, interface: type[Any]) -> None:
        self.count = 0
        self._op = op

        def refusal(cls: type[Any], call: object) -> str:
            self.count += 1
            return "it only counts"

        members = {"refusal": classmethod(refusal), "devices": frozenset({"cpu"}), "forward": lambda *tensors: None}
        self._counter = type("MissCounter", (interface,), {"__module__": __name__, **members})

    @contextlib.contextmanager
    def counting(self) -> Iterator[Misses]:
        """Count in the block."""
        register_kernel_type(self._op, "miss_counter", self._counter)
        try:
            yield self
        finally:
            unregister_kernel_type(self._op, "miss_counter")


def look_ups(op: object) -> int:
    """How many look-ups the op's class remembers."""
    return len(type(op)._entries)


def row_counts() -> list[Record]:
    """Run 2,000 row counts through each op on a CPU, and count builds and misses."""
    layer_norm, batch_norm = LayerNormFwdOp(8), BatchNormFwdOp(training=True)
    with registered("LayerNormFwdOp", TorchLayerNorm), Misses("LayerNormFwdOp", LayerNorm).counting() as of_layer:
        layer_builds = _builds(lambda rows: layer_norm(torch.randn(rows, 8)))
        layer_kept = look_ups(layer_norm)
    with (
        registered("BatchNormFwdOp", TorchBatchNormTrain),
        Misses("BatchNormFwdOp", BatchNormTrain).counting() as of_batch,
    ):
        batch_builds = _builds(lambda rows: batch_norm(torch.randn(rows, 4)))
        batch_kept = look_ups(batch_norm)
    builds = f"layer norm {dict(layer_builds)}, batch norm {dict(batch_builds)}"
    misses = f"layer norm {of_layer.count} ({layer_kept} kept), batch norm {of_batch.count} ({batch_kept} kept)"
    return [
        BUILDS.measured(max((*layer_builds.values(), *batch_builds.values())), detail=builds),
        MISSES.measured(max(of_layer.count, of_batch.count, layer_kept, batch_kept), detail=misses),
    ]


def _builds(call: Callable[[int], object]) -> Counter[str]:
    """How often each implementation was built while `call` ran once for each row count."""
    built = Counter[str]()

    def watcher(key: str) -> contextlib.AbstractContextManager[None]:
        built[key] += 1
        return contextlib.nullcontext()

    tileops.clear()
    showing_build = entries.showing_build
    entries.showing_build = watcher
    try:
        for rows in ROW_COUNTS:
            call(rows)
    finally:
        entries.showing_build = showing_build
    return built


SHAPES = tuple((channels, spatial) for channels in (64, 256, 2048) for spatial in (1, 49, 3136))


def in_tree() -> list[Record]:
    """Ask what 2,000 batch sizes would build on an H200; nothing is compiled. The worst shape counts."""
    found = {shape: Counter(key for key, _ in _in_tree_identities(*shape)) for shape in SHAPES}
    builds = max(found, key=lambda shape: max(found[shape].values()))
    winners = max(found, key=lambda shape: len(found[shape]))
    return [
        IN_TREE_BUILDS.measured(max(found[builds].values()), detail=_shown(builds, found[builds])),
        IN_TREE_WINNERS.measured(len(found[winners]), detail=_shown(winners, found[winners])),
    ]


def _shown(shape: tuple[int, int], builds: Counter[str]) -> str:
    listed = ", ".join(f"{key} {count}" for key, count in sorted(builds.items()))
    return f"the worst of {len(SHAPES)} shapes, float16, C={shape[0]}, spatial={shape[1]}: {listed}"


def _in_tree_identities(channels: int, spatial: int) -> set[tuple[str, Any]]:
    """The winners with their build identities, over all batch sizes of one shape."""
    plain = (BatchNormTrainCall(torch.device("cuda", 0), n, channels, spatial, torch.float16) for n in ROW_COUNTS)
    found = set[tuple[str, Any]]()
    for call in dict.fromkeys(call.normalised().on("h200") for call in plain):
        selection = BatchNormFwdOp.selection("batch_norm_fwd_train", call)
        assert selection.winner is not None, selection
        found.add((selection.winner.key, selection.winner.cls.entry_for(call)[0]))
    return found


class OneEntry(Nothing):
    """One entry for every call, so that what is counted is look-ups."""

    @classmethod
    def entry_for(cls, call: LayerNormCall) -> tuple[str, Callable[[], OneEntry]]:
        """One build for everything."""
        return "one", lambda: cls(call)


def cycling() -> list[Record]:
    """Cycle through 10,000 specs three times; then go past the bound."""
    op, device = LayerNormFwdOp(64), torch.device("cpu")

    def ask(specs: int) -> None:
        for n in range(1, specs + 1):
            op.kernel_for("layer_norm", LayerNormCall(device=device, n=n, dtype=torch.float32))

    with registered("LayerNormFwdOp", OneEntry), Misses("LayerNormFwdOp", LayerNorm).counting() as misses:
        for _ in range(3):
            ask(SPECS)
        missed, kept = misses.count, look_ups(op)
        ask(LOOK_UPS * 3 // 2)
        most = look_ups(op)
    rate = 1 - missed / (3 * SPECS)
    return [
        CYCLING.measured(
            missed / SPECS, detail=f"{missed} misses in {3 * SPECS} calls, hit rate {rate:.1%}, {kept} kept"
        ),
        BOUND.measured(most / LOOK_UPS, detail=f"{most} kept, bound {LOOK_UPS}"),
    ]
