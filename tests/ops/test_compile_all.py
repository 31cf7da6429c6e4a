"""`make compile-all` builds one of everything, and says what fails and what spills."""

from __future__ import annotations

import logging
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tileops.catalogue import IN_TREE_OPS, find_op
from tileops.device import KNOWN_BOARDS

sys.path.insert(0, str(Path(__file__).parent))  # it is a script

import compile_all  # noqa: E402
from compile_all import Job, Outcome  # noqa: E402

SAID = """
PTXAS verbose output:
ptxas info    : Compiling entry function 'first_kernel' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'second_kernel' for 'sm_90a'
    16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
"""


def test_every_implementation_is_built_on_a_board_of_each_architecture() -> None:
    found = {job.kind for job in compile_all.jobs(tuple(IN_TREE_OPS), compile_all.BOARDS, 1)}
    assert found == {
        (name, key, board)
        for op in map(find_op, IN_TREE_OPS)
        for name, interface in op.interfaces.items()
        for key, kernel in op.kernel_types.items()
        for board in compile_all.BOARDS
        if issubclass(kernel, interface)
        and (kernel.supported_archs is None or KNOWN_BOARDS[board].facts.arch in kernel.supported_archs)
    }


def test_no_identity_is_built_twice_and_the_first_of_each_kind_come_first() -> None:
    work = compile_all.jobs(("RMSNormFwdOp",), ("a100", "h200"))
    builds = [(job.kind, find_op(job.op).kernel_types[job.key].entry_for(job.call)[0]) for job in work]
    assert len(set(builds)) == len(builds)
    assert len({job.kind for job in work[:4]}) == 4


def test_what_the_assembler_says_of_spills_is_kept_by_function() -> None:
    assert compile_all.spills_in(SAID) == ("second_kernel: 24 bytes stored, 32 loaded",)


def test_after_the_deadline_no_build_begins() -> None:
    work = compile_all.jobs(("RMSNormFwdOp",), ("h200",))
    assert list(compile_all.outcomes_of(work, 1, -math.inf)) == []


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Job:
    def entry_for(call: Any) -> Any:
        raise ValueError("line one\nk.cu(3): error: no such thing\n2 errors")

    kernel = find_op("RMSNormFwdOp").kernel_types["held_row"]
    (job,) = compile_all.jobs(("RMSNormFwdOp",), ("h200",), 1)[:1]
    monkeypatch.setattr(kernel, "entry_for", entry_for)
    monkeypatch.setitem(sys.modules, "tilelang", SimpleNamespace(logger=logging.getLogger(__name__)))
    return job


def test_a_build_that_fails_is_an_outcome_with_the_compilers_error(failing: Job) -> None:
    assert compile_all.built(failing) == Outcome(problem="ValueError: k.cu(3): error: no such thing")


def test_tables_show_how_many_were_tried_what_failed_and_what_spills() -> None:
    first, second, third = compile_all.jobs(("RMSNormFwdOp",), ("h200",))[:3]
    outcomes = {first: Outcome(problem="KeyError: 1"), second: Outcome(spills=("f: 8 bytes stored, 8 loaded",))}
    with (console := Console(width=200)).capture() as shown:
        for table in compile_all.tables([first, second, third], outcomes):
            console.print(table)
    text = shown.get()
    assert "KeyError: 1" in text
    assert "f: 8 bytes stored, 8 loaded" in text
    assert "│ 2      │ 1     │ 1      │ 0" in text
