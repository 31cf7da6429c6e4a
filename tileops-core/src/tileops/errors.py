"""The exceptions of the library.

    TileopsError
    ├── InputError (ValueError)          an argument of an op call
    ├── DeclarationError (TypeError)     what a kernel class, a call spec or an op class declares
    ├── BackendError (ValueError)        what concerns backends and kernels
    │   ├── OpNotAvailableError          no kernel serves the call
    │   ├── AmbiguousDispatchError       several kernels serve it and none is preferred
    │   ├── UnknownTargetError           a target that nobody registered
    │   ├── AmbiguousTargetError         several targets claim a device and none was named
    │   ├── TargetDeclinedError          a target that was named does not serve the call
    │   ├── RegistrationError            a registration that cannot be taken
    │   ├── BackendLoadError             something is wrong with a backend, and `strict` makes it an error
    │   ├── Declined                     raised by a backend: it does not take part, or not in that one call
    │   ├── ScopeError                   a selection scope names what is not there
    │   ├── CaptureError (RuntimeError)  a kernel is not ready while a CUDA graph is captured
    │   └── BuildError (RuntimeError)    a kernel could not be built
    BackendLoadWarning (RuntimeWarning)  an installed backend was skipped
    KernelFaultWarning (RuntimeWarning)  a kernel class misbehaved when it was asked about a call

Messages of selection errors are rendered from a `Selection`, which the error carries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tileops.verdict import Failure, Selection, Verdict

if TYPE_CHECKING:
    from tileops.call_spec import CallSpec


class TileopsError(Exception):
    """Whatever the library raises on purpose."""


class InputError(TileopsError, ValueError):
    """An argument of an op call has the wrong shape, dtype, device or layout, or must not be given."""


class DeclarationError(TileopsError, TypeError):
    """A kernel class, a call spec or an op class declares something that cannot hold."""


class BackendError(TileopsError, ValueError):
    """Something about backends: registration, targets, availability."""


class SelectionError(BackendError):
    """No single kernel for a call. Carries the selection, with every verdict."""

    def __init__(self, selection: Selection) -> None:
        super().__init__(str(selection))
        self.selection = selection

    def __reduce__(self) -> tuple[type[SelectionError], tuple[Selection]]:
        """Pickle as what it was made of, so that it crosses process borders whole."""
        return type(self), (self.selection,)

    @property
    def op(self) -> str:
        """The op class's name."""
        return self.selection.op

    @property
    def interface(self) -> str:
        """The kernel interface's name in the op."""
        return self.selection.interface

    @property
    def call(self) -> CallSpec:
        """The call spec."""
        return self.selection.call

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Every implementation's answer."""
        return self.selection.verdicts


class OpNotAvailableError(SelectionError):
    """No implementation can run on the device, or none of those that can serves the call."""


class AmbiguousDispatchError(SelectionError):
    """Several implementations serve the call and none is preferred over the others."""


class UnknownTargetError(BackendError):
    """A target that nobody registered, or one that has nothing for the op."""


class AmbiguousTargetError(BackendError):
    """Several targets claim the call's device, each can take the op over, and nothing says which."""


class TargetDeclinedError(BackendError):
    """A target that the op or the program named declined the call. Nothing else is asked in its place."""


class RegistrationError(BackendError):
    """A registration that cannot be taken: a key that is used, a class that fits no interface."""


class BackendLoadError(BackendError):
    """Backends were loaded with `strict`, and something is wrong with one. Lists everything; the cause is chained."""


class Declined(BackendError):  # noqa: N818 - what a backend says, `raise Declined("no npu here")`; nothing went wrong
    """Raised by a backend, with the reason: it declines as a whole, or in a `build_kernel` that one call."""


class ScopeError(BackendError):
    """A selection scope, or the process default, names what is not there or cannot be opened."""


class BuildError(BackendError, RuntimeError):
    """An implementation was selected and could not be built. The cause is chained; the next call tries again."""


class CaptureError(BackendError, RuntimeError):
    """A call needs a kernel that nobody asked for before the capture of a CUDA graph began."""


class BackendLoadWarning(RuntimeWarning):
    """An installed backend was skipped. Says which, why, and what to do."""


class KernelFaultWarning(RuntimeWarning):
    """A kernel class raised, or answered nonsense, when it was asked about a call. It counts as a refusal."""


_ERROR_OF: Final[dict[Failure, type[SelectionError]]] = {
    Failure.NO_DEVICE: OpNotAvailableError,
    Failure.NOT_SERVED: OpNotAvailableError,
    Failure.AMBIGUOUS: AmbiguousDispatchError,
    Failure.TARGET: OpNotAvailableError,
}


def selection_error(selection: Selection) -> SelectionError:
    """The error that tells `selection`, which has no winner."""
    assert selection.failure is not None
    return _ERROR_OF[selection.failure](selection)
