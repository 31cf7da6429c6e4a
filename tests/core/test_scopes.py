"""Scopes: what a program says about whose kernels are taken, where it holds, and by which names."""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tileops
import torch
from tileops import IN_TREE, AmbiguousDispatchError, BuildError, OpNotAvailableError, ScopeError, scopes
from tileops.backend import load, status
from tileops.backend.records import BackendRecord, State
from tileops.backend.registration import commit, registry
from tileops.backend.statements import Statement
from tileops.backend.units import Unit
from tileops.verdict import Owner
from torch.utils.checkpoint import checkpoint


def ship(backend: str, op: str = "FakeOp", /, **kernels: type[Any]) -> None:
    """Load a backend with these kernels for one op."""
    owner = Owner(backend, f"tileops-backend-{backend} 1.0")
    unit = Unit(owner)
    for key, cls in kernels.items():
        unit = unit.with_kernel(op, key, cls)
    commit(
        unit,
        after=registry().units.get(backend),
        record=BackendRecord(backend, f"tileops-backend-{backend}", "1.0", registered=unit.lines()),
    )


@pytest.fixture
def op(fake: Any) -> Any:
    """An op with an in-tree kernel that two backends overlap with, each in one kernel of its own."""
    made = fake.op({"ours": fake.kernel("Ours", over=("acme:row", "zeta:row"))})
    ship("acme", row=fake.kernel("Acme"))
    ship("zeta", row=fake.kernel("Zeta"))
    return made()


X = torch.ones(3)


def ran(op: Any) -> str:
    """Which kernel runs."""
    return op(X)[0]


def chosen(op: Any, **said: Any) -> str | None:
    """The key that is selected in a scope."""
    with tileops.selection(**said):
        return op.explain(X).key


# ---------------------------------------------------------------------------------------------- what a scope does


def test_a_scope_says_whose_kernel_runs_and_only_while_it_is_open(op: Any) -> None:
    assert ran(op) == "Ours"
    with tileops.selection(prefer="acme"):
        assert ran(op) == "Acme"
    assert ran(op) == "Ours"


@pytest.mark.parametrize("name", ["zeta", "zeta:row", "tileops-backend-zeta"])
def test_a_backend_goes_by_its_name_its_distributions_and_a_kernel_by_its_full_key(op: Any, name: str) -> None:
    assert chosen(op, prefer=name) == "zeta:row"


@pytest.mark.parametrize("name", [IN_TREE, "ours", "in-tree:ours"])
def test_in_tree_kernels_go_by_one_name_and_by_their_bare_keys(op: Any, name: str) -> None:
    assert chosen(op, exclude=name, prefer="zeta") == "zeta:row"
    assert chosen(op, require=name) == "ours"


def test_several_preferred_names_are_an_order(op: Any) -> None:
    assert chosen(op, prefer=["zeta", "acme"]) == "zeta:row"
    assert chosen(op, prefer=("acme", "zeta")) == "acme:row"
    assert chosen(op, prefer=("acme", "zeta"), exclude="acme") == "zeta:row"


def test_any_of_several_required_names_will_do(op: Any) -> None:
    assert chosen(op, require=["acme", "zeta"], exclude="acme") == "zeta:row"


def test_no_scope_makes_a_kernel_run_where_it_refuses_or_is_not_available(fake: Any) -> None:
    op = fake.op({"ours": fake.kernel()})()
    ship("acme", row=fake.kernel(refuse="not today"), far=fake.kernel(devices=("cuda",)))
    assert chosen(op, prefer="acme") == "ours"
    with tileops.selection(require="acme"), pytest.raises(OpNotAvailableError) as raised:
        op(X)
    told = str(raised.value)
    for part in ("not today", "runs on cuda, not on cpu", 'not what tileops.selection(require="acme") requires'):
        assert part in told
    assert "take back what a scope says" in told


def test_a_kernel_that_a_scope_leaves_out_is_not_asked(fake: Any) -> None:
    op = fake.op({"ours": fake.kernel("Ours"), "other": fake.kernel("Other")})()
    assert chosen(op, exclude="other") == "ours"
    assert chosen(op, require="ours") == "ours"
    assert "Other" not in fake.asked("refusal")


def test_what_is_left_out_still_orders_the_others(fake: Any) -> None:
    kernels = {"first": fake.kernel(over=("second",)), "second": fake.kernel(over=("third",)), "third": fake.kernel()}
    assert chosen(fake.op(kernels)(), exclude="second") == "first"


def test_explain_says_what_is_in_force_and_what_it_did(op: Any) -> None:
    with tileops.selection(prefer="zeta"), tileops.selection(exclude="acme"):
        told = op.explain(X)
    assert told.scope == ('tileops.selection(exclude="acme")', 'tileops.selection(prefer="zeta")')
    lines = str(told).splitlines()
    assert lines[2:4] == [f"  scope: {said}" for said in told.scope]
    said = {line.split()[0]: line for line in lines[4:]}
    assert 'excluded by tileops.selection(exclude="acme")' in said["acme:row"]
    assert 'selected, preferred by tileops.selection(prefer="zeta")' in said["zeta:row"]
    assert "another is preferred over it" in said["ours"]
    assert told.as_json()["scope"] == list(told.scope)


def test_explain_says_who_required_the_winner(op: Any) -> None:
    with tileops.selection(require=["acme", "zeta"], op="FakeOp"), tileops.selection(exclude="zeta"):
        winner = op.explain(X).winner
    assert winner.favour == 'required by tileops.selection(require=("acme", "zeta"), op="FakeOp")'


# ------------------------------------------------------------------------------------------------- ambiguity


@pytest.fixture
def overlapping(fake: Any) -> Any:
    """An op that two vendors overlap for; neither knows of the other."""
    made = fake.op({"ours": fake.kernel("Ours")})
    ship("acme", row=fake.kernel("Acme", over=(IN_TREE,)))
    ship("zeta", row=fake.kernel("Zeta", over=(IN_TREE,)), slow=fake.kernel("Slow", refuse="only at night"))
    return made()


def test_an_overlap_of_two_vendors_names_both_wheels_and_the_lines_that_settle_it(overlapping: Any) -> None:
    with pytest.raises(AmbiguousDispatchError) as raised:
        overlapping(X)
    told = str(raised.value).splitlines()
    assert "tileops-backend-acme 1.0, tileops-backend-zeta 1.0" in told[-2]
    line = told[-1].strip()
    assert line == (
        'choose one: with tileops.selection(prefer="acme"): …, '
        'or for the process tileops.set_default_selection(prefer="acme")'
    )
    scope, _, default = line.partition(": …, or for the process ")
    with eval(scope.removeprefix("choose one: with "), {"tileops": tileops}):
        assert ran(overlapping) == "Acme"
    eval(default, {"tileops": tileops})
    assert ran(overlapping) == "Acme"


def test_the_line_that_settles_an_overlap_names_a_key_where_the_backend_has_several_that_serve(fake: Any) -> None:
    op = fake.op({})()
    ship("acme", one=fake.kernel(over=("two",)), two=fake.kernel())
    ship("zeta", row=fake.kernel())
    assert 'tileops.selection(prefer="acme:one")' in str(op.explain(X))
    assert chosen(op, prefer="acme:one") == "acme:one"


def test_an_overlap_within_one_backend_is_its_authors_to_settle_and_the_callers_meanwhile(fake: Any) -> None:
    op = fake.op({})()
    ship("acme", one=fake.kernel(), two=fake.kernel())
    told = str(op.explain(X))
    assert "only acme can settle it" in told
    assert 'tileops.selection(prefer="acme:one")' in told


def test_a_build_error_of_a_backend_says_the_lines_that_exclude_it(fake: Any) -> None:
    op = fake.op({"ours": fake.kernel("Ours")})()

    def entry(cls: Any, call: Any) -> Any:
        raise OSError("no compiler")

    ship("acme", row=fake.kernel(entry=entry, over=(IN_TREE,)))
    with pytest.raises(BuildError, match='tileops.selection.exclude="acme".*TILEOPS_BACKENDS=-acme'):
        op(X)
    with tileops.selection(exclude="acme"):
        assert ran(op) == "Ours"


# ----------------------------------------------------------------------------------------------------- nesting


def test_the_inner_preference_comes_first_and_the_outer_one_is_next(op: Any) -> None:
    with tileops.selection(prefer="acme"):
        with tileops.selection(prefer="zeta"):
            assert ran(op) == "Zeta"
            assert chosen(op, exclude="zeta") == "acme:row"
        assert ran(op) == "Acme"


def test_an_inner_scope_takes_no_exclusion_and_no_requirement_back(op: Any) -> None:
    with tileops.selection(exclude="acme"):
        assert chosen(op, prefer="acme") == "ours"
        assert chosen(op, require="acme") is None
    with tileops.selection(require="acme"):
        assert chosen(op, require="zeta") is None
        assert chosen(op, require="acme:row") == "acme:row"


def test_a_scope_that_says_nothing_changes_nothing(op: Any) -> None:
    with tileops.selection():
        assert scopes.active() is None
    with tileops.selection(prefer="acme"):
        outer = scopes.active()
        with tileops.selection(prefer=[], exclude=None):
            assert scopes.active() is outer


def test_a_scope_is_closed_by_an_exception_too(op: Any) -> None:
    with pytest.raises(ZeroDivisionError), tileops.selection(prefer="acme"):
        raise ZeroDivisionError
    assert scopes.active() is None
    assert ran(op) == "Ours"


def test_one_scope_object_may_be_entered_again_also_within_itself(op: Any) -> None:
    scope = tileops.selection(prefer="acme")
    for _ in range(2):
        with scope:
            with scope:
                assert ran(op) == "Acme"
            assert ran(op) == "Acme"
        assert ran(op) == "Ours"


def test_a_scope_object_adds_to_whatever_is_open_where_it_is_entered(op: Any) -> None:
    scope = tileops.selection(exclude="ours")
    with tileops.selection(prefer="acme"), scope:
        assert ran(op) == "Acme"
    with tileops.selection(prefer="zeta"), scope:
        assert ran(op) == "Zeta"


def test_a_decorated_function_runs_in_the_scope_whenever_it_is_called(op: Any) -> None:
    @tileops.selection(prefer="acme")
    def run(depth: int) -> list[str]:
        return [ran(op)] + (run(depth - 1) if depth else [])

    assert run(20) == ["Acme"] * 21
    assert fake_look_ups(op) == 1
    assert ran(op) == "Ours"


def fake_look_ups(op: Any) -> int:
    return len(type(op)._entries)


def test_a_decorated_coroutine_function_runs_in_the_scope_to_its_end(op: Any) -> None:
    @tileops.selection(prefer="acme")
    async def run() -> tuple[str, str]:
        before = ran(op)
        await asyncio.sleep(0)
        return before, ran(op)

    assert asyncio.run(run()) == ("Acme", "Acme")


def test_a_generator_is_not_decorated_because_its_caller_would_be_in_the_scope_too() -> None:
    def steps() -> Iterator[int]:
        yield 1

    with pytest.raises(ScopeError, match=r"steps is a generator, .*: open the scope inside it"):
        tileops.selection(prefer="acme")(steps)


# -------------------------------------------------------------------------------------------- threads and tasks


def test_what_one_thread_opens_does_not_concern_another(op: Any) -> None:
    both = threading.Barrier(2)
    outcomes: dict[str, list[str]] = {}

    def run(backend: str) -> None:
        both.wait(timeout=30)
        outcomes[backend] = []
        for _ in range(20):
            with tileops.selection(prefer=backend):
                outcomes[backend].append(ran(op))

    threads = [threading.Thread(target=run, args=(backend,)) for backend in ("acme", "zeta")]
    for thread in threads:
        thread.start()
    assert ran(op) == "Ours"
    for thread in threads:
        thread.join()
    assert outcomes == {"acme": ["Acme"] * 20, "zeta": ["Zeta"] * 20}


def test_tasks_that_take_turns_keep_their_own_scopes(op: Any) -> None:
    async def run(backend: str) -> list[str]:
        names = []
        with tileops.selection(prefer=backend):
            for _ in range(5):
                names.append(ran(op))
                await asyncio.sleep(0)
        return [*names, ran(op)]

    async def together() -> list[list[str]]:
        return await asyncio.gather(run("acme"), run("zeta"))

    assert asyncio.run(together()) == [["Acme"] * 5 + ["Ours"], ["Zeta"] * 5 + ["Ours"]]


def test_a_task_begins_in_the_scope_that_it_was_made_in(op: Any) -> None:
    async def name() -> str:
        return ran(op)

    async def run() -> str:
        with tileops.selection(prefer="acme"):
            task = asyncio.create_task(name())
        assert ran(op) == "Ours"
        return await task

    assert asyncio.run(run()) == "Acme"


def test_one_scope_object_serves_many_threads_at_once(op: Any) -> None:
    scope, both, names = tileops.selection(prefer="acme"), threading.Barrier(8), list[str]()

    def run() -> None:
        for _ in range(10):
            with scope:
                both.wait(timeout=30)
                names.append(ran(op))
            both.wait(timeout=30)
            names.append(ran(op))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names) == ["Acme"] * 80 + ["Ours"] * 80


# -------------------------------------------------------------------------------------------------- one op alone


def test_a_scope_for_one_op_concerns_it_and_its_subclasses_alone(fake: Any) -> None:
    first, second = fake.op({"a": fake.kernel(), "b": fake.kernel(over=("a",))}, name="First"), fake.op(
        {"a": fake.kernel(), "b": fake.kernel(over=("a",))}, name="Second"
    )  # fmt: skip
    sub = fake.op(name="SubOfFirst", base=first)
    with tileops.selection(prefer="a", op="First"):
        assert [cls().explain(X).key for cls in (first, sub, second)] == ["a", "a", "b"]
        assert second().explain(X).scope == ()
    with tileops.selection(prefer="a", op="SubOfFirst"):
        assert [cls().explain(X).key for cls in (first, sub, second)] == ["b", "a", "b"]


def test_a_name_is_looked_for_in_the_op_that_the_scope_is_for(fake: Any) -> None:
    fake.op({"a": fake.kernel()}, name="First")
    fake.op({"b": fake.kernel()}, name="Second")
    with pytest.raises(ScopeError, match=r"'b'.*kernels and targets of First: a$"), tileops.selection(
        prefer="b", op="First"
    ):  # fmt: skip
        pass


# ---------------------------------------------------------------------------------------------- look-ups and entries


def test_equal_scopes_share_look_ups_and_every_scope_shares_entries(fake: Any) -> None:
    op = fake.op({"a": fake.kernel("A"), "b": fake.kernel("B", over=("a",))})()
    first = op.kernel_for("fake", fake.call())
    for _ in range(3):
        with tileops.selection(prefer="b"):
            assert op.kernel_for("fake", fake.call()) is first
    assert fake.asked("refusal").count("B") == 2
    assert fake.asked("built") == ["B"]


def test_a_hit_in_a_scope_asks_nobody_anything(op: Any, fake: Any) -> None:
    with tileops.selection(prefer="acme"):
        ran(op)
        fake.log.clear()
        assert ran(op) == "Acme"
    assert fake.log == [("ran", "Acme")]


def test_every_question_an_op_answers_honours_the_scope(op: Any, fake: Any) -> None:
    with tileops.selection(prefer="zeta"):
        assert op.prepare(X).key == "zeta:row"
        assert op.prepare("fake", fake.call(9)).key == "zeta:row"
        assert op.key_for("fake", fake.call()) == "zeta:row"
        assert type(op).selection("fake", fake.call()).key == "zeta:row"
        assert type(op.kernel_for("fake", fake.call())).__name__ == "Zeta"


def test_a_registration_takes_effect_in_a_scope_that_is_open_already(op: Any, fake: Any) -> None:
    with tileops.selection(prefer="local"):
        assert ran(op) == "Ours"
        tileops.register_kernel_type("FakeOp", "mine", fake.kernel("Mine"))
        assert ran(op) == "Mine"
        tileops.unregister_kernel_type("FakeOp", "mine")
        assert ran(op) == "Ours"


def test_an_entry_is_built_as_without_a_scope_because_others_share_it(fake: Any) -> None:
    inner = fake.op({"a": fake.kernel("A", over=("b",)), "b": fake.kernel("B")}, name="Inner")()

    def entry(cls: Any, call: Any) -> Any:
        return call.n, lambda: inner.kernel_for("fake", call)

    outer = fake.op({"composed": fake.kernel(entry=entry)}, name="Outer")()
    with tileops.selection(prefer="b", op="Inner"):
        assert ran(outer) == "A"
        assert ran(inner) == "B"


def test_scopes_that_nobody_holds_are_forgotten(fake: Any) -> None:
    kernels = {f"k{i}": fake.kernel() for i in range(6)}
    op = fake.op(kernels)()
    gc.collect()
    before = len(scopes._interned)
    for order in itertools.permutations(kernels):
        with tileops.selection(prefer=order):
            op.explain(X)
    gc.collect()
    assert len(scopes._interned) <= before


def test_look_ups_under_many_scopes_stay_bounded(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tileops.ops.op_base.LOOK_UPS", 16)
    kernels = {f"k{i}": fake.kernel(entry=lambda cls, call: (0, lambda: cls(call))) for i in range(5)}
    op = fake.op(kernels)()
    gc.collect()
    before = len(scopes._interned)
    for order in itertools.permutations(kernels):
        with tileops.selection(prefer=order):
            op.kernel_for("fake", fake.call())
    gc.collect()
    assert len(type(op)._entries) <= 16
    assert len(scopes._interned) <= before + 16


def test_a_miss_during_a_capture_shows_the_line_that_prepares_it_in_its_scope(
    op: Any, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tileops.ops.op_base.is_capturing", lambda _: True)
    in_two = (tileops.selection(prefer="acme"), tileops.selection(exclude="zeta"))
    with in_two[0], in_two[1], pytest.raises(tileops.CaptureError) as raised:
        op(X)
    line = str(raised.value).splitlines()[-1].strip()
    monkeypatch.undo()
    exec(line, {"tileops": tileops, "FakeOp": type(op), "FakeCall": fake.Call, "torch": torch})
    assert fake.asked("built") == ["Acme"]


# ------------------------------------------------------------------------------------------- the process default


def test_the_process_default_takes_effect_at_the_next_call_of_every_instance(op: Any) -> None:
    other = type(op)()
    assert (ran(op), ran(other)) == ("Ours", "Ours")
    tileops.set_default_selection(prefer="acme")
    assert (ran(op), ran(other)) == ("Acme", "Acme")
    assert op.explain(X).scope == ('tileops.set_default_selection(prefer="acme")',)
    tileops.set_default_selection()
    assert (ran(op), ran(other)) == ("Ours", "Ours")


def test_the_process_default_holds_in_every_thread_around_every_scope(op: Any) -> None:
    tileops.set_default_selection(prefer="acme", exclude="ours")
    names: list[str] = []
    thread = threading.Thread(target=lambda: names.append(ran(op)))
    thread.start()
    thread.join()
    assert names == ["Acme"]
    assert chosen(op, prefer="zeta") == "zeta:row"
    assert chosen(op, prefer="ours") == "acme:row"


def test_the_default_of_one_op_comes_before_that_of_every_op_and_is_replaced_alone(fake: Any) -> None:
    kernels = {"a": fake.kernel(), "b": fake.kernel(), "c": fake.kernel()}
    first, second = fake.op(kernels, name="First")(), fake.op(kernels, name="Second")()

    def keys() -> tuple[str | None, str | None]:
        return first.explain(X).key, second.explain(X).key

    tileops.set_default_selection(op="First", prefer="b")
    tileops.set_default_selection(prefer="a")
    assert keys() == ("b", "a")
    tileops.set_default_selection(op="First", prefer="c")
    assert keys() == ("c", "a")
    tileops.set_default_selection(op="First")
    assert keys() == ("a", "a")
    tileops.set_default_selection(op="Second", prefer="b")
    tileops.set_default_selection(prefer=None)
    assert keys() == (None, None)
    assert registry().default == ()


def test_a_default_that_cannot_be_leaves_the_former_one(op: Any) -> None:
    tileops.set_default_selection(prefer="acme")
    with pytest.raises(ScopeError, match=r"tileops.set_default_selection\(prefer=\"acne\"\): nothing is called 'acne'"):
        tileops.set_default_selection(prefer="acne")
    assert ran(op) == "Acme"


def test_a_default_outlives_later_registrations(op: Any, fake: Any) -> None:
    tileops.set_default_selection(prefer="acme")
    tileops.register_kernel_type("FakeOp", "mine", fake.kernel("Mine", over=("acme:row", "ours")))
    assert ran(op) == "Acme"


# --------------------------------------------------------------------------------------------------------- names


def refusal(**said: Any) -> str:
    with pytest.raises(ScopeError) as raised, tileops.selection(**said):
        pass
    return str(raised.value)


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        ({"prefer": "acne"}, ["'acne'", "backends: acme, in-tree, local, zeta", "did you mean 'acme'?"]),
        ({"exclude": "our"}, ["'our'", "did you mean 'ours'?"]),
        ({"require": ["acme", "acme:rwo"]}, ["'acme:rwo'", "acme:row; did you mean 'acme:row'?"]),
        ({"prefer": "in-tree:row"}, ["'in-tree:row'", "ours"]),
        ({"prefer": ""}, ["''"]),
        ({"prefer": "acme", "op": "FakeOpp"}, ["no op is called 'FakeOpp'", "did you mean 'FakeOp'?"]),
        ({"prefer": 3}, ['prefer=3 is neither a name nor a list of names; write prefer="acme"']),
        ({"require": {"acme"}}, ["require={'acme'} is neither"]),
        ({"exclude": [None]}, ["exclude=[None] is neither"]),
    ],
)
def test_a_name_that_nothing_has_is_an_error_with_the_known_ones(op: Any, said: Any, parts: list[str]) -> None:
    told = refusal(**said)
    for part in parts:
        assert part in told
    assert scopes.active() is None


def test_the_keys_of_one_backend_alone_are_listed_where_the_backend_is_known(op: Any) -> None:
    told = refusal(prefer="acme:wide")
    assert "acme:row" in told
    assert "zeta" not in told
    assert "backends" not in told


def test_a_target_is_named_as_a_kernel_is(op: Any) -> None:
    tileops.register_kernel_builder("FakeOp", "whole", lambda x: None)
    with tileops.selection(exclude="local:whole"):
        scope = scopes.in_effect(type(op))
    assert scope.admits("local", "whole")[1] == 'excluded by tileops.selection(exclude="local:whole")'
    assert scope.admits("local", "other")[1] is None


def test_of_a_backend_and_an_in_tree_key_with_one_name_the_backend_is_meant(fake: Any) -> None:
    op = fake.op({"row": fake.kernel(over=("column:wide",)), "column": fake.kernel()})()
    ship("column", wide=fake.kernel(over=("column",)))
    assert chosen(op, prefer="column") == "column:wide"
    assert chosen(op, prefer="in-tree:column") == "column"


def test_a_key_for_an_op_that_this_release_does_not_have_can_be_named_with_its_op(fake: Any) -> None:
    ship("acme", "LaterOp", row=fake.kernel())
    with tileops.selection(prefer="acme:row", op="LaterOp"):
        assert scopes.active() is not None


# --------------------------------------------------------------------------------------------- loading backends

REGISTERS = """
    import torch
    from tileops.backend import register_kernel_type
    from tileops.kernels.layer_norm import LayerNorm

    class Row(LayerNorm):
        devices = frozenset({"cpu"})

        def forward(self, x, weight, bias):
            return torch.full_like(x, 7)

    register_kernel_type("LayerNormFwdOp", "row", Row)
"""


def test_a_scope_loads_backends_when_it_is_opened_and_not_before(site: Any, fresh: None) -> None:
    module = site.backend("acme", REGISTERS)
    scope = tileops.selection(prefer="acme")
    assert module not in sys.modules
    with scope:
        assert module in sys.modules
        assert tileops.LayerNormFwdOp(4)(torch.ones(2, 4)).unique().tolist() == [7]


@pytest.mark.parametrize("part", ["prefer", "require"])
def test_a_backend_that_failed_to_load_is_not_to_be_had_and_the_error_says_why(
    site: Any, fresh: None, part: str
) -> None:
    site.backend("acme", "raise OSError('libacme.so.3 is missing')")
    with pytest.warns(tileops.BackendLoadWarning):
        load()
    for name in ("acme", "acme:row"):
        told = refusal(**{part: name})
        assert (
            "backend acme (tileops-backend-acme 1.0) takes no part (failed): OSError: libacme.so.3 is missing" in told
        )


def test_a_backend_that_is_disabled_is_not_to_be_had_and_may_be_excluded(
    site: Any, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.backend("acme", REGISTERS)
    monkeypatch.setenv("TILEOPS_BACKENDS", "")
    assert "takes no part (disabled): TILEOPS_BACKENDS='' leaves it out" in refusal(prefer="acme")
    with tileops.selection(exclude=["acme", "acme:row"]):
        assert tileops.LayerNormFwdOp(4).explain(torch.ones(2, 4)).scope


def test_a_backend_that_opens_a_scope_while_it_loads_fails_with_the_reason(site: Any, fresh: None) -> None:
    site.backend("acme", "import tileops\nwith tileops.selection(prefer='acme'): pass")
    with pytest.warns(tileops.BackendLoadWarning, match="backends are being loaded; say this where ops are called"):
        load()
    assert next(record for record in status() if record.name == "acme").state is State.FAILED


# --------------------------------------------------------------------------------------------------- torch


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def layer_norm(no_backends: None) -> Any:
    """Layer norm with two kernels on CPU that log their names; `one` wins."""
    from tileops.kernels.layer_norm import LayerNorm

    def kernel(name: str, over: frozenset[str]) -> type[Any]:
        def forward(self: Any, x: Any, weight: Any, bias: Any) -> Any:
            log.append(name)
            return torch.full_like(x, float(len(log)))

        return type(name, (LayerNorm,), {"forward": forward, "devices": frozenset({"cpu"}), "preferred_over": over})

    log: list[str] = []
    tileops.register_kernel_type("LayerNormFwdOp", "one", kernel("one", frozenset({"two"})))
    tileops.register_kernel_type("LayerNormFwdOp", "two", kernel("two", frozenset()))
    made = tileops.LayerNormFwdOp(4)
    made.log = log
    return made


def test_calls_that_repeat_in_turns_in_two_scopes_get_their_own_kernels(layer_norm: Any) -> None:
    x = torch.randn(2, 4)
    for _ in range(3):
        layer_norm(x)
        with tileops.selection(prefer="local:two"):
            layer_norm(x)
    assert layer_norm.log == ["one", "two"] * 3
    assert len(layer_norm._repeats.known) == 2


def test_a_default_reaches_calls_that_repeat(layer_norm: Any) -> None:
    x = torch.randn(2, 4)
    for name in ("one", "two", "one"):
        tileops.set_default_selection(prefer=f"local:{name}")
        layer_norm(x)
        layer_norm(x)
    assert layer_norm.log == ["one", "one", "two", "two", "one", "one"]


def test_a_compiled_graph_picks_its_kernels_in_the_scope_that_it_is_called_in(layer_norm: Any, dynamo: None) -> None:
    compiled = torch.compile(lambda x: layer_norm(x) * 2, backend="eager", fullgraph=True)
    x = torch.randn(2, 4)
    compiled(x)
    with tileops.selection(prefer="local:two"):
        compiled(x)
    compiled(x)
    assert layer_norm.log == ["one", "two", "one"]


def in_a_block(op: Any) -> Callable[..., Any]:
    def run(x: Any) -> Any:
        with tileops.selection(prefer="local:two"):
            return op(x) * 2

    return run


def in_a_function(op: Any) -> Callable[..., Any]:
    return tileops.selection(prefer="local:two")(lambda x: op(x) * 2)


@pytest.mark.parametrize("within", [in_a_block, in_a_function])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_scope_within_a_compiled_function_holds_or_is_refused(
    layer_norm: Any, dynamo: None, within: Any, fullgraph: bool
) -> None:
    compiled = torch.compile(within(layer_norm), backend="eager", fullgraph=fullgraph)
    if fullgraph:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled(torch.randn(2, 4))
        assert layer_norm.log == []
    else:
        compiled(torch.randn(2, 4))
        assert layer_norm.log == ["two"]
    assert scopes.active() is None


def test_a_scope_can_be_put_in_force_again_in_place_of_another(op: Any) -> None:
    with tileops.selection(prefer="acme"):
        scope = scopes.active()
    with tileops.selection(prefer="zeta", exclude="acme"):
        for _ in range(2):
            with scopes.in_force(scope):
                assert ran(op) == "Acme"
        with scopes.in_force(None):
            assert ran(op) == "Ours"
        assert ran(op) == "Zeta"


@pytest.mark.parametrize("given", [{"context_fn": tileops.checkpoint_contexts}, {}])
def test_a_recomputation_gets_the_scope_of_its_forward_where_a_checkpoint_is_told_so(op: Any, given: Any) -> None:
    names: list[str] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        names.append(ran(op))
        return x.sin().cos()

    x = torch.ones(3, requires_grad=True)
    with tileops.selection(prefer="acme"):
        y = checkpoint(block, x, use_reentrant=False, **given)
    with tileops.selection(prefer="zeta"):
        y.sum().backward()
        assert ran(op) == "Zeta"
    assert names == ["Acme", "Acme" if given else "Zeta"]


def test_a_statement_reads_as_a_program_writes_it() -> None:
    said = Statement(("acme", "in-tree:row"), ("in-tree",), (), "LayerNormFwdOp")
    assert str(said) == 'tileops.selection(prefer=("acme", "row"), exclude="in-tree", op="LayerNormFwdOp")'
