"""Records: frozen dataclasses that stay what they are when they are made cheap to build."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import sys
import threading
from dataclasses import InitVar, dataclass, field
from typing import Any

import pytest
from tileops.record import Record, key_of, quicken


@dataclass(frozen=True)
class Base(Record):
    device: str


@dataclass(frozen=True)
class Plain(Base):
    n: int
    eps: float = 1e-5
    kept: bool = field(default=True)


@dataclass(frozen=True)
class Twin(Base):
    n: int
    eps: float = 1e-5
    kept: bool = field(default=True)


@dataclass(frozen=True)
class Wider(Plain):
    more: int = 0


@dataclass(frozen=True)
class Named(Base):
    n: int = field(kw_only=True)
    m: int = field(default=2, kw_only=True)


@dataclass(frozen=True)
class Posted(Base):
    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", self.n + 1)


@dataclass(frozen=True)
class Made(Base):
    parts: tuple[int, ...] = field(default_factory=tuple)


@dataclass(frozen=True)
class Handed(Base):
    given: InitVar[int] = 0


@dataclass(frozen=True)
class Own(Base):
    n: int

    def __init__(self, n: int) -> None:
        object.__setattr__(self, "device", "own")
        object.__setattr__(self, "n", n)


@dataclass(frozen=True)
class Uncompared(Base):
    note: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Slotted(Base):
    n: int = 1


@dataclass(frozen=True)
class Early(Base):
    n: int = 1


EARLY = Early("cpu", 3)

for _cls in (Plain, Twin, Wider, Named, Posted, Made, Handed, Own, Uncompared, Slotted, Early):
    quicken(_cls)

RECORDS = [
    Plain("cpu", 3),
    Wider("cpu", 3, more=4),
    Named("cpu", n=3),
    Posted("cpu", 3),
    Made("cpu"),
    Handed("cpu"),
    Own(3),
    Uncompared("cpu", "a"),
    Slotted("cpu", 3),
    EARLY,
    Early("cpu", 3),
]
every_record = pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)


def test_it_is_a_dataclass_with_the_fields_of_its_base_first() -> None:
    assert dataclasses.is_dataclass(Plain)
    assert [one.name for one in dataclasses.fields(Wider)] == ["device", "n", "eps", "kept", "more"]
    assert Wider.__match_args__ == ("device", "n", "eps", "kept", "more")
    assert dataclasses.asdict(Plain("cpu", 3)) == {"device": "cpu", "n": 3, "eps": 1e-5, "kept": True}
    assert dataclasses.astuple(Plain("cpu", 3)) == ("cpu", 3, 1e-5, True)


def test_it_is_built_by_position_by_name_and_with_defaults() -> None:
    assert Plain("cpu", 3, 1e-5, True) == Plain(device="cpu", n=3) == Plain("cpu", kept=True, n=3)
    assert (Named("cpu", n=3).n, Named("cpu", n=3).m, Made("cpu").parts) == (3, 2, ())


def test_its_signature_stays_as_the_decorator_made_it() -> None:
    assert (
        str(inspect.signature(Plain)) == "(device: 'str', n: 'int', eps: 'float' = 1e-05, kept: 'bool' = True) -> None"
    )
    assert str(inspect.signature(Named)) == "(device: 'str', *, n: 'int', m: 'int' = 2) -> None"


def test_a_missing_and_an_unexpected_argument_are_named() -> None:
    with pytest.raises(TypeError, match=r"Plain\.__init__\(\) missing 1 required positional argument: 'n'"):
        Plain("cpu")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Plain\.__init__\(\) got an unexpected keyword argument 'm'"):
        Plain("cpu", 3, m=4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes from 3 to 5 positional arguments but 6 were given"):
        Plain("cpu", 3, 1e-5, True, 5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        Named("cpu", 3)  # type: ignore[misc]


def test_a_default_can_be_read_from_the_class_and_a_field_without_one_cannot() -> None:
    assert Plain.eps == 1e-5
    with pytest.raises(AttributeError, match="type object 'Plain' has no attribute 'n'"):
        _ = Plain.n


@every_record
def test_nothing_can_be_set_or_deleted(record: Any) -> None:
    for name in ("device", "elsewhere", "_table_key"):
        with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):  # TypeError: slots=True, python/cpython#90562
            setattr(record, name, 1)
        with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
            delattr(record, name)


def test_a_field_that_is_set_says_that_the_record_is_frozen() -> None:
    for name in ("n", "elsewhere"):
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot assign to field '{name}'"):
            setattr(RECORDS[0], name, 1)
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot delete field '{name}'"):
            delattr(RECORDS[0], name)


def test_it_is_shown_as_any_dataclass() -> None:
    assert repr(Plain("cpu", 3)) == "Plain(device='cpu', n=3, eps=1e-05, kept=True)"


@every_record
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_it_pickles_in_every_protocol(record: Any, protocol: int) -> None:
    if isinstance(record, Slotted) and protocol < 2:
        pytest.skip("of a dataclass with slots=True, older Pythons refuse these protocols")
    twin = pickle.loads(pickle.dumps(record, protocol))
    assert (twin, hash(twin), repr(twin), key_of(twin)) == (record, hash(record), repr(record), key_of(record))


@every_record
def test_it_can_be_copied_and_replaced(record: Any) -> None:
    for twin in (copy.copy(record), copy.deepcopy(record)):
        assert (twin, hash(twin), key_of(twin)) == (record, hash(record), key_of(record))
    if not isinstance(record, (Handed, Own)):
        assert dataclasses.replace(record, device="meta").device == "meta"
        assert record.device == "cpu"


def test_records_are_equal_within_exactly_one_class() -> None:
    plain = Plain("cpu", 3)
    assert plain == Plain("cpu", 3)
    assert hash(plain) == hash(Plain("cpu", 3))
    for other in (Twin("cpu", 3), Wider("cpu", 3), Plain("cpu", 4), ("cpu", 3, 1e-5, True), key_of(plain), None):
        assert plain != other
        assert other != plain
        assert {plain: 1}.get(other) is None  # type: ignore[call-overload]


def test_it_is_no_tuple() -> None:
    for misread in (iter, len, lambda one: one[0], lambda one: one < one, lambda one: one + ()):
        with pytest.raises(TypeError):
            misread(RECORDS[0])  # type: ignore[arg-type]
    assert "%s" % RECORDS[0] == repr(RECORDS[0])  # noqa: UP031 - a tuple would be taken apart


@every_record
@pytest.mark.parametrize("other", RECORDS, ids=lambda record: type(record).__name__)
def test_keys_are_equal_where_records_are(record: Any, other: Any) -> None:
    assert (key_of(record) == key_of(other)) == (record == other)
    assert hash(key_of(record)) == hash(key_of(copy.copy(record)))


def test_a_field_outside_the_comparison_is_not_in_the_key() -> None:
    assert key_of(Uncompared("cpu", "a")) == key_of(Uncompared("cpu", "b"))


def test_an_authors_post_init_runs_and_its_result_is_in_the_key() -> None:
    assert Posted("cpu", 3).n == 4
    assert key_of(Posted("cpu", 3)) == (Posted, "cpu", 4)


def test_an_authors_init_runs() -> None:
    assert (Own(3).device, Own(3).n) == ("own", 3)
    assert key_of(Own(3)) == (Own, "own", 3)


@pytest.mark.parametrize("record", [RECORDS[0], Posted("cpu", 3), Made("cpu"), Own(3)], ids=repr)
def test_a_record_of_a_quickened_class_carries_its_key_from_the_start(record: Any) -> None:
    assert record._table_key[0] is type(record)


def test_a_record_made_before_its_class_was_quickened_stays_what_it_was() -> None:
    assert (EARLY.n, Early("cpu", 3).n) == (3, 3)
    assert Early("cpu", 3) == EARLY
    assert key_of(Early("cpu", 3)) == key_of(EARLY)


def test_subclasses_of_a_quickened_class_are_classes_of_their_own() -> None:
    class Bare(Plain):
        pass

    @dataclass(frozen=True)
    class Later(Plain):
        eps: float = 2.0
        last: int = 9

    assert key_of(Bare("cpu", 3)) != key_of(Plain("cpu", 3))
    for _ in range(2):
        assert repr(Later("cpu", 3)).endswith("Later(device='cpu', n=3, eps=2.0, kept=True, last=9)")
        assert key_of(Later("cpu", 3)) == (Later, "cpu", 3, 2.0, True, 9)
        assert (Later("cpu", 3).last, Later.eps, Plain.eps) == (9, 2.0, 1e-5)
        quicken(Later)


def test_an_init_that_calls_its_bases_is_keyed_when_it_is_done() -> None:
    @dataclass(frozen=True)
    class OverPlain(Plain):
        last: int = 0

        def __init__(self, n: int, last: int) -> None:
            super().__init__("cpu", n)
            object.__setattr__(self, "last", last)

    @dataclass(frozen=True)
    class OverOwn(Own):
        last: int

        def __init__(self, n: int, last: int) -> None:
            super().__init__(n)
            object.__setattr__(self, "last", last)

    for cls in (OverPlain, OverOwn):
        quicken(cls)
        assert key_of(cls(1, 2)) == key_of(cls(1, 2))
        assert key_of(cls(1, 2)) != key_of(cls(1, 3))
        assert (cls(1, 2).n, cls(1, 2).last) == (1, 2)


def test_a_field_outside_the_hash_is_in_the_key_as_it_is_in_the_comparison() -> None:
    @dataclass(frozen=True)
    class Unhashed(Base):
        n: int = field(hash=False)

    quicken(Unhashed)
    assert key_of(Unhashed("cpu", 1)) != key_of(Unhashed("cpu", 2))


def test_quickening_leaves_alone_what_is_no_decorated_record() -> None:
    class Bare(Plain):
        pass

    @dataclass(frozen=True)
    class Foreign:
        n: int

    for cls in (Bare, Foreign, int):
        before = cls.__init__
        quicken(cls)
        assert cls.__init__ is before


def test_building_a_record_runs_one_function_and_its_key_hashes_and_compares_in_none() -> None:
    table = {key_of(Plain("cpu", 3)): 1}
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    found = table[Plain(device="cpu", n=3)._table_key]
    sys.setprofile(None)
    assert (found, calls) == (1, ["__init__"])


def test_threads_that_build_while_a_class_is_quickened_read_their_values() -> None:
    wrong: list[Any] = []
    for _ in range(100):

        @dataclass(frozen=True)
        class Local(Base):
            n: int

        go = threading.Barrier(4)

        def build(cls: Any = Local, go: Any = go) -> None:
            go.wait()
            quicken(cls)
            for n in range(20):
                record = cls("cpu", n)
                if (record.n, record.device) != (n, "cpu") or key_of(record) != (cls, "cpu", n):
                    wrong.append(record)

        threads = [threading.Thread(target=build) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
