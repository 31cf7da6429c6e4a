"""Autotuning: which configuration of its kernels an entry is fastest in, for tensors like those of a call.

Tuning acts on the entry that selection found, and never on selection. Entries stay as they are built: the winner is
another entry, which calls get in the place of the one before.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from tileops.device import is_capturing, made_current
from tileops.errors import CaptureError, InputError
from tileops.kernels.kernel_base import KernelInterface
from tileops.ops.checks import check_strided, laid_out, shown_dtype, shown_shape
from tileops.ops.entries import Build, Built, build_of, put_in_place, shared
from tileops.ops.implementations import implementations
from tileops.ops.progress import Step, showing_steps
from tileops.ops.signature import OpClass, arguments_in_order, kernel_arguments
from tileops.ops.timing import Run, Stopwatch, copied, copies_beyond_cache
from tileops.ops.trials import Trial, TunedKernel, Tuning
from tileops.ops.tuning_records import CACHE_VARIABLE, Unrecordable, as_record, write_record
from tileops.torch_boundary import refuse_nested, written_positions
from tileops.torch_guards import PLAIN, needs_dispatcher
from tileops.verdict import Selection

WORTH: Final = 0.98
"""A configuration is taken in the place of the default where it needs less than this of the default's time: two runs of
one kernel differ by up to a hundredth."""

_one_at_a_time = threading.Lock()  # not Final: a forked child gets a new one


def _renew_lock() -> None:
    global _one_at_a_time  # noqa: PLW0603 - nobody in the child can release the parent's lock
    _one_at_a_time = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def tune(op: Any, tensors: Sequence[Any], exchange: Callable[[Any, Any], None]) -> Tuning:
    """Tune the entry that serves a call of `op`. `Op.tune` says how.

    Args:
        op: The op.
        tensors: The tensors of the call.
        exchange: Puts another entry in the place of the one that look-ups gave.
    """
    arguments = arguments_in_order(op.__class__, tuple(tensors), {})
    _check_runs(op, arguments)
    op.check(*arguments)
    _check_timed(op, arguments)
    with _one_at_a_time, torch.no_grad():
        selection = op.prepare(*arguments)
        if selection.target is not None:
            return Tuning(
                selection, remark=f"target {selection.target!r} takes this call over with a kernel of its own"
            )
        with made_current(selection.call.device):
            return _tuned(op, arguments, selection, exchange)


def _check_runs(op: Any, arguments: Sequence[Any]) -> None:
    """Refuse what holds no data to run a kernel with."""
    refuse_nested(op.argument_names, arguments)
    for name, tensor in zip(op.argument_names, arguments):
        if isinstance(tensor, Tensor):
            check_strided(name, tensor)
            if type(tensor) not in PLAIN or tensor.is_meta:
                what = "on meta" if tensor.is_meta and type(tensor) in PLAIN else f"a {type(tensor).__qualname__}"
                raise InputError(f"{name} is {what}; tune runs kernels: give a plain torch.Tensor that holds data")


def _check_timed(op: Any, arguments: Sequence[Any]) -> None:
    """Refuse to time where nothing runs, or not as it does in an eager call."""
    x = arguments[0]
    if is_capturing(x.device):
        raise CaptureError(
            f"{type(op).__name__}.tune runs and times kernels, which the CUDA graph that is captured would record; "
            "tune before the capture"
        )
    if needs_dispatcher(arguments):
        raise InputError(
            f"{type(op).__name__}.tune times kernels as an eager call runs them; call it outside of traces, modes, "
            "transforms and autocast"
        )
    if x.numel() == 0:
        raise InputError(f"{op.argument_names[0]} has no elements; a call with it runs no kernel that could be timed")


def _tuned(op: Any, arguments: Sequence[Any], selection: Selection, exchange: Callable[[Any, Any], None]) -> Tuning:
    """Try, put the winner in place and on record."""
    cls = cast("OpClass", type(op))
    interface = cls.interfaces[selection.interface]
    winner = next(one for one in implementations(cls, selection.interface) if one.full_key == selection.key)
    build = build_of(cls.__name__, interface, winner, selection.call)
    present = shared(build)
    if not present.choices:
        return Tuning(selection, remark=f"{selection.key} serves this call and lists no configurations")
    given = kernel_arguments(op, arguments if op.any_layout else laid_out(arguments, written_positions(op)))
    count = sum(len(choice.configurations) for choice in present.choices)
    with showing_steps(f"tuning {selection.key}", count) as step:
        kernels, built = _Tuner(build, present, given, step).tuned()
    before = put_in_place(build, built)
    if before is not built.entry:
        exchange(before, built.entry)
    record, remark = _recorded(build, kernels)
    return Tuning(selection, _shown(interface, given), kernels, record, remark)


def _recorded(build: Build, kernels: Sequence[TunedKernel]) -> tuple[Path | None, str | None]:
    """Keep the winners for later processes: where, and if nowhere, why."""
    parts = [as_record(one.cls, [trial.configuration for trial in one.trials], one.taken) for one in kernels]
    try:
        path = write_record(build.record_identity(), parts)
    except (OSError, Unrecordable) as error:
        return None, f"kept in this process alone: {error}"
    return path, f"kept in this process alone: {CACHE_VARIABLE} is empty" if path is None else None


def _shown(interface: type[KernelInterface[Any]], arguments: Sequence[Tensor | None]) -> tuple[str, ...]:
    named = zip(_names(interface), arguments)
    return tuple(f"{name} {shown_shape(one.shape)} {shown_dtype(one.dtype)}" for name, one in named if one is not None)


def _names(interface: type[KernelInterface[Any]]) -> tuple[str, ...]:
    """The names of the arguments of `forward`."""
    return tuple(inspect.signature(interface.forward).parameters)[1:]


class _Candidate(NamedTuple):
    """An entry in some configurations: what was built and runs it, or why it is dropped."""

    built: Built | None
    run: Run | None
    reason: str | None = None


class _Tuner:
    """Tries the configurations of each kernel of one entry, with those before it in their winners.

    Args:
        build: What is built.
        present: The entry as it is.
        arguments: What the kernel is called with. They are copied, also because a kernel may write some of them.
        step: Shows what is tried.
    """

    def __init__(self, build: Build, present: Built, arguments: Sequence[Tensor | None], step: Step) -> None:
        self._build = build
        self._arguments = arguments
        self._step = step
        self._stopwatch = Stopwatch(build.call.device)
        self._copies = copies_beyond_cache(arguments, build.call.device)
        self._choices = present.choices
        self._present = tuple(choice.taken for choice in present.choices), present
        self._candidates: dict[tuple[int, ...], _Candidate] = {}
        self._expected: list[Tensor] = []

    def tuned(self) -> tuple[tuple[TunedKernel, ...], Built]:
        """What was tried of each kernel, and the entry in which each is in its winner."""
        taken = (0,) * len(self._choices)
        default = self._in_place(taken)
        self._expected = self._results(default)
        self._candidates[taken] = self._timed(default)
        kernels: list[TunedKernel] = []
        for place, choice in enumerate(self._choices):
            trials = self._trials(taken, place)
            best = min(range(len(trials)), key=lambda at: trials[at].ratio or float("inf"))
            best = best if (trials[best].ratio or 1.0) < WORTH else 0
            taken = (*taken[:place], best, *taken[place + 1 :])
            kernels.append(TunedKernel(choice.cls, tuple(trials), best))
        built = self._candidates[taken].built
        assert built is not None, "a configuration that was dropped wins nothing"
        return tuple(kernels), built

    def _trials(self, taken: tuple[int, ...], place: int) -> list[Trial]:
        """Try the configurations of the kernel in `place`, the others as `taken`."""
        configurations = self._choices[place].configurations
        candidates: list[_Candidate] = []
        for at, configuration in enumerate(configurations):
            self._step(", ".join(f"{name}={value}" for name, value in configuration.items()))
            candidates.append(self._candidate((*taken[:place], at, *taken[place + 1 :])))
        ratios = iter(self._stopwatch.ratios([one.run for one in candidates if one.run is not None]))
        return [
            Trial(configuration, None if one.run is None else next(ratios), one.reason)
            for configuration, one in zip(configurations, candidates)
        ]

    def _candidate(self, taken: tuple[int, ...]) -> _Candidate:
        """The entry in the configurations `taken`, each tried once."""
        if taken not in self._candidates:
            try:
                built = self._in_place(taken)
                reason = self._disagreement(self._results(built))
                self._candidates[taken] = self._timed(built) if reason is None else _Candidate(None, None, reason)
            except Exception as error:  # one that cannot be built or run is no candidate
                cause = error.__cause__ or error
                self._candidates[taken] = _Candidate(None, None, f"{type(cause).__name__}: {cause}")
        return self._candidates[taken]

    def _in_place(self, taken: tuple[int, ...]) -> Built:
        """The entry that is there, where that is in these configurations; else another."""
        at, present = self._present
        return present if taken == at else self._build.taking(lambda place, _cls, _listed: taken[place])

    def _timed(self, built: Built) -> _Candidate:
        return _Candidate(built, self._stopwatch.over(built.entry, self._copies))

    def _results(self, built: Built) -> list[Tensor]:
        """What an entry gives: results, then the arguments that it may write."""
        arguments = copied(self._arguments)
        results = built.entry(*arguments)
        listed = cast("Sequence[object]", results) if isinstance(results, (tuple, list)) else (results,)
        writes = self._build.interface.writes
        written = [one for name, one in zip(_names(self._build.interface), arguments) if name in writes]
        return [one for one in (*listed, *written) if isinstance(one, Tensor)]

    def _disagreement(self, came: Sequence[Tensor]) -> str | None:
        """How results differ from the default's; None where they agree within the interface's tolerance."""
        for expected, result in zip(self._expected, came):
            wrong = (~self._close(result, expected)).sum().item()
            if wrong:
                return f"{wrong:.0f} of {result.numel()} elements of a result differ from the default's"
        return None

    def _close(self, result: Tensor, expected: Tensor) -> Tensor:
        if not result.is_floating_point():
            return result == expected
        relative, absolute = self._build.interface.tolerance(result.dtype)
        return torch.isclose(result, expected, rtol=relative, atol=absolute, equal_nan=True)
