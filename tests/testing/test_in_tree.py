"""Our own kernels: the rules that backends' kernels hold to, and what selection makes of them on every known board."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tileops import (
    BatchNormBwdOp,
    BatchNormFwdOp,
    FusedAddLayerNormFwdOp,
    FusedAddRMSNormFwdOp,
    GroupNormBwdOp,
    GroupNormFwdOp,
    InstanceNormBwdOp,
    InstanceNormFwdOp,
    LayerNormBwdOp,
    LayerNormFwdOp,
    RMSNormBwdOp,
    RMSNormFwdOp,
)
from tileops.device import KNOWN_BOARDS
from tileops.ops.implementations import in_tree_implementations
from tileops.ops.op_base import Op
from tileops.ops.selecting import select
from tileops.testing import ConformanceTests, Limits
from tileops.verdict import IN_TREE, Selection

OPS = (
    BatchNormBwdOp,
    BatchNormFwdOp,
    FusedAddLayerNormFwdOp,
    FusedAddRMSNormFwdOp,
    GroupNormBwdOp,
    GroupNormFwdOp,
    InstanceNormBwdOp,
    InstanceNormFwdOp,
    LayerNormBwdOp,
    LayerNormFwdOp,
    RMSNormBwdOp,
    RMSNormFwdOp,
)
CUDA = torch.device("cuda", 0)


class TestInTree(ConformanceTests):
    """The kernels of this distribution. tests/ops has more about what they compute on a GPU."""

    backend = IN_TREE
    limits = Limits(samples=3)


def selections(op: type[Op], interface: str) -> Iterator[Selection]:
    """What in-tree selection says to each sample call on each known board."""
    implementations = [
        one for one in in_tree_implementations(op.kernel_types) if issubclass(one.cls, op.interfaces[interface])
    ]
    for board in KNOWN_BOARDS:
        for call in op.interfaces[interface].sample_calls(CUDA):
            yield select(op.__name__, interface, implementations, call.normalised().on(board))


PLACES = [pytest.param(op, interface, id=f"{op.__name__}.{interface}") for op in OPS for interface in op.interfaces]


@pytest.mark.parametrize(("op", "interface"), PLACES)
def test_every_sample_call_has_exactly_one_winner_on_every_known_board(op: Any, interface: str) -> None:
    for selection in selections(op, interface):
        assert selection.key is not None, str(selection)


@pytest.mark.parametrize(("op", "interface"), PLACES)
def test_every_implementation_wins_somewhere(op: Any, interface: str) -> None:
    keys = {key for key, cls in op.kernel_types.items() if issubclass(cls, op.interfaces[interface])}
    assert {selection.key for selection in selections(op, interface)} == keys
