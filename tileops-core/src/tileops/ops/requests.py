"""What may be asked of an op: its interfaces, and call specs of their types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from tileops.call_spec import CallSpec, plain_class, unkeyable_field
from tileops.errors import DeclarationError

if TYPE_CHECKING:
    from typing_extensions import Never


def check_request(cls: type[Any], interface: str, call: CallSpec) -> None:
    """Refuse an unknown interface, a spec of another type, and one that cannot key a table."""
    kernel_interface = cls.interfaces.get(interface)
    if kernel_interface is None:
        raise DeclarationError(f"{cls.__name__} has no interface {interface!r}; it has: {', '.join(cls.interfaces)}")
    wanted, given = kernel_interface.request, cast("type[Any]", type(call))
    if not issubclass(given, CallSpec) or plain_class(given) is not wanted:
        raise DeclarationError(f"{cls.__name__}.{interface} takes a {wanted.__qualname__}, not a {given.__qualname__}")
    if unkeyable_field(call) is not None:
        refuse_unkeyable(call)


def refuse_unkeyable(call: CallSpec) -> Never:
    """Raise for a spec with a field that cannot key a table, naming the field."""
    raise DeclarationError(
        f"{type(call).__qualname__} holds {unkeyable_field(call)}, which cannot key a table; a spec holds None, bool, "
        "int, float, str, torch.dtype, torch.device, enum members, frozen dataclasses, and tuples or frozensets of them"
    )
