"""Our own kernels: the rules that backends' kernels hold to, and what selection makes of them on every known board."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from tileops.call_spec import CallSpec, size_classes
from tileops.catalogue import IN_TREE_OPS, find_op
from tileops.device import KNOWN_BOARDS, DeviceFacts
from tileops.ops.implementations import in_tree_implementations
from tileops.ops.op_base import Op
from tileops.ops.selecting import select
from tileops.testing import ConformanceTests, Limits
from tileops.verdict import IN_TREE, Selection

OPS: list[Any] = [find_op(name) for name in IN_TREE_OPS]
CUDA = torch.device("cuda", 0)
BOARDS = [board.facts for board in KNOWN_BOARDS.values()]
OTHERS = [
    *(dataclasses.replace(facts, calibration=None) for facts in BOARDS),
    DeviceFacts(arch=80, sm_count=14, smem_budget=163 << 10),  # a seventh of an A100
    DeviceFacts(arch=87, sm_count=16, smem_budget=163 << 10),
    DeviceFacts(arch=103, sm_count=160, smem_budget=227 << 10),
    DeviceFacts(arch=121, sm_count=48, smem_budget=99 << 10),
]
"""Boards that nobody measured."""


IN_TORCH = ("reference", "reference_train")
"""Implementations in plain torch: their build compiles nothing."""


class TestInTree(ConformanceTests):
    """The kernels of this distribution. tests/ops has more about what they compute on a GPU."""

    backend = IN_TREE
    limits = Limits(samples=3)


def selections(op: type[Op], interface: str, boards: Iterable[DeviceFacts]) -> Iterator[Selection]:
    """What in-tree selection says to each sample call on each board."""
    calls = [call.normalised() for call in op.interfaces[interface].sample_calls(CUDA)]
    for facts in boards:
        for call in calls:
            yield selected(op, interface, call.on(facts))


def selected(op: type[Op], interface: str, call: CallSpec) -> Selection:
    implementations = [
        one for one in in_tree_implementations(op.kernel_types) if issubclass(one.cls, op.interfaces[interface])
    ]
    return select(op.__name__, interface, implementations, call)


PLACES = [pytest.param(op, interface, id=f"{op.__name__}.{interface}") for op in OPS for interface in op.interfaces]


@pytest.mark.parametrize("boards", [BOARDS, OTHERS], ids=["known", "others"])
@pytest.mark.parametrize(("op", "interface"), PLACES)
def test_every_sample_call_has_exactly_one_winner_on_every_board(op: Any, interface: str, boards: Any) -> None:
    for selection in selections(op, interface, boards):
        assert selection.key is not None, str(selection)


@pytest.mark.parametrize(("op", "interface"), PLACES)
def test_every_implementation_wins_somewhere(op: Any, interface: str) -> None:
    keys = {key for key, cls in op.kernel_types.items() if issubclass(cls, op.interfaces[interface])}
    assert {selection.key for selection in selections(op, interface, BOARDS)} == keys


@pytest.mark.parametrize(("op", "interface"), PLACES)
def test_a_hundred_row_counts_are_at_most_two_builds(op: Any, interface: str) -> None:
    builds = defaultdict[CallSpec, set[Any]](set)
    rest_of = {call: without_sizes(call) for call in op.interfaces[interface].sample_calls(CUDA)}
    for rest, call in {rest: call for call, rest in rest_of.items()}.items():
        for counted in dict.fromkeys(with_size(call, rows).on("h200") for rows in range(2, 102)):
            selection = selected(op, interface, counted)
            assert selection.winner is not None
            if selection.key not in IN_TORCH:
                builds[rest].add((selection.key, selection.winner.cls.entry_for(counted)[0]))
    assert max(map(len, builds.values()), default=0) <= 2


def with_size(call: CallSpec, rows: int) -> Any:
    """The call with so many rows, where its spec has them."""
    return dataclasses.replace(call, **dict.fromkeys(size_classes(type(call)), rows)).normalised()


def without_sizes(call: CallSpec) -> Any:
    """What is left of a call when its rows do not count."""
    return with_size(call, 2)
