"""Budgets of a hit: the look-up, the op call around it, and what neither may do."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pluggy
import tileops
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from record import Budget, Record
from tileops.backend import register_kernel_type, unregister_kernel_type
from tileops.kernels.layer_norm import LayerNorm, LayerNormCall
from tileops.norm import LayerNormFwdOp
from timing import interleaved, ratio_of, repeated

LOOK_UP = Budget(
    "look-up",
    "Building a call spec and finding its entry, over a dict look-up by a tuple of four",
    most=8.0,
    noise=0.1,
    usual=7.2,
)
OP_CALL = Budget(
    "op call",
    "An op call whose kernel does nothing (3 tensors, Parameter weights), over F.layer_norm of 8×64 on a CPU",
    most=0.85,
    noise=0.2,
    usual=0.44,
)
FUNCTIONAL = Budget(
    "functional",
    "A call of tileops.functional.layer_norm whose kernel does nothing, over the op called directly",
    most=1.25,
    noise=0.05,
    usual=1.16,
)
MODULE = Budget(
    "module",
    "A tileops.nn.LayerNorm whose kernel does nothing, over a torch.nn.LayerNorm of 8×64 on a CPU",
    most=1.0,
    noise=0.15,
    usual=0.65,
)
FRAMES = Budget("frames", "Python frames of ours that a hit enters, whichever way the op is called", 8, unit="frames")
FORBIDDEN = Budget(
    "forbidden",
    "Hits that take a lock, read the environment, log, query a device, bind a signature or call a hook",
    most=0,
    unit="hits",
)
ROUNDS = 400


class Nothing(LayerNorm):
    """A kernel that returns its input: what remains is what the library costs."""

    devices = frozenset({"cpu"})

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x."""
        return x


@contextlib.contextmanager
def registered(op: str, kernel: type[Any]) -> Iterator[None]:
    """`kernel` alone serves CPU calls of `op` in the block; installed backends stay out of the process."""
    with mock.patch.dict(os.environ, {tileops.backend.POLICY_VARIABLE: ""}):
        tileops.backend.load()
    register_kernel_type(op, "benchmark", kernel)
    try:
        yield
    finally:
        unregister_kernel_type(op, "benchmark")


class Hit:
    """An op, its arguments, and a first call behind it."""

    def __init__(self) -> None:
        self.op = LayerNormFwdOp(64)
        self.x = torch.randn(8, 64)
        self.weight = torch.nn.Parameter(torch.ones(64))
        self.bias = torch.nn.Parameter(torch.zeros(64))

    def ways(self) -> dict[str, Callable[[], Any]]:
        """Every way to call it that is promised to be fast. Each has been called before."""
        op, x, weight, bias = self.op, self.x, self.weight, self.bias
        tensors = (weight.detach(), bias.detach())
        ways: dict[str, Callable[[], Any]] = {
            "tensors": lambda: op(x, *tensors),
            "parameters under no_grad": torch.no_grad()(lambda: op(x, weight, bias)),
            "parameters under inference_mode": torch.inference_mode()(lambda: op(x, weight, bias)),
            "keyword arguments": torch.no_grad()(lambda: op(x, weight=weight, bias=bias)),
            "no weight": lambda: op(x),
        }
        for way in ways.values():
            way()
        return ways


def look_up() -> list[Record]:
    """Time the look-up. Both arms get an equal device that is another object, as calls do."""
    with registered("LayerNormFwdOp", Nothing), torch.no_grad():
        hit = Hit()
        hit.op(hit.x, hit.weight, hit.bias)
        key = (hit.x.device, 64, torch.float32, 1e-5)
        names = {
            "op": hit.op,
            "LayerNormCall": LayerNormCall,
            "table": {key: object()},
            "device": hit.weight.device,
            "n": 64,
            "dtype": torch.float32,
            "eps": hit.op.eps,
        }
        local = "; ".join(f"{name}_ = {name}" for name in names)
        spec = "call_(device=device_, n=n_, dtype=dtype_, eps=eps_, weight_dtype=dtype_, bias_dtype=dtype_)"
        arms = {
            "look-up": repeated(
                f"op_.kernel_for('layer_norm', {spec})", names, setup=f"{local}; call_ = LayerNormCall"
            ),
            "dict": repeated("table_[device_, n_, dtype_, eps_]", names, setup=local),
        }
        return [LOOK_UP.of_ratio(ratio_of(interleaved(arms, ROUNDS), "look-up", "dict"))]


def op_call() -> list[Record]:
    """Time the op call."""
    with registered("LayerNormFwdOp", Nothing), torch.no_grad():
        hit = Hit()
        names = {"op": hit.op, "x": hit.x, "w": hit.weight, "b": hit.bias, "layer_norm": F.layer_norm}
        local = "; ".join(f"{name}_ = {name}" for name in names)
        arms = {
            "op": repeated("op_(x_, w_, b_)", names, setup=local),
            "F.layer_norm": repeated("layer_norm_(x_, (64,), w_, b_, 1e-5)", names, setup=local),
        }
        return [OP_CALL.of_ratio(ratio_of(interleaved(arms, ROUNDS), "op", "F.layer_norm"))]


def front_doors() -> list[Record]:
    """Time a call through `tileops.functional`, and one through a module."""
    with registered("LayerNormFwdOp", Nothing), torch.no_grad():
        hit = Hit()
        ours, theirs = tileops.nn.LayerNorm(64), torch.nn.LayerNorm(64)
        names = {"op": hit.op, "x": hit.x, "w": hit.weight, "b": hit.bias, "layer_norm": tileops.functional.layer_norm}
        names |= {"ours": ours, "theirs": theirs}
        local = "; ".join(f"{name}_ = {name}" for name in names)
        arms = {
            "op": repeated("op_(x_, w_, b_)", names, setup=local),
            "functional": repeated("layer_norm_(x_, (64,), w_, b_, 1e-5)", names, setup=local),
            "tileops.nn": repeated("ours_(x_)", names, setup=local),
            "torch.nn": repeated("theirs_(x_)", names, setup=local),
        }
        taken = interleaved(arms, ROUNDS)
        functional, module = ratio_of(taken, "functional", "op"), ratio_of(taken, "tileops.nn", "torch.nn")
        return [FUNCTIONAL.of_ratio(functional), MODULE.of_ratio(module)]


def frames() -> list[Record]:
    """Count the frames of each way to call; the worst counts."""
    with registered("LayerNormFwdOp", Nothing):
        counted = {name: frames_of(way) for name, way in Hit().ways().items()}
    most = max(counted.values(), key=len)
    detail = ", ".join(f"{name} {len(names)}" for name, names in counted.items())
    return [FRAMES.measured(len(most), detail=f"{detail}; the most: {', '.join(most)}")]


def frames_of(call: Callable[[], Any]) -> list[str]:
    """The frames of ours that `call` enters, generated methods included, by their names."""
    entered: list[str] = []

    def on_event(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").partition(".")[0] == "tileops":
            entered.append(frame.f_code.co_name)

    sys.setprofile(on_event)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


class ForbiddenError(Exception):
    """A hit did what it may not do."""


def _refusing(what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ForbiddenError(what)

    return refuse


class RefusingLock:
    """Stands where a lock was."""

    acquire = __enter__ = wait = _refusing("a lock")

    def __exit__(self, *error: object) -> None:
        """Nothing was taken."""


LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event)


def _locks() -> Iterator[tuple[object, str]]:
    """Where the library holds its locks: in its modules, and in objects of its own that those hold."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "tileops"]
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, LOCKS):
                yield module, name
            elif type(value).__module__.startswith("tileops") and hasattr(value, "__dict__"):
                yield from ((value, field) for field, held in list(vars(value).items()) if isinstance(held, LOCKS))


@contextlib.contextmanager
def forbidding() -> Iterator[None]:
    """Whatever a hit may not do raises in the block."""
    device_facts = tileops.device.device_facts
    holders = [m for n, m in sys.modules.items() if n.startswith("tileops") and vars(m).get("device_facts")]
    queries = ("current_device", "device_count", "get_device_capability", "get_device_properties", "is_available")
    places: list[tuple[Any, str, str]] = [
        (os._Environ, "__getitem__", "an environment read"),
        (os, "getenv", "an environment read"),
        (logging.Logger, "isEnabledFor", "logging"),
        (logging.Logger, "handle", "logging"),
        (inspect.Signature, "bind", "Signature.bind"),
        (inspect, "signature", "inspect.signature"),
        (pluggy.HookCaller, "__call__", "a pluggy call"),
        *((holder, "device_facts", "a device query") for holder in holders),
        *((torch.cuda, name, "a device query") for name in queries),
    ]
    assert callable(device_facts), "the library reads devices in tileops.device.device_facts"
    with contextlib.ExitStack() as stack:
        for owner, name, what in places:
            stack.enter_context(mock.patch.object(owner, name, _refusing(what)))
        for owner, name in list(_locks()):
            stack.enter_context(mock.patch.object(owner, name, RefusingLock()))
        yield


def forbidden() -> list[Record]:
    """Make each forbidden thing raise, and call in every way that is promised to be fast."""
    caught: dict[str, str] = {}
    with registered("LayerNormFwdOp", Nothing):
        ways = Hit().ways()
        with forbidding():
            for name, way in ways.items():
                try:
                    way()
                except ForbiddenError as error:
                    caught[name] = str(error)
    detail = ", ".join(f"{name}: {what}" for name, what in caught.items()) or f"none of {len(ways)} ways to call"
    return [FORBIDDEN.measured(len(caught), detail=detail)]
