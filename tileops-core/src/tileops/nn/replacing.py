"""Replacing a model's norms by ours, in place.

A module of ours is one of torch's with another `forward`. So a norm is replaced by changing its class: it stays the
object that it was, with its parameters, buffers, hooks and mode, wherever it is held.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, cast

from torch import nn
from torch.nn.modules.batchnorm import _LazyNormBase
from torch.nn.utils.parametrize import is_parametrized

from tileops.errors import InputError
from tileops.nn.norm import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    RMSNorm,
)

Classes = Mapping[type[nn.Module], type[nn.Module]]

NORMS: Final[Classes] = MappingProxyType(
    {
        nn.LayerNorm: LayerNorm,
        nn.RMSNorm: RMSNorm,
        nn.BatchNorm1d: BatchNorm1d,
        nn.BatchNorm2d: BatchNorm2d,
        nn.BatchNorm3d: BatchNorm3d,
        nn.GroupNorm: GroupNorm,
        nn.InstanceNorm1d: InstanceNorm1d,
        nn.InstanceNorm2d: InstanceNorm2d,
        nn.InstanceNorm3d: InstanceNorm3d,
    }
)
"""Torch's norms, and ours that take their places."""

_NORM_CLASS = re.compile(r"[^_].*Norm(\d[dD])?")


@dataclasses.dataclass(frozen=True)
class ModuleReport:
    """What became of one norm.

    Args:
        name: The module's name in the model, empty for the model itself; of a shared one, the first.
        before: Its class before.
        after: Its class now.
        reason: Why it was left, as a clause; None where it was replaced.
    """

    name: str
    before: type[nn.Module]
    after: type[nn.Module]
    reason: str | None = None

    def __str__(self) -> str:
        """One line of the report."""
        if self.reason is None:
            return f"{self.name or '(the model)'}: {_path(self.before)} is now {_path(self.after)}"
        return f"{self.name or '(the model)'}: {_path(self.before)} is left: {self.reason}"


@dataclasses.dataclass(frozen=True)
class ReplaceReport:
    """What became of every norm of a model, in the model's order. Prints as a report.

    Args:
        modules: Each norm once, also one that the model holds in several places.
    """

    modules: tuple[ModuleReport, ...]

    @property
    def replaced(self) -> tuple[ModuleReport, ...]:
        """The norms that were replaced."""
        return tuple(module for module in self.modules if module.reason is None)

    @property
    def left(self) -> tuple[ModuleReport, ...]:
        """The norms that were not."""
        return tuple(module for module in self.modules if module.reason is not None)

    def __str__(self) -> str:
        """How many, then a line for each norm."""
        counts = f"{len(self.replaced)} replaced, {len(self.left)} left"
        return "\n".join([counts, *(f"  {module}" for module in self.modules)])


def replace(model: nn.Module, classes: Classes = NORMS) -> ReplaceReport:
    """Replace the norms of `model` by ours, in place, and report on each.

    A module is replaced where its class is a key of `classes`. It becomes of the class given there and is
    unchanged otherwise. Every other norm is left, and the report says why.

    Args:
        model: Any module; a norm itself, too.
        classes: Which classes are replaced, and by what: by default torch's norms by ours. A value is a subclass
            of its key. To replace a norm that is not torch's, subclass it with a `forward` that calls
            `tileops.functional`.

    Returns:
        The report. `restore(model, classes)` undoes it.

    Raises:
        InputError: A value of `classes` is no subclass of its key, or stands for two. Nothing was replaced.
    """
    _check_classes(classes)
    ours = frozenset(classes.values())
    others = [(name, module) for name, module in _modules(model) if type(module) not in ours]
    norms = [(name, module) for name, module in others if type(module) in classes or _is_norm(module)]
    return ReplaceReport(tuple(_replaced(name, module, classes) for name, module in norms))


def restore(model: nn.Module, classes: Classes = NORMS) -> ReplaceReport:
    """Give every module of `model` whose class is a value of `classes` the class that it stands for.

    Undoes `replace`. As it goes by classes alone, it serves copies, models loaded from files, and modules that
    were written as ours: the model that it leaves needs no tileops.

    Args:
        model: Any module.
        classes: What `replace` was given.

    Returns:
        The report.

    Raises:
        InputError: As for `replace`.
    """
    _check_classes(classes)
    originals = {ours: theirs for theirs, ours in classes.items()}
    norms = [(name, module) for name, module in _modules(model) if type(module) in originals]
    return ReplaceReport(tuple(_replaced(name, module, originals) for name, module in norms))


def _check_classes(classes: Classes) -> None:
    for theirs, ours in classes.items():
        if not issubclass(ours, theirs):
            raise InputError(
                f"classes gives {_path(ours)} for {_path(theirs)}; it must be a subclass, so that parameters, hooks and "
                "state dicts stay valid"
            )
        stands_for = [_path(other) for other, given in classes.items() if given is ours]
        if len(stands_for) > 1:
            raise InputError(f"classes gives {_path(ours)} for {' and for '.join(stands_for)}; give each its own")


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module once, by its first name."""
    return list(cast("Iterator[tuple[str, nn.Module]]", model.named_modules()))


def _is_norm(module: nn.Module) -> bool:
    """Whether a class of the module is called a norm; one with modules inside is a block around a norm."""
    named = any(_NORM_CLASS.fullmatch(cls.__name__) for cls in type(module).__mro__)
    return named and (is_parametrized(module) or next(module.children(), None) is None)


def _replaced(name: str, module: nn.Module, classes: Classes) -> ModuleReport:
    before = type(module)
    reason = _reason_to_leave(module, classes)
    if reason is None:
        module.__class__ = classes[before]
    return ModuleReport(name, before, type(module), reason)


def _reason_to_leave(module: nn.Module, classes: Classes) -> str | None:
    cls = type(module)
    if cls in classes:
        patched = "forward" in vars(module)
        return "a forward is set on the object, and would run whatever its class" if patched else None
    if is_parametrized(module):
        return "parametrized; replace first, then parametrize"
    if isinstance(module, nn.SyncBatchNorm):
        return "its statistics are those of all processes; ours are of one"
    if isinstance(module, _LazyNormBase):
        return "not initialised; run the model once, then replace"
    base = next((base for base in cls.__mro__ if base in classes), None)
    if base is not None:
        return f"a subclass of {_path(base)} may compute something else; name it in `classes` to replace it"
    return "no class in `classes` stands for it"


def _path(cls: type[Any]) -> str:
    """Where a class is found, as people import it."""
    module = re.sub(r"^(torch|tileops)\.nn\..*", r"\1.nn", cls.__module__)
    return f"{module}.{cls.__qualname__}"
