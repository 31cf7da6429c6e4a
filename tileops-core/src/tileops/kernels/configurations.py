"""The configurations that a kernel can be built in, and which of them a build takes.

A kernel class lists them in `Kernel.configurations`, and a kernel reads the one that it is built in as
`self.configuration`: the first, unless whoever runs the factory takes another (`taking`). Tuning does, to try each, and
so does a build whose winner is on record.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final, cast

from tileops.call_spec import CallSpec

Configuration = Mapping[str, Any]
"""One way to build a kernel: what varies, by name, each None, bool, int, float or str."""

NO_CONFIGURATION: Final[Configuration] = {}
"""That of a kernel whose class lists none."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A kernel of an entry whose class lists configurations, and the one that it is built in.

    Args:
        cls: Its class.
        configurations: What the class lists for the kernel's call, the default first.
        taken: The position of the one taken.
    """

    cls: type[Any]
    configurations: tuple[Configuration, ...]
    taken: int

    @property
    def configuration(self) -> Configuration:
        """The one taken."""
        return self.configurations[self.taken]


Take = Callable[[int, type[Any], Sequence[Configuration]], int]
"""Says which configuration a kernel is built in: given the kernel's place in its entry, its class, and what that lists."""


def take_default(place: int, cls: type[Any], configurations: Sequence[Configuration]) -> int:
    """Take the default, whichever kernel it is."""
    del place, cls, configurations
    return 0


class Build:
    """A build under way: the kernels that were made so far, in order. Those of equal class and call count as one."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._made: dict[tuple[type[Any], CallSpec], Choice] = {}

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The kernels that have configurations to choose from."""
        return tuple(self._made.values())

    def choice(self, cls: type[Any], call: CallSpec, configurations: tuple[Configuration, ...]) -> Choice:
        """What a kernel is built in."""
        if (cls, call) not in self._made:
            taken = self._take(len(self._made), cls, configurations)
            self._made[cls, call] = Choice(cls, configurations, taken)
        return self._made[cls, call]


_build: ContextVar[Build | None] = ContextVar("tileops_build", default=None)


@contextlib.contextmanager
def taking(take: Take) -> Generator[Build]:
    """Let `take` say which configurations kernels are built in, within the block and in its thread."""
    build = Build(take)
    token = _build.set(build)
    try:
        yield build
    finally:
        _build.reset(token)


def configuration_of(cls: type[Any], call: CallSpec | None) -> Configuration:
    """What a kernel of `cls` that is being made for `call` is built in; the default where nobody says."""
    listed = () if call is None else listed_configurations(cls, call)
    if not listed or call is None:
        return NO_CONFIGURATION
    build = _build.get()
    return listed[0] if build is None else build.choice(cls, call, listed).configuration


def listed_configurations(cls: type[Any], call: CallSpec) -> tuple[Configuration, ...]:
    """What `cls` lists for `call`, each as it can be put on record.

    Raises:
        TypeError: It lists what is no configuration, or one twice.
    """
    configurations = tuple(_checked(cls, one) for one in cls.configurations(call))
    twice = next((one for one in configurations if configurations.count(one) > 1), None)
    if twice is not None:
        raise TypeError(f"{cls.__qualname__}.configurations lists {shown(twice)} twice")
    return configurations


def _checked(cls: type[Any], configuration: object) -> Configuration:
    if isinstance(configuration, Mapping):
        items = dict(cast("Mapping[object, object]", configuration))
        if items and all(isinstance(name, str) and _is_plain(value) for name, value in items.items()):
            return cast("dict[str, Any]", items)
    raise TypeError(
        f"{cls.__qualname__}.configurations lists {configuration!r}; each is a mapping of names to None, bool, int, "
        "float or str"
    )


def _is_plain(value: object) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def shown(configuration: Configuration) -> str:
    """A configuration as messages show it: `threads=128, stages=2`."""
    return ", ".join(f"{name}={value}" for name, value in configuration.items())
