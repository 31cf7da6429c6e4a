"""The entries of the process: what was built, shared by every op, thread and stream.

Within one interface, calls share an entry only when they select the same class with the same build identity.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import traceback
from collections.abc import Callable, Generator, Hashable
from typing import Any, Final, cast

from tileops.backend.units import Implementation
from tileops.call_spec import CallSpec
from tileops.device import made_current
from tileops.errors import BuildError
from tileops.kernels.configurations import Choice, Take, take_default, taking
from tileops.kernels.kernel_base import KernelInterface, kernels_of
from tileops.ops.progress import showing_build
from tileops.ops.tables import build_once
from tileops.ops.tuning_records import TakeRecorded, identity_of
from tileops.scopes import in_force
from tileops.verdict import IN_TREE

Key = tuple[type[KernelInterface[Any]], type[Any], Hashable]


@dataclasses.dataclass(frozen=True)
class Built:
    """An entry with the implementation that it was built from.

    Args:
        entry: What the factory returned.
        implementation: The implementation.
        choices: The kernels of the entry that have configurations, with those that they were built in.
    """

    entry: Any
    implementation: Implementation
    choices: tuple[Choice, ...] = ()


_built: dict[Key, Built] = {}


def built_entries() -> tuple[Built, ...]:
    """Everything that is built now."""
    return tuple(_built.values())


def drop_entries() -> None:
    """Forget everything that was built."""
    _built.clear()


def entry_of(op: str, interface: type[KernelInterface[Any]], implementation: Implementation, call: CallSpec) -> Any:
    """The entry that `implementation` has for `call`: reused, or built once however many threads ask.

    Raises:
        BuildError: `entry_for` or the factory failed. Nothing is stored, every waiting thread gets the error,
            the next call tries again, and no other implementation is taken in silence.
    """
    return shared(build_of(op, interface, implementation, call)).entry


def shared(build: Build) -> Built:
    """What calls share of a build: reused, or built once."""
    built = _built.get(build.key)
    if built is None:
        what = f"{build.implementation.full_key}, for {build.call},"
        built = build_once(_built, build.key, build.recorded, what)
    return built


@dataclasses.dataclass(frozen=True)
class Build:
    """What an implementation says about building its entry for a call.

    Args:
        op: The op's name.
        interface: The interface.
        implementation: The implementation.
        call: The call.
        identity: The build identity.
        factory: Builds the entry.
    """

    op: str
    interface: type[KernelInterface[Any]]
    implementation: Implementation
    call: CallSpec
    identity: Hashable
    factory: Callable[[], Any]

    @property
    def key(self) -> Key:
        """What entries are shared by."""
        return self.interface, self.implementation.cls, self.identity

    def record_identity(self) -> Any:
        """What a record of a tuning must be of to serve this build; raises `Unrecordable`."""
        return identity_of(self.interface, self.implementation, self.call, self.identity)

    def recorded(self) -> Built:
        """The entry in the configurations on record; in the defaults where there are none, or they cannot be built."""
        take = TakeRecorded(self.record_identity)
        try:
            return self.taking(take)
        except BuildError:
            if not take.took_another:
                raise
        return self.taking(take_default)

    def taking(self, take: Take) -> Built:
        """The entry in the configurations that `take` says. Nothing is stored."""
        with _naming_the_failure(self.op, self.implementation, self.call), taking(take) as build:
            entry = run_factory(self.implementation, self.call, self.factory)
        return Built(entry, self.implementation, build.choices)


def build_of(op: str, interface: type[KernelInterface[Any]], implementation: Implementation, call: CallSpec) -> Build:
    """Ask `implementation` about building its entry for `call`; raises a `BuildError` where it fails to say."""
    with _naming_the_failure(op, implementation, call):
        identity, factory = implementation.cls.entry_for(call)
        hash(identity)
    return Build(op, interface, implementation, call, identity, factory)


def put_in_place(build: Build, built: Built) -> Any:
    """Let calls share `built` from now on; the entry that they shared until now, None where they shared none."""
    before = _built.get(build.key)
    _built[build.key] = built
    return None if before is None else before.entry


_UNHEARD: Final = {
    "tilelang.jit.kernel": logging.INFO,  # that it compiles
    "tilelang.cache.kernel_cache": logging.WARNING,  # that it has a program already, where one is built again
}
"""What TileLang logs for whoever compiles by hand: by logger, the highest level."""


@contextlib.contextmanager
def _quiet_compiler() -> Generator[None]:
    """Drop what TileLang logs while this thread compiles; its other warnings are heard.

    The environment variable that silences it would do so for every other user of TileLang in the process.
    """
    thread = threading.get_ident()

    def is_heard(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno > _UNHEARD[record.name]

    loggers = [logging.getLogger(name) for name in _UNHEARD]
    for logger in loggers:
        logger.addFilter(is_heard)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_heard)


def run_factory(implementation: Implementation, call: CallSpec, factory: Callable[[], Any]) -> Any:
    """What a factory builds, with the call's device current. Nothing is stored."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(showing_build(implementation.full_key))
        stack.enter_context(_quiet_compiler())
        stack.enter_context(made_current(call.device))
        stack.enter_context(in_force(None))  # an entry is shared whatever the scope, so none may decide what is in it
        entry = factory()
    if not callable(entry):
        raise TypeError(f"the factory returned {entry!r}, which is neither a kernel nor an Entry")
    return entry


@contextlib.contextmanager
def _naming_the_failure(op: str, implementation: Implementation, call: CallSpec) -> Generator[None]:
    """Turn what an author's code raises into a `BuildError` that says whose code it was."""
    try:
        yield
    except BuildError:
        raise
    except Exception as error:
        owner = implementation.owner
        cls = implementation.cls
        lines = [
            f"{op}: {implementation.full_key} was selected and could not be built: {type(error).__name__}: {error}",
            f"  class: {cls.__module__}.{cls.__qualname__}" + (f", {owner.distribution}" if owner.distribution else ""),
            f"  call: {call}",
            f"  {_way_out(implementation)}",
        ]
        raise BuildError("\n".join(lines)) from error


def _way_out(implementation: Implementation) -> str:
    owner = implementation.owner.name
    if owner == IN_TREE:
        return "no other kernel is taken in its place; the cause above says what is missing on this machine"
    if owner == "local":
        return f"no other kernel is taken in its place; unregister_kernel_type(op, {implementation.key!r}) takes it out"
    left_out = f'tileops.selection(exclude="{owner}"), or TILEOPS_BACKENDS=-{owner}, leaves that backend out'
    return f"no other kernel is taken in its place; {left_out}"


def note_who_ran(error: BaseException) -> None:
    """Add to an exception that left a kernel which kernel it was and who ships it. Python ≥ 3.11."""
    if not hasattr(error, "add_note"):
        return
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ran = {id(frame.f_locals.get(frame.f_code.co_varnames[0])) for frame in frames if frame.f_code.co_argcount}
    codes = {frame.f_code for frame in frames}
    for built in built_entries():
        if any(id(kernel) in ran for kernel in kernels_of(built.entry)) or _code_of(built.entry) in codes:
            owner = built.implementation.owner
            shipped = owner.distribution or owner.name
            cast("Any", error).add_note(f"raised in {built.implementation.full_key} ({shipped})")
            return


def _code_of(entry: object) -> object:
    """The code of an entry's own function; None where a kernel is the entry."""
    return getattr(getattr(entry, "run", entry), "__code__", None)
