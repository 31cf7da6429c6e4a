"""The rules about what a kernel does: build, agree with the reference, share, run in threads, leave no trace."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, cast

from torch import Tensor

from tileops.call_spec import CallSpec
from tileops.kernels.kernel_base import Kernel, KernelInterface
from tileops.testing.broken_rule import RuleBroken, named, shown_error
from tileops.testing.global_state import changes, read_state
from tileops.testing.running import (
    Built,
    Outcome,
    Tensors,
    argument_names,
    built,
    disagreement,
    listed,
    run,
    same_bits,
    shares_memory,
)
from tileops.testing.samples import Limits, fits, runnable, sample_calls, serves, tensors_of
from tileops.testing.subjects import Subject
from tileops.testing.variations import varied

AGREES: Final = "a call that is not refused builds and agrees with the reference"
IDENTITY: Final = "equal identity means equal behaviour"
THREADS: Final = "an entry gives the same bits from four threads as from one"
NO_TRACE: Final = "building and running change no global state"


# ---------------------------------------------------------------------------------------------------- agreement


def check_agreement(subject: Subject, limits: Limits) -> None:
    """Each chosen sample builds, agrees with the reference, and writes what it may and nothing else."""
    for seed, call in enumerate(runnable(subject, limits)):
        tensors = tensors_of(subject.interface, call, seed)
        outcome = _run(subject, call, _built(subject, call).entry, tensors)
        refuse_or_mend = "mend the kernel for this call, or let refusal refuse it"
        wrong = disagreement(subject.interface, call, tensors, outcome)
        if wrong:
            raise RuleBroken(AGREES, named(subject.implementation), wrong, refuse_or_mend, call)
        for found, change in misuse(subject.interface, call, tensors, outcome):
            raise RuleBroken(AGREES, named(subject.implementation), found, change, call)
        _check_repeats(subject, call, tensors, tensors_of(subject.interface, call, seed + 1))


def _check_repeats(subject: Subject, call: CallSpec, first: Tensors, later: Tensors) -> None:
    """What a kernel gives to repeats of a call has the contract that the kernel has."""
    entry = _built(subject, call).entry
    if not isinstance(entry, Kernel):
        return
    outcome = _run(subject, call, cast("Kernel[Any]", entry).repeated(*first), later)
    wrong = disagreement(subject.interface, call, later, outcome)
    if wrong:
        found, change = f"what its repeated() returned is wrong for a like call: {wrong}", "mend repeated"
        raise RuleBroken(AGREES, named(subject.implementation), found, change, call)


def _built(subject: Subject, call: CallSpec) -> Built:
    try:
        return built(subject, call)
    except Exception as error:
        found = f"it could not be built: {shown_error(error)}"
        change = "mend the factory, or let refusal refuse what it cannot build"
        raise RuleBroken(AGREES, named(subject.implementation), found, change, call) from error


def _run(subject: Subject, call: CallSpec, entry: Callable[..., Any], tensors: Tensors) -> Outcome:
    try:
        return run(subject.interface, entry, tensors)
    except Exception as error:
        found = f"it raised {shown_error(error)}"
        change = "mend forward, or let refusal refuse the call"
        raise RuleBroken(AGREES, named(subject.implementation), found, change, call) from error


def misuse(
    interface: type[KernelInterface[Any]], call: CallSpec, tensors: Tensors, outcome: Outcome
) -> Iterator[tuple[str, str]]:
    """What an outcome did to arguments that it may only read, with what to change."""
    names = argument_names(interface)
    aliased = set(_aliases(names, tensors, listed(interface.reference(call, *tensors))))
    for name, before, after in zip(names, tensors, outcome.arguments):
        if before is None or after is None or name in interface.writes:
            continue
        if not same_bits(before, after):
            yield f"{name} was written", f"copy {name} first: {interface.__qualname__} writes {_writes(interface)}"
    for name, result in _aliases(names, outcome.arguments, outcome.results):
        if (name, result) not in aliased:
            yield f"{result} shares the memory of {name}", "return a new tensor, as the reference does"


def _writes(interface: type[KernelInterface[Any]]) -> str:
    return f"{', '.join(sorted(interface.writes))} alone" if interface.writes else "nothing"


def _aliases(names: Sequence[str], arguments: Tensors, results: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    for name, argument in zip(names, arguments):
        for result, tensor in results.items():
            if argument is not None and shares_memory(argument, tensor):
                yield name, result


# ----------------------------------------------------------------------------------------------------- identity

PAIRS_PER_FIELD: Final = 3
"""Pairs of calls that differ in one field, and are tried with one entry."""


def check_identity(subject: Subject, limits: Limits) -> None:
    """An entry serves every call with its identity as the entry that is built for that call would."""
    for field, call, other in _pairs(subject, limits):
        tensors = tensors_of(subject.interface, other, seed=1)
        wrong = _fault(subject, call, other, tensors)
        if wrong and not _fault(subject, other, other, tensors):
            found = (
                f"the entry built for it serves another call of equal identity, {other}, and there {wrong}; the entry "
                "built for that call is right"
            )
            change = f"put {field} into the identity that entry_for returns, or do not let the factory read it"
            raise RuleBroken(IDENTITY, named(subject.implementation), found, change, call)


def _fault(subject: Subject, built_for: CallSpec, call: CallSpec, tensors: Tensors) -> str:
    """What is wrong where the entry built for one call runs another; empty where nothing is."""
    try:
        outcome = run(subject.interface, built(subject, built_for).entry, tensors)
    except Exception as error:
        return f"it raises {shown_error(error)}"
    return disagreement(subject.interface, call, tensors, outcome)


def _pairs(subject: Subject, limits: Limits) -> Iterator[tuple[str, CallSpec, CallSpec]]:
    """Pairs of served calls with equal identities that differ in one field: the field, one call, the other."""
    tried = Counter[str]()
    for call in runnable(subject, limits):
        for field, other in varied(call, sample_calls(subject.interface, call.device)):
            if (
                tried[field] < PAIRS_PER_FIELD
                and _share(subject, call, other)
                and fits(subject.interface, other, limits)
            ):
                tried[field] += 1
                yield field, call, other


def _share(subject: Subject, call: CallSpec, other: CallSpec) -> bool:
    return serves(subject, other) and subject.cls.entry_for(call)[0] == subject.cls.entry_for(other)[0]


# ------------------------------------------------------------------------------------------------------ threads

THREAD_COUNT: Final = 4
ROUNDS: Final = 8
CALLS_IN_THREADS: Final = 2


def check_threads(subject: Subject, limits: Limits) -> None:
    """Four threads run one entry at a time, each on tensors of its own, and get what one thread gets."""
    for call in runnable(subject, limits)[:CALLS_IN_THREADS]:
        found = race(subject.interface, call, _built(subject, call).entry)
        if found:
            change = "keep nothing between calls: take scratch per call, from torch.empty on the current stream"
            raise RuleBroken(THREADS, named(subject.implementation), found, change, call)


def race(interface: type[KernelInterface[Any]], call: CallSpec, entry: Callable[..., Any]) -> str:
    """What differs where threads run an entry side by side, each on tensors of its own; empty where nothing does."""
    work = [tensors_of(interface, call, seed) for seed in range(THREAD_COUNT)]

    def run_one(tensors: Tensors) -> dict[str, Tensor]:
        return run(interface, entry, tensors).all

    with ThreadPoolExecutor(1) as alone:
        right, again = (list(alone.map(run_one, work)) for _ in range(2))
    if not all(map(_same, right, again)):
        return "two runs from one thread already differ"
    ready = threading.Barrier(len(work))

    def rounds(tensors: Tensors, expected: dict[str, Tensor]) -> int:
        ready.wait()
        return sum(not _same(run_one(tensors), expected) for _ in range(ROUNDS))

    with _switching_often(), ThreadPoolExecutor(len(work)) as pool:
        try:
            wrong = sum(pool.map(rounds, work, right))
        except Exception as error:
            return f"from four threads it raises {shown_error(error)}"
    return f"{wrong} of {ROUNDS * len(work)} runs differ from the same run alone" if wrong else ""


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(map(same_bits, one.values(), other.values()))


@contextlib.contextmanager
def _switching_often() -> Generator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


# ----------------------------------------------------------------------------------------------------- no trace

CALLS_WATCHED: Final = 2
COMPILERS_HINT: Final = (
    "where importing a compiler does it, name the compiler's module in the `compilers` of your ConformanceTests"
)


def check_no_trace(subject: Subject, limits: Limits) -> None:
    """Building entries and running them leaves the global state of the process as it was."""
    for call in runnable(subject, limits)[:CALLS_WATCHED]:
        made = _built(subject, call)
        tensors = tensors_of(subject.interface, call)
        before = read_state()
        _run(subject, call, made.entry, tensors)
        for doing, moved in (("building", made.moved), ("running", changes(before, read_state()))):
            if moved:
                found, change = f"{doing} it changed {moved}", "put it back, or do without; " + COMPILERS_HINT
                raise RuleBroken(NO_TRACE, named(subject.implementation), found, change, call)


def import_compilers(names: Iterable[str]) -> None:
    """Import the compilers that can be, before anything is built: what that changes is their makers' doing."""
    for name in names:
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")
            importlib.import_module(name)
