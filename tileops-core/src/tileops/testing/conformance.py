"""`ConformanceTests`: one test for each rule, and each kernel where a rule is about one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import pytest

from tileops.backend.units import Builder
from tileops.testing.asking_rules import check_ambiguity, check_declared_facts, check_purity, overlaps
from tileops.testing.broken_rule import NotTried, RuleBroken
from tileops.testing.configuration_rules import check_configurations
from tileops.testing.fresh_process import ORDERS
from tileops.testing.loading_rules import check_cheap, check_loads, check_no_trace_of_loading
from tileops.testing.running_rules import (
    check_agreement,
    check_identity,
    check_no_trace,
    check_threads,
    import_compilers,
)
from tileops.testing.samples import Limits, is_here
from tileops.testing.subjects import Subject, builders_of, subjects_of
from tileops.testing.target_rules import check_target


class ConformanceTests:
    """The rules that every kernel of a backend must hold to, as tests.

        class TestAcme(ConformanceTests):
            backend = "acme"

    pytest collects a test for each rule, and for each kernel where the rule is about one. Nothing is marked,
    no plugin is needed. The backend must be installed. Kernels for devices that this machine has not are
    asked about boards that are known; what would have to run them is skipped, with the reason.

    A failure says which rule is broken, by which kernel, for which call, what was found, and what to change.
    """

    backend: ClassVar[str] = ""
    """The backend's name: its distribution's without `tileops-backend-`."""

    limits: ClassVar[Limits] = Limits()
    """How much is tried of each kernel."""

    compilers: ClassVar[Sequence[str]] = ("tilelang",)
    """Modules that the kernels import when they are built, and that change global state when they are imported
    (`tilelang` sets environment variables and `sys.path`). They are imported before anything is built, so that
    their changes are not taken for a kernel's. One that is not installed is left out."""

    # ----------------------------------------------------------------------------------------------- collection

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of each rule for each of the backend's kernels, targets, or orders of loading."""
        if "order" in metafunc.fixturenames:
            metafunc.parametrize("order", ORDERS)
        if "subject" in metafunc.fixturenames:
            self._parametrize(metafunc, "subject", {str(one): one for one in subjects_of(self.backend)})
        if "builder" in metafunc.fixturenames:
            targets = {f"{one.op}-{one.target}": one for one in builders_of(self.backend)}
            self._parametrize(metafunc, "builder", targets)

    def _parametrize(self, metafunc: pytest.Metafunc, name: str, found: Mapping[str, object]) -> None:
        """A test for each that was found; where there is none, one that is skipped and says so."""
        what = {"subject": "kernel", "builder": "target"}[name]
        nothing = pytest.mark.skip(
            reason=f"the backend {self.backend!r} has registered no {what} for an op that is known"
        )
        none = pytest.param(None, id="none", marks=nothing)
        metafunc.parametrize(name, [pytest.param(one, id=text) for text, one in found.items()] or [none])

    # -------------------------------------------------------------------------------------------------- loading

    def test_the_backend_loads_in_a_fresh_process(self, order: str) -> None:
        """It loads twice, with warnings as errors, in any order relative to others."""
        _tell(check_loads, self.backend, order)

    def test_loading_imports_no_compiler(self) -> None:
        """Who builds no kernel does not wait for a compiler."""
        _tell(check_cheap, self.backend)

    def test_loading_changes_no_global_state(self) -> None:
        """Loading leaves the process as it was."""
        _tell(check_no_trace_of_loading, self.backend)

    # --------------------------------------------------------------------------------------------------- asking

    def test_declared_facts_are_honoured(self, subject: Subject) -> None:
        """`devices`, `supported_archs` and the other declarations can hold."""
        _tell(check_declared_facts, subject)

    def test_refusal_and_entry_for_are_pure_and_total(self, subject: Subject) -> None:
        """They answer every spec, always the same, from the call alone."""
        _tell(check_purity, subject, self.limits)

    def test_nothing_is_ambiguous_with_this_backend_alone(self, subject: Subject) -> None:
        """Of the backend's own kernels and the in-tree ones, one is preferred wherever several serve."""
        _tell(check_ambiguity, subject)

    def test_overlaps_with_other_backends_are_listed(self) -> None:
        """Skipped where there are some: they are nobody's mistake, and the reason says what settles them."""
        lines = overlaps(subjects_of(self.backend))
        if lines:
            pytest.skip("\n".join(lines))

    # -------------------------------------------------------------------------------------------------- running

    def test_a_call_that_is_not_refused_agrees_with_the_reference(self, subject: Subject) -> None:
        """It builds, is right in every dtype, and writes what it may and nothing else."""
        self._run(check_agreement, subject)

    def test_equal_identity_means_equal_behaviour(self, subject: Subject) -> None:
        """What is built for one call serves the others with its identity."""
        self._run(check_identity, subject)

    def test_an_entry_gives_the_same_bits_from_four_threads(self, subject: Subject) -> None:
        """An entry is shared by all threads, so it keeps nothing between calls."""
        self._run(check_threads, subject)

    def test_every_configuration_agrees_with_the_reference(self, subject: Subject) -> None:
        """Tuning may take any that a kernel lists, so each builds and is right."""
        self._run(check_configurations, subject)

    def test_building_and_running_change_no_global_state(self, subject: Subject) -> None:
        """They leave the process as it was."""
        self._run(check_no_trace, subject)

    def test_a_target_agrees_with_the_reference(self, builder: Builder) -> None:
        """What a builder makes for a whole op agrees with the interface that the op would ask."""
        _tell(check_target, builder, self.limits)

    def _run(self, check: Callable[[Subject, Limits], None], subject: Subject) -> None:
        if any(map(is_here, subject.cls.devices)):
            import_compilers(self.compilers)
        _tell(check, subject, self.limits)


def _tell(check: Callable[..., None], *arguments: object) -> None:
    """Check a rule, and tell pytest: a broken rule as its own text, without the frames of this package."""
    outcome: Exception | None = None
    try:
        check(*arguments)
    except (NotTried, RuleBroken) as told:
        outcome = told
    if isinstance(outcome, NotTried):
        pytest.skip(str(outcome))
    if outcome is not None:
        pytest.fail(str(outcome), pytrace=False)
