"""Verdicts and selections as values: what a reader and `--json` see."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tileops import register_kernel_type
from tileops.verdict import IN_TREE, Answer, Owner, Verdict


def test_a_key_is_bare_in_tree_and_behind_its_owners_name_elsewhere() -> None:
    assert Owner(IN_TREE).full_key("row") == "row"
    assert Owner("acme").full_key("row") == "acme:row"
    assert Owner("local").full_key("row") == "local:row"


def test_a_selection_as_json_has_the_fields_that_the_command_prints(fake: Any) -> None:
    op = fake.op({"a": fake.kernel("Ours"), "b": fake.kernel("Refusing", refuse="no")})()
    told = op.explain("fake", fake.call(3)).as_json()
    assert json.loads(json.dumps(told)) == told
    assert set(told) == {"op", "interface", "call", "scope", "key", "target", "verdicts", "error", "remarks"}
    assert (told["op"], told["interface"], told["key"], told["error"]) == ("FakeOp", "fake", "a", None)
    assert told["verdicts"][1] == {
        "key": "b",
        "class": f"{fake.Call.__module__}.Refusing",
        "backend": "in-tree",
        "serves": False,
        "reason": "no",
        "favour": None,
    }


def test_a_selection_without_winner_as_json_has_a_null_key_and_the_errors_first_sentence(fake: Any) -> None:
    told = fake.op({"a": fake.kernel(refuse="no")})().explain("fake", fake.call()).as_json()
    assert told["key"] is None
    assert told["error"].startswith("no implementation serves this call")


def test_a_selection_says_which_is_selected_and_which_is_outranked(fake: Any) -> None:
    op = fake.op({"best": fake.kernel(over=("beaten",)), "beaten": fake.kernel(), "no": fake.kernel(refuse="never")})()
    first, call, *lines = str(op.explain("fake", fake.call())).splitlines()
    assert first.startswith("best serves this call")
    assert "FakeCall(device=cpu, n=1" in call
    said = {line.split()[0]: line for line in lines}
    assert "another is preferred over it" in said["beaten"]
    assert "selected" in said["best"]
    assert "never" in said["no"]


def test_the_winner_is_the_verdict_of_the_key(fake: Any) -> None:
    selection = fake.op({"a": fake.kernel(), "b": fake.kernel(refuse="no")})().explain("fake", fake.call())
    assert selection.winner == selection.verdicts[0]
    assert fake.op({})().explain("fake", fake.call()).winner is None


def test_a_verdict_serves_only_where_it_says_so(fake: Any) -> None:
    for answer in Answer:
        verdict = Verdict("a", fake.kernel(), Owner(IN_TREE), answer, "why")
        assert verdict.serves is (answer is Answer.SERVES)


def test_the_advice_for_a_device_without_kernels_names_the_backend_to_install(fake: Any) -> None:
    told = str(fake.op({"a": fake.kernel(devices=("cuda",))})().explain("fake", fake.call()))
    assert "tileops-backend-example" in told


@pytest.mark.parametrize("count", [1, 2])
def test_the_advice_on_an_ambiguity_of_the_programs_own_kernels_is_to_take_one_out(fake: Any, count: int) -> None:
    op = fake.op({"a": fake.kernel()} if count == 1 else {})()
    for i in range(count):
        register_kernel_type("FakeOp", f"mine{i}", fake.kernel())
    told = str(op.explain("fake", fake.call())).splitlines()
    assert told[0].startswith("dispatch is ambiguous")
    assert "preferred_over" in told[-2]
    assert "tileops.selection(prefer=" in told[-1]
