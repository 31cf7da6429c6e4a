"""Verdicts and selections: why a call gets the kernel it gets, as values.

The same values feed the errors, `op.explain` and `tileops explain`, so that the three never disagree.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Final

from tileops.call_spec import CallSpec

IN_TREE: Final = "in-tree"
"""The name of our own kernels, where a backend's name is expected. In `preferred_over` it means every in-tree
implementation of the interface, also ones that a later release adds."""


@dataclasses.dataclass(frozen=True)
class Owner:
    """Who registered something.

    Args:
        name: The backend's name, unique in a process: `in-tree`, `local` for what a program registered
            itself, else the distribution's name without `tileops-backend-`.
        distribution: The distribution's name and version, as pip shows them; empty for `local`.
    """

    name: str
    distribution: str = ""

    def full_key(self, key: str) -> str:
        """`key` as every table and message writes it: bare in-tree, else behind the owner's name."""
        return key if self.name == IN_TREE else f"{self.name}:{key}"


class Answer(enum.Enum):
    """What an implementation says to a call."""

    SERVES = "serves"
    OTHER_DEVICE = "runs on another device type"
    OTHER_ARCH = "is built for other architectures"
    EXCLUDED = "is excluded by a scope"
    NOT_REQUIRED = "is not what a scope requires"
    REFUSES = "refuses"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One implementation's answer to one call.

    Args:
        key: The implementation's full key: `held_row`, `acme:row`.
        cls: Its class.
        owner: Who ships it.
        answer: What it says.
        reason: Why it does not serve the call, as a clause with the number met and the number served;
            None where it serves.
        favour: What speaks for it beside its own declarations: `preferred by tileops.selection(prefer="acme")`;
            None where nothing does, or where it does not serve.
    """

    key: str
    cls: type[Any]
    owner: Owner
    answer: Answer
    reason: str | None = None
    favour: str | None = None

    @property
    def serves(self) -> bool:
        """Whether the implementation is available and applicable."""
        return self.answer is Answer.SERVES

    @property
    def class_name(self) -> str:
        """Where the class is found: its module and qualified name."""
        return f"{self.cls.__module__}.{self.cls.__qualname__}"

    def as_json(self) -> dict[str, Any]:
        """The verdict as `--json` prints it."""
        return {
            "key": self.key,
            "class": self.class_name,
            "backend": self.owner.name,
            "serves": self.serves,
            "reason": self.reason,
            "favour": self.favour,
        }


class Failure(enum.Enum):
    """Why a selection has no winner. The values are the phrases that the errors open with."""

    NO_DEVICE = "in-tree kernels do not run on"
    NOT_SERVED = "no implementation serves this call"
    AMBIGUOUS = "dispatch is ambiguous"
    TARGET = "the target does not serve this call"


@dataclasses.dataclass(frozen=True)
class Selection:
    """The verdicts of one call and the winner.

    Args:
        op: The op class's name.
        interface: The kernel interface's name in the op.
        call: The call spec, as tables hold it.
        verdicts: Every implementation's answer: in-tree first, then by key.
        key: The winner's full key; None where there is none.
        failure: Why there is none; None where there is one.
        contenders: The keys that serve the call and that nothing else is preferred over: the winner alone, or
            those between which dispatch is ambiguous.
        remarks: What backends say about themselves that may explain a missing kernel, and what targets do.
        scope: What the program says about whose kernels are taken, the innermost scope first.
        target: The target that takes the op over; then no kernel is asked, and `key` is None.
    """

    op: str
    interface: str
    call: CallSpec
    verdicts: tuple[Verdict, ...]
    key: str | None
    failure: Failure | None
    contenders: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    scope: tuple[str, ...] = ()
    target: str | None = None

    @property
    def winner(self) -> Verdict | None:
        """The verdict of the implementation that serves the call, or None."""
        return next((verdict for verdict in self.verdicts if verdict.key == self.key), None)

    @property
    def headline(self) -> str:
        """The outcome in one line: the winner, or the error's first sentence."""
        where = f"{self.op}.{self.interface}"
        if self.target is not None:
            return f"target {self.target!r} serves this call: {where}"
        if self.failure is None:
            return f"{self.key} serves this call: {where}"
        if self.failure is Failure.NO_DEVICE:
            return f"{self.failure.value} {self.call.device.type}: {where}"
        if self.failure is Failure.AMBIGUOUS:
            return f"{self.failure.value}: {', '.join(self.contenders)} all serve this call: {where}"
        return f"{self.failure.value}: {where}"

    def __str__(self) -> str:
        """The whole selection: outcome, call, every verdict, and what to do where nothing was selected."""
        lines = [self.headline, f"  call: {self.call}", *(f"  scope: {said}" for said in self.scope)]
        lines += [f"  {line}" for line in self._verdict_lines()]
        lines += [f"  {remark}" for remark in self.remarks]
        lines += [f"  {line}" for line in self.advice()]
        return "\n".join(lines)

    def _verdict_lines(self) -> list[str]:
        width = max((len(verdict.key) for verdict in self.verdicts), default=0)
        return [f"{verdict.key:<{width}}  {self.saying(verdict)}  [{_origin(verdict)}]" for verdict in self.verdicts]

    def saying(self, verdict: Verdict) -> str:
        """What a verdict comes to in this selection: selected, outranked, or the reason."""
        if verdict.reason is not None:
            return verdict.reason
        if verdict.key == self.key:
            return "serves this call: selected" + (f", {verdict.favour}" if verdict.favour else "")
        if self.target is not None or self.failure is Failure.TARGET:
            return "serves this call; the target is asked in its place"
        outranked = verdict.key not in self.contenders
        return "serves this call; another is preferred over it" if outranked else "serves this call"

    def advice(self) -> list[str]:
        """What to do where nothing was selected."""
        if self.failure is Failure.NO_DEVICE:
            wanted = f"install a backend that runs on {self.call.device.type} (for cpu: tileops-backend-example)"
            return [
                f"{wanted}, or move the tensors to a CUDA device; see docs/guide/selecting.md#in-tree-kernels-do-not-run-on-this-device"
            ]
        if self.failure is Failure.NOT_SERVED:
            left_out = any(verdict.answer in (Answer.EXCLUDED, Answer.NOT_REQUIRED) for verdict in self.verdicts)
            scope = "take back what a scope says, " if left_out else ""
            return [
                f"{scope}change what the reasons name, or install a backend that serves it; see docs/guide/selecting.md#no-implementation-serves-this-call"
            ]
        if self.failure is Failure.AMBIGUOUS:
            return [self._authors_advice(), self._users_advice()]
        return []

    def _authors_advice(self) -> str:
        """What whoever ships a contender can do: state which is better."""
        owners = {verdict.owner.name: verdict for verdict in self._contending()}
        if "local" in owners:
            mine = owners["local"].key.partition(":")[2]
            other = next((key for key in self.contenders if not key.startswith("local:")), "another key")
            preferred = "IN_TREE" if owners.keys() == {"local", IN_TREE} else repr(other)
            return f"let {mine} state preferred_over = frozenset({{{preferred}}}), or unregister_kernel_type it"
        if len(owners) == 1:
            return f"one of them must name another in preferred_over: only {next(iter(owners))} can settle it for all"
        shipped = [verdict.owner.distribution or name for name, verdict in owners.items()]
        return f"none of {', '.join(shipped)} states that its kernel is better than the others'"

    def _users_advice(self) -> str:
        """The line that settles it for whoever calls: a backend's name, or a key where it has several that serve."""
        contending = self._contending()
        chosen = next((one for one in contending if one.owner.name not in (IN_TREE, "local")), contending[-1])
        serving = [one for one in self.verdicts if one.serves and one.owner == chosen.owner]
        name = chosen.owner.name if len(serving) == 1 else chosen.key
        settled = f'selection(prefer="{name}")'
        return f"choose one: with tileops.{settled}: …, or for the process tileops.set_default_{settled}"

    def _contending(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.key in self.contenders]

    def as_json(self) -> dict[str, Any]:
        """The selection as `tileops explain --json` prints it."""
        return {
            "op": self.op,
            "interface": self.interface,
            "call": str(self.call),
            "scope": list(self.scope),
            "key": self.key,
            "target": self.target,
            "verdicts": [verdict.as_json() for verdict in self.verdicts],
            "error": None if self.failure is None else self.headline,
            "remarks": list(self.remarks),
        }


def _origin(verdict: Verdict) -> str:
    distribution = verdict.owner.distribution
    return f"{verdict.class_name}, {distribution}" if distribution else verdict.class_name
