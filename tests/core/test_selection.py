"""`select`, the whole rule of selection."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tileops.backend.statements import Statement
from tileops.backend.units import Implementation
from tileops.device import DeviceFacts, at_least
from tileops.errors import KernelFaultWarning
from tileops.ops.selecting import select
from tileops.scopes import NO_SCOPE, Scope
from tileops.verdict import IN_TREE, Answer, Failure, Owner, Selection

HOME = Owner(IN_TREE, "tileops-core 0.1.0")
ACME = Owner("acme", "tileops-backend-acme 1.0")
ZETA = Owner("zeta", "tileops-backend-zeta 2.0")


def chosen(call: Any, *implementations: Implementation, scope: Scope = NO_SCOPE) -> Selection:
    return select("FakeOp", "fake", implementations, call, scope)


def home(key: str, cls: type[Any]) -> Implementation:
    return Implementation(key, cls, HOME)


def acme(key: str, cls: type[Any]) -> Implementation:
    return Implementation(key, cls, ACME)


def zeta(key: str, cls: type[Any]) -> Implementation:
    return Implementation(key, cls, ZETA)


def test_the_only_implementation_that_serves_is_selected(fake: Any) -> None:
    selection = chosen(fake.call(), home("a", fake.kernel(refuse="never")), home("b", fake.kernel()))
    assert (selection.key, selection.failure, selection.contenders) == ("b", None, ("b",))
    assert selection.winner is not None
    assert selection.winner.answer is Answer.SERVES


def test_a_class_that_declares_nothing_serves_every_call_on_cuda_and_none_elsewhere(fake: Any) -> None:
    class Plain(fake.Interface):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    for arch in (70, 90, 120):
        assert chosen(fake.call().on(DeviceFacts(arch=arch)), home("plain", Plain)).key == "plain"
    assert chosen(fake.call(), home("plain", Plain)).failure is Failure.NO_DEVICE


def test_an_implementation_for_another_device_type_is_not_asked_whether_it_serves(fake: Any) -> None:
    selection = chosen(fake.call(), home("a", fake.kernel("Elsewhere", devices=("cuda",))), home("b", fake.kernel()))
    assert selection.verdicts[0].answer is Answer.OTHER_DEVICE
    assert selection.verdicts[0].reason == "runs on cuda, not on cpu"
    assert "Elsewhere" not in fake.asked("refusal")


def test_an_implementation_for_another_architecture_is_not_asked_whether_it_serves(fake: Any) -> None:
    call = fake.call(device="cuda:0").on(DeviceFacts(arch=80))
    newer = fake.kernel("Newer", devices=("cuda",), archs=frozenset({90, 100}))
    selection = chosen(call, home("a", newer), home("b", fake.kernel(devices=("cuda",))))
    assert selection.key == "b"
    assert selection.verdicts[0].answer is Answer.OTHER_ARCH
    assert selection.verdicts[0].reason == "is built for architectures 100, 90; this one is 80"
    assert "Newer" not in fake.asked("refusal")


@pytest.mark.parametrize(("arch", "serves"), [(89, False), (90, True), (120, True)])
def test_an_open_range_of_architectures_serves_from_its_lowest_on(fake: Any, arch: int, serves: bool) -> None:
    kernel = fake.kernel(devices=("cuda",), archs=at_least(90))
    selection = chosen(fake.call(device="cuda:0").on(DeviceFacts(arch=arch)), home("a", kernel))
    assert selection.verdicts[0].serves is serves
    assert serves or "at_least(90)" in str(selection)


def test_an_unavailable_implementation_takes_nothing_that_it_is_preferred_over(fake: Any) -> None:
    best = fake.kernel(devices=("cuda",), over=("a",))
    assert chosen(fake.call(), home("a", fake.kernel()), home("best", best)).key == "a"


def test_a_refusing_kernel_takes_nothing_that_it_is_preferred_over(fake: Any) -> None:
    best = fake.kernel(refuse="not today", over=("a",))
    assert chosen(fake.call(), home("a", fake.kernel()), home("best", best)).key == "a"


def test_a_general_implementation_is_below_every_other_whatever_they_prefer(fake: Any) -> None:
    general = fake.kernel(general=True)
    assert chosen(fake.call(), home("general", general), home("a", fake.kernel())).key == "a"
    assert chosen(fake.call(), home("general", general), acme("a", fake.kernel())).key == "acme:a"


def test_a_general_implementation_serves_what_the_others_refuse(fake: Any) -> None:
    implementations = [home("general", fake.kernel(general=True)), home("a", fake.kernel(refuse="no"))]
    assert chosen(fake.call(), *implementations).key == "general"


def test_precedence_is_transitive_through_a_key_that_does_not_serve(fake: Any) -> None:
    first = home("first", fake.kernel(over=("second",)))
    second = home("second", fake.kernel(over=("third",), refuse="no"))
    third = home("third", fake.kernel())
    assert chosen(fake.call(), first, second, third).key == "first"


def test_precedence_is_transitive_through_a_key_of_another_device_type(fake: Any) -> None:
    first = home("first", fake.kernel(over=("second",)))
    second = home("second", fake.kernel(over=("third",), devices=("cuda",)))
    third = home("third", fake.kernel())
    assert chosen(fake.call(), first, second, third).key == "first"


def test_overlap_without_precedence_is_ambiguous_and_names_all_that_serve(fake: Any) -> None:
    selection = chosen(
        fake.call(), home("b", fake.kernel()), home("a", fake.kernel()), home("c", fake.kernel(refuse="no"))
    )
    assert selection.failure is Failure.AMBIGUOUS
    assert (selection.key, selection.contenders) == (None, ("a", "b"))


def test_a_beaten_implementation_is_no_contender_of_an_ambiguity(fake: Any) -> None:
    a, b, beaten = fake.kernel(over=("beaten",)), fake.kernel(), fake.kernel()
    assert chosen(fake.call(), home("a", a), home("b", b), home("beaten", beaten)).contenders == ("a", "b")


def test_no_key_on_the_device_type_and_no_key_that_serves_are_two_failures(fake: Any) -> None:
    elsewhere = home("a", fake.kernel(devices=("cuda",)))
    refusing = home("b", fake.kernel(refuse="no"))
    assert chosen(fake.call(), elsewhere).failure is Failure.NO_DEVICE
    assert chosen(fake.call(), elsewhere, refusing).failure is Failure.NOT_SERVED


def test_a_key_for_another_architecture_supports_the_device_type(fake: Any) -> None:
    newer = home("a", fake.kernel(devices=("cuda",), archs=frozenset({100})))
    assert chosen(fake.call().on("h200"), newer).failure is Failure.NOT_SERVED


def test_an_interface_without_implementations_does_not_run_on_any_device(fake: Any) -> None:
    assert chosen(fake.call()).failure is Failure.NO_DEVICE


def test_in_tree_means_every_in_tree_implementation_also_those_with_other_keys(fake: Any) -> None:
    added = acme("row", fake.kernel(over=(IN_TREE,)))
    later = [home(key, fake.kernel()) for key in ("a", "b_of_a_later_release")]
    assert chosen(fake.call(), added, *later).key == "acme:row"
    assert chosen(fake.call(), added, *later, home("general", fake.kernel(general=True))).key == "acme:row"


def test_in_tree_does_not_mean_another_backends_kernels(fake: Any) -> None:
    selection = chosen(fake.call(), acme("row", fake.kernel(over=(IN_TREE,))), zeta("row", fake.kernel()))
    assert selection.contenders == ("acme:row", "zeta:row")


def test_a_bare_key_means_the_own_and_the_in_tree_implementations_of_that_name(fake: Any) -> None:
    best = acme("best", fake.kernel(over=("row",)))
    own, ours = acme("row", fake.kernel()), home("row", fake.kernel())
    assert chosen(fake.call(), best, own, ours).key == "acme:best"
    assert chosen(fake.call(), best, own, ours, zeta("row", fake.kernel())).contenders == ("acme:best", "zeta:row")


def test_a_backend_may_name_the_in_tree_key_that_its_own_key_repeats(fake: Any) -> None:
    assert chosen(fake.call(), acme("row", fake.kernel(over=("row",))), home("row", fake.kernel())).key == "acme:row"


def test_another_vendors_key_is_named_with_its_backend(fake: Any) -> None:
    best = acme("best", fake.kernel(over=("zeta:row",)))
    assert chosen(fake.call(), best, zeta("row", fake.kernel())).key == "acme:best"
    assert chosen(fake.call(), best, home("row", fake.kernel())).contenders == ("row", "acme:best")


def test_a_preferred_key_that_nobody_has_changes_nothing(fake: Any) -> None:
    best = acme("best", fake.kernel(over=("absent", "zeta:absent", "row")))
    assert chosen(fake.call(), best, home("row", fake.kernel())).key == "acme:best"


def test_a_cycle_across_owners_makes_a_call_that_both_serve_ambiguous(fake: Any) -> None:
    one, other = acme("a", fake.kernel(over=("zeta:b",))), zeta("b", fake.kernel(over=("acme:a",)))
    assert chosen(fake.call(), one, other).contenders == ("acme:a", "zeta:b")


def test_a_cycle_across_owners_harms_no_call_that_one_of_them_serves(fake: Any) -> None:
    one = acme("a", fake.kernel(over=("zeta:b",), refuse="no"))
    other = zeta("b", fake.kernel(over=("acme:a",)))
    assert chosen(fake.call(), one, other).key == "zeta:b"


def test_two_generals_of_two_backends_that_both_serve_are_ambiguous(fake: Any) -> None:
    one, other = acme("g", fake.kernel(general=True)), zeta("g", fake.kernel(general=True))
    assert chosen(fake.call(), one, other).contenders == ("acme:g", "zeta:g")


def test_a_general_over_in_tree_beats_the_in_tree_general_and_nothing_else(fake: Any) -> None:
    general = acme("g", fake.kernel(general=True, over=(IN_TREE,)))
    assert chosen(fake.call(), general, home("g", fake.kernel(general=True))).key == "acme:g"
    assert chosen(fake.call(), general, home("a", fake.kernel())).key == "a"


def said(*statements: Statement) -> Scope:
    return Scope(statements)


def test_a_preference_of_the_scope_wins_over_every_declared_one(fake: Any) -> None:
    best, general = home("best", fake.kernel(over=("acme:row", "g"))), acme("g", fake.kernel(general=True))
    candidates = (best, acme("row", fake.kernel()), general)
    assert chosen(fake.call(), *candidates, scope=said(Statement(("acme:row",)))).key == "acme:row"
    assert chosen(fake.call(), *candidates, scope=said(Statement(("acme:g",)))).key == "acme:g"


def test_among_those_that_the_scope_prefers_alike_their_own_preferences_decide(fake: Any) -> None:
    row, slow = acme("row", fake.kernel(over=("slow",))), acme("slow", fake.kernel())
    candidates = (home("a", fake.kernel()), row, slow)
    assert chosen(fake.call(), *candidates, scope=said(Statement(("acme",)))).key == "acme:row"
    assert chosen(fake.call(), *candidates, scope=said(Statement(("acme:slow", "acme")))).key == "acme:slow"


def test_a_preference_of_the_scope_settles_what_two_of_one_rank_do_not(fake: Any) -> None:
    candidates = (acme("a", fake.kernel()), acme("b", fake.kernel()), zeta("a", fake.kernel()))
    assert chosen(fake.call(), *candidates, scope=said(Statement(("acme",)))).contenders == ("acme:a", "acme:b")
    assert chosen(fake.call(), *candidates, scope=said(Statement(("zeta", "acme")))).key == "zeta:a"


def test_what_the_scope_leaves_out_has_an_answer_of_its_own_behind_availability(fake: Any) -> None:
    candidates = (
        home("a", fake.kernel(refuse="no")),
        home("far", fake.kernel(devices=("cuda",))),
        acme("row", fake.kernel()),
    )
    excluded = chosen(fake.call(), *candidates, scope=said(Statement(exclude=(IN_TREE,))))
    assert [one.answer for one in excluded.verdicts] == [Answer.EXCLUDED, Answer.OTHER_DEVICE, Answer.SERVES]
    required = chosen(fake.call(), *candidates, scope=said(Statement(require=("zeta",))))
    assert [one.answer for one in required.verdicts] == [Answer.NOT_REQUIRED, Answer.OTHER_DEVICE, Answer.NOT_REQUIRED]
    assert required.failure is Failure.NOT_SERVED


def test_verdicts_list_in_tree_first_then_by_key(fake: Any) -> None:
    given_order = [
        zeta("a", fake.kernel()),
        acme("b", fake.kernel()),
        home("z", fake.kernel()),
        home("y", fake.kernel()),
    ]
    assert [verdict.key for verdict in chosen(fake.call(), *given_order).verdicts] == ["y", "z", "acme:b", "zeta:a"]


# ------------------------------------------------------------------------------------- refusals that misbehave


def fail(_: Any) -> str | None:
    raise ZeroDivisionError("division of rows")


def test_a_refusal_that_raises_counts_as_a_refusal_and_names_the_distribution(fake: Any) -> None:
    faulty = acme("faulty", fake.kernel(refuse=fail, over=("a",)))
    with pytest.warns(KernelFaultWarning, match="tileops-backend-acme 1.0") as caught:
        selection = chosen(fake.call(), faulty, home("a", fake.kernel()))
    assert selection.key == "a"
    assert selection.verdicts[1].answer is Answer.REFUSES
    assert selection.verdicts[1].reason == "its refusal raised ZeroDivisionError: division of rows"
    assert len(caught) == 1


@pytest.mark.parametrize("nonsense", [True, False, 0, "", "  ", ["no"], NotImplemented])
def test_a_refusal_that_answers_nonsense_counts_as_a_refusal(fake: Any, nonsense: object) -> None:
    faulty = acme("faulty", fake.kernel(refuse=lambda _: nonsense))
    with pytest.warns(KernelFaultWarning, match="neither None nor a sentence"):
        selection = chosen(fake.call(), faulty)
    assert selection.failure is Failure.NOT_SERVED
    assert repr(nonsense) in (selection.verdicts[0].reason or "")


def test_a_faulty_refusal_warns_once_also_when_its_words_change_with_the_call(fake: Any) -> None:
    def fail_with_number(call: Any) -> str | None:
        raise KeyError(call.n)

    faulty = acme("faulty", fake.kernel(refuse=fail_with_number))
    with pytest.warns(KernelFaultWarning) as caught:
        reasons = [chosen(fake.call(n), faulty).verdicts[0].reason or "" for n in range(1, 6)]
    assert all(str(n) in reason for n, reason in enumerate(reasons, start=1))
    assert len(caught) == 1


def test_a_system_exit_in_a_refusal_is_nobodys_refusal(fake: Any) -> None:
    def leave(_: Any) -> str | None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chosen(fake.call(), home("a", fake.kernel(refuse=leave)))


# ------------------------------------------------------------------------ the rule, against a brute-force oracle

OWNERS = (HOME, ACME, ZETA)
KEYS = ("k0", "k1", "k2")
REFERENCES = (IN_TREE, *KEYS, *(f"{owner.name}:{key}" for owner in (ACME, ZETA) for key in KEYS))


@st.composite
def graphs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Up to seven implementations of three owners with any relations between them."""
    places = draw(st.lists(st.sampled_from([(o, k) for o in OWNERS for k in KEYS]), unique=True, max_size=7))
    graph = list[dict[str, Any]]()
    for owner, key in places:
        general = draw(st.booleans()) and draw(st.booleans())
        over = draw(st.frozensets(st.just(IN_TREE) if general else st.sampled_from(REFERENCES), max_size=3))
        answer = draw(st.sampled_from(["serves", "serves", "serves", "refuses", "elsewhere", "other arch"]))
        graph.append({"owner": owner, "key": key, "general": general, "over": over, "answer": answer})
    return graph


def edges(graph: Sequence[dict[str, Any]]) -> list[list[bool]]:
    """`edges[i][j]`: i names j, written down from the rule and not from the code."""
    size = len(graph)
    table = [[False] * size for _ in range(size)]
    for i, j in itertools.permutations(range(size), 2):
        a, b = graph[i], graph[j]
        ours = b["owner"].name == "in-tree"
        if a["general"]:
            table[i][j] = "in-tree" in a["over"] and ours and b["general"]
            continue
        whole = ours and "in-tree" in a["over"]
        bare = b["key"] in a["over"] and (ours or a["owner"] == b["owner"])
        full = f"{b['owner'].name}:{b['key']}" in a["over"]
        table[i][j] = whole or bare or full
    return table


NAMES = tuple(o.name for o in OWNERS) + tuple(f"{o.name}:{key}" for o in OWNERS for key in KEYS)


@st.composite
def scopes(draw: st.DrawFn) -> Scope:
    """Up to three statements, the innermost first; often none that leaves anything out."""
    names = st.lists(st.sampled_from(NAMES), unique=True, max_size=3).map(tuple)
    few = st.one_of(st.just(()), st.lists(st.sampled_from(NAMES), max_size=2).map(tuple))
    return said(*(Statement(draw(names), draw(few), draw(few)) for _ in range(draw(st.integers(0, 3)))))


def admitted(node: dict[str, Any], scope: Scope) -> bool:
    called = {node["owner"].name, f"{node['owner'].name}:{node['key']}"}
    excluded = any(called & set(statement.exclude) for statement in scope.statements)
    missing = any(statement.require and not called & set(statement.require) for statement in scope.statements)
    return not excluded and not missing


def place(node: dict[str, Any], scope: Scope) -> int:
    called = {node["owner"].name, f"{node['owner'].name}:{node['key']}"}
    order = [name for statement in scope.statements for name in statement.prefer]
    return min((at for at, name in enumerate(order) if name in called), default=len(order))


def brute_force(graph: Sequence[dict[str, Any]], scope: Scope = NO_SCOPE) -> set[str]:
    """The keys that serve and that nothing else is preferred over: Floyd and Warshall, then every pair."""
    size = len(graph)
    over = edges(graph)
    for middle, i, j in itertools.product(range(size), repeat=3):
        over[i][j] = over[i][j] or (over[i][middle] and over[middle][j])
    serving = [i for i in range(size) if graph[i]["answer"] == "serves" and admitted(graph[i], scope)]
    first = min((place(graph[i], scope) for i in serving), default=0)
    serving = [i for i in serving if place(graph[i], scope) == first]

    def wins(i: int, j: int) -> bool:
        if graph[i]["general"] is not graph[j]["general"]:
            return bool(graph[j]["general"])
        return over[i][j] and not over[j][i]

    left = [i for i in serving if not any(wins(j, i) for j in serving if j != i)]
    return {
        graph[i]["key"] if graph[i]["owner"] is HOME else f"{graph[i]['owner'].name}:{graph[i]['key']}" for i in left
    }


def implementations_of(fake: Any, graph: Sequence[dict[str, Any]]) -> list[Implementation]:
    return [
        Implementation(
            node["key"],
            fake.kernel(
                general=node["general"],
                over=tuple(node["over"]),
                refuse="no" if node["answer"] == "refuses" else None,
                devices=("cpu",) if node["answer"] == "elsewhere" else ("cuda",),
                archs=frozenset({100}) if node["answer"] == "other arch" else None,
            ),
            node["owner"],
        )
        for node in graph
    ]


PROPERTY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ANYWHERE = st.one_of(st.just(NO_SCOPE), scopes())


@PROPERTY
@given(graph=graphs(), scope=ANYWHERE, seed=st.integers(0, 1 << 20))
def test_selection_agrees_with_brute_force_in_every_order_and_scope(
    fake: Any, graph: list[dict[str, Any]], scope: Scope, seed: int
) -> None:
    implementations = implementations_of(fake, graph)
    call = fake.call(device="cuda:0").on("h200")
    selection = chosen(call, *implementations, scope=scope)
    expected = brute_force(graph, scope)
    assert set(selection.contenders) == expected
    assert selection.key == (next(iter(expected)) if len(expected) == 1 else None)
    if len(expected) > 1:
        assert selection.failure is Failure.AMBIGUOUS
    elif not expected:
        everywhere_else = all(node["answer"] == "elsewhere" for node in graph)
        assert selection.failure is (Failure.NO_DEVICE if everywhere_else else Failure.NOT_SERVED)
    for _ in range(3):
        random.Random(seed).shuffle(implementations)
        seed += 1
        assert chosen(call, *implementations, scope=scope) == selection


@PROPERTY
@given(graph=graphs(), scope=ANYWHERE)
def test_no_scope_lets_anything_run_that_did_not_serve_without_it(
    fake: Any, graph: list[dict[str, Any]], scope: Scope
) -> None:
    implementations = implementations_of(fake, graph)
    call = fake.call(device="cuda:0").on("h200")
    plain = {verdict.key for verdict in chosen(call, *implementations).verdicts if verdict.serves}
    assert {verdict.key for verdict in chosen(call, *implementations, scope=scope).verdicts if verdict.serves} <= plain


@PROPERTY
@given(graph=graphs(), scope=ANYWHERE)
def test_the_line_that_an_ambiguity_shows_settles_it(fake: Any, graph: list[dict[str, Any]], scope: Scope) -> None:
    implementations = implementations_of(fake, graph)
    call = fake.call(device="cuda:0").on("h200")
    selection = chosen(call, *implementations, scope=scope)
    if selection.failure is not Failure.AMBIGUOUS:
        return
    (name,) = re.findall(r'with tileops\.selection\(prefer="([^"]+)"\)', selection.advice()[-1])
    qualified = name if ":" in name or name in (ACME.name, ZETA.name, IN_TREE) else f"{IN_TREE}:{name}"
    settled = chosen(call, *implementations, scope=said(Statement((qualified,)), *scope.statements))
    assert settled.key in selection.contenders


IN_TREE_ALONE = st.lists(
    st.fixed_dictionaries(
        {
            "owner": st.just(HOME),
            "key": st.sampled_from(["new0", "new1", "new2"]),
            "general": st.booleans(),
            "answer": st.sampled_from(["serves", "refuses"]),
        }
    ),
    unique_by=lambda node: node["key"],
    max_size=3,
)


@PROPERTY
@given(graph=graphs(), added=IN_TREE_ALONE, over=st.frozensets(st.sampled_from((IN_TREE, *KEYS, "new0", "new1"))))
def test_no_release_of_ours_takes_a_call_from_a_kernel_that_wins_over_in_tree(
    fake: Any, graph: list[dict[str, Any]], added: list[dict[str, Any]], over: frozenset[str]
) -> None:
    vendors = [node for node in graph if node["owner"] is not HOME]
    ours = [{**node, "over": frozenset[str]() if node["general"] else over} for node in added]
    for node in vendors:
        if not node["general"]:
            node["over"] |= {IN_TREE}
    call = fake.call(device="cuda:0").on("h200")
    before = chosen(call, *implementations_of(fake, vendors))
    if before.winner is None or before.winner.cls.general:
        return
    assert chosen(call, *implementations_of(fake, [*vendors, *ours])).key == before.key


def test_a_hundred_implementations_in_a_chain_are_selected_in_no_time(fake: Any) -> None:
    chain = [home(f"k{i}", fake.kernel(over=(f"k{i + 1}",))) for i in range(100)]
    assert chosen(fake.call(), *reversed(chain)).key == "k0"
