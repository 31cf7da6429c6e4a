"""Run what a backend's entry points name: a module, an object with hooks, a class, or a function."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tileops.backend import hooks
from tileops.catalogue import meant
from tileops.errors import RegistrationError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    import pluggy

    from tileops.backend.recording import Recorder


def run_entry_points(points: Iterable[EntryPoint], recorder: Recorder) -> None:
    """Import what each entry point names, call it where it is to be called, and run its hooks with `recorder`."""
    for point in points:
        _run_hooks(_imported(point), recorder)


def _imported(point: EntryPoint) -> object:
    """What an entry point names. A class is instantiated, a function without hooks is called."""
    value = point.load()
    if isinstance(value, type):
        return value()
    if callable(value) and not _hooks_of(value):
        value()
    return value


def _hooks_of(value: object) -> list[str]:
    return [name for name in dir(value) if name.startswith(hooks.PREFIX) and callable(getattr(value, name))]


def _run_hooks(plugin: object, recorder: Recorder) -> None:
    """Call the hooks of one plugin, in a plugin manager of its own: nobody else's mistakes reach it."""
    import pluggy

    manager = pluggy.PluginManager(hooks.PROJECT)
    for specification in hooks.SPECIFICATIONS:
        pluggy.HookspecMarker(hooks.PROJECT)(specification)
    manager.add_hookspecs(hooks)
    _refuse_unmarked_hooks(plugin)
    manager.register(plugin)
    _refuse_unknown_hooks(manager, plugin)
    manager.hook.tileops_register_kernels(register_kernel_type=recorder.register_kernel_type)
    manager.hook.tileops_register_targets(
        register_detector=recorder.register_detector, register_kernel_builder=recorder.register_kernel_builder
    )
    manager.hook.tileops_register_devices(register_device_facts=recorder.register_device_facts)


def _refuse_unmarked_hooks(plugin: object) -> None:
    """Refuse what is named as a hook and would never be called: pluggy passes it over in silence."""
    for name in _hooks_of(plugin):
        if not hasattr(getattr(plugin, name), f"{hooks.PROJECT}_impl"):
            raise RegistrationError(f"{name} is not marked as a hook; write @tileops.backend.hookimpl above it")


def _refuse_unknown_hooks(manager: pluggy.PluginManager, plugin: object) -> None:
    """Say which hooks there are, where pluggy says only which one is unknown."""
    import pluggy

    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        known = tuple(sorted(specification.__name__ for specification in hooks.SPECIFICATIONS))
        unknown = [name for name in _hooks_of(plugin) if name not in known]
        name = unknown[0] if unknown else str(error)
        raise RegistrationError(f"no hook is called {name!r}; known: {', '.join(known)}{meant(name, known)}") from None
