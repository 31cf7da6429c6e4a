"""What a process keeps while backends are loaded: whose turn it is, who is installed, what is registered so far."""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from tileops.backend.discovery import Installed, installed_backends
from tileops.backend.drafts import Draft
from tileops.backend.importing import is_importing_any, modules_being_imported
from tileops.backend.policy import Policy
from tileops.backend.registration import registry
from tileops.verdict import Owner

FORK_PATIENCE: Final = 10.0
"""Seconds that a fork waits for a load of another thread: a child could not import what that one is importing."""
_TICK: Final = 0.05

active: contextvars.ContextVar[Installed | None] = contextvars.ContextVar("tileops_active_backend", default=None)
"""The backend whose entry points are being run here."""


class Process:
    """The one load of a process, and what backends register before it is over.

    Args:
        policy: Which backends may be loaded; None until a load begins.
        pending: What backends have registered that are not loaded yet, by name.
        lock: Held to swap a draft; never while somebody else's code runs.
    """

    def __init__(self) -> None:
        self.policy: Policy | None = None
        self.pending: dict[str, Draft] = {}
        self.lock = threading.RLock()
        self._installed: tuple[Installed, ...] | None = None
        self._leader: int | None = None
        self._ended = threading.Event()

    def installed(self) -> tuple[Installed, ...]:
        """The installed backends, read once: also who a module's registrations belong to."""
        if self._installed is None:
            self._installed = installed_backends()
        return self._installed

    def begin_load(self) -> bool:
        """Whether the load is this thread's to do; waits for the thread that does it, unless that waits for this."""
        while not registry().loaded:
            with self.lock:
                leader, ended = self._leader, self._ended
                if leader is None:
                    self._leader = threading.get_ident()
                    ended.clear()
                    return True
            if leader == threading.get_ident() or not _waited(leader, ended):
                return False
        return False

    def end_load(self) -> None:
        """Let the threads go on that wait for the load."""
        with self.lock:
            self._leader = None
        self._ended.set()

    def redraft(self, owner: Owner, change: Callable[[Draft], Draft]) -> bool:
        """Swap the draft of a backend that is not loaded yet for `change` of it; False where it is loaded.

        `change` runs with no lock held: it may import the op that a kernel is registered for.
        """
        while registry().record_of(owner.name) is None:
            before = self.pending.get(owner.name)
            after = change(before or Draft.of(owner))
            with self.lock:
                if self.pending.get(owner.name) is before and registry().record_of(owner.name) is None:
                    self.pending[owner.name] = after
                    return True
        return False

    def before_fork(self) -> None:
        """Let a load of another thread end, for a while, and keep the next from beginning until the fork is done.

        What the thread of a load holds in Python's import system, and in libraries, stays locked in the child.
        """
        deadline = time.monotonic() + FORK_PATIENCE
        self.lock.acquire()
        while self._leader not in (None, threading.get_ident()) and time.monotonic() < deadline:
            self.lock.release()
            self._ended.wait(deadline - time.monotonic())
            self.lock.acquire()

    def after_fork_in_parent(self) -> None:
        """Let loads begin again."""
        self.lock.release()

    def after_fork_in_child(self) -> None:
        """Begin with locks that nobody holds; a load that another thread had begun is begun again."""
        self.lock = threading.RLock()
        if self._leader not in (None, threading.get_ident()):
            self._leader = None
            self._ended = threading.Event()


def _waited(leader: int, ended: threading.Event) -> bool:
    """Wait for the leader's load to end; False where it waits for a module that this thread is importing."""
    importing = modules_being_imported()
    while not ended.wait(_TICK if importing else None):
        if is_importing_any(leader, importing):
            return False
    return True


process: Final = Process()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=process.before_fork,
        after_in_parent=process.after_fork_in_parent,
        after_in_child=process.after_fork_in_child,
    )
