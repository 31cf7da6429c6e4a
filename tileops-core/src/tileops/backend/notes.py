"""What the library notes about a backend's registrations: names that nothing here has. No fault, unless it is a slip.

They are kept, and take effect when the op or the key appears; the notes say what is so now.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tileops.catalogue import find_op, meant, op_names
from tileops.verdict import IN_TREE

if TYPE_CHECKING:
    from tileops.backend.units import Unit


def unknown_names(unit: Unit, units: Iterable[Unit]) -> tuple[str, ...]:
    """A sentence for each name in `unit` that this release, and `units`, all that is registered, do not have."""
    everybody = tuple(units)
    return (*_unknown_ops(unit), *dict.fromkeys(_unknown_keys(unit, everybody)), *_idle_targets(unit, everybody))


def _unknown_ops(unit: Unit) -> Iterator[str]:
    known = op_names()
    for op in dict.fromkeys([op for op, _ in unit.kernels] + [builder.op for builder in unit.builders]):
        if op not in known:
            yield f"registers for {op!r}, an op that this release does not have{meant(op, known)}"


def _idle_targets(unit: Unit, units: tuple[Unit, ...]) -> Iterator[str]:
    built = tuple(sorted({builder.target for one in units for builder in one.builders}))
    for target in (detector.target for detector in unit.detectors if detector.target not in built):
        yield f"target {target!r} has a detector and takes no op over{meant(target, built)}"


def _unknown_keys(unit: Unit, units: tuple[Unit, ...]) -> Iterator[str]:
    for op, implementation in unit.kernels:
        known = _keys_to_prefer(op, unit, units)
        for key in sorted(implementation.cls.preferred_over - known) if find_op(op) is not None else ():
            near = meant(key, tuple(sorted(known - {implementation.key, implementation.full_key})))
            yield f"{op}: {implementation.full_key} is preferred over {key!r}, a key unknown here{near}"


def _keys_to_prefer(op: str, unit: Unit, units: tuple[Unit, ...]) -> frozenset[str]:
    """What a class of `unit` may name: its owner's and the in-tree keys, bare; everybody's, behind their names."""
    in_tree = frozenset[str]() if (known := find_op(op)) is None else frozenset(known.kernel_types)
    own = {implementation.key for name, implementation in unit.kernels if name == op}
    full = {implementation.full_key for one in units for name, implementation in one.kernels if name == op}
    return frozenset({IN_TREE}) | in_tree | own | full | {f"{IN_TREE}:{key}" for key in in_tree}
