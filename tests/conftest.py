"""Fixtures of every test: isolation, a family of ops that runs anywhere, and distributions made on the spot."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tileops import catalogue
from tileops.backend import POLICY_VARIABLE, STRICT_VARIABLE, discovery, loading, registration
from tileops.backend.process import Process, process
from tileops.backend.registration import Registry
from tileops.call_spec import CallSpec
from tileops.kernels.kernel_base import Kernel, KernelInterface
from tileops.ops import entries, op_base
from tileops.ops.op_base import Op

CPU = torch.device("cpu")
VARIABLES = (POLICY_VARIABLE, STRICT_VARIABLE)


@pytest.fixture(autouse=True)
def isolation() -> Iterator[None]:
    """Give back, after each test, what the process had registered, loaded, built and named before it."""
    registry = registration.registry()
    state = {**vars(process), "pending": dict(process.pending)}
    names, classes, built = dict(catalogue._classes), list(op_base._op_classes), dict(entries._built)
    yield
    vars(process).update(state)
    ours = {name: cls for name, cls in catalogue._classes.items() if name in catalogue.IN_TREE_OPS}
    catalogue._classes.clear()
    catalogue._classes.update({**names, **ours})
    op_base._op_classes[:] = dict.fromkeys([*classes, *ours.values()])
    entries._built.clear()
    entries._built.update(built)
    registration.update_registry(lambda _: registry)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """A process that has compiled nothing. Importing dynamo takes a second: only tests that compile do."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_backends() -> None:
    """A process that has looked for backends and found none."""
    registration.update_registry(lambda _: Registry(loaded=True))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not looked for backends yet; everything installed may be loaded."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    vars(process).update(vars(Process()))
    registration.update_registry(lambda _: Registry())


# ------------------------------------------------------------------------- a family of ops that runs anywhere


@dataclasses.dataclass(frozen=True)
class FakeCall(CallSpec):
    """The facts of a call of a fake op."""

    n: int
    tag: object = None


class FakeInterface(KernelInterface[FakeCall]):
    """Takes a tensor; a fake kernel returns its own name with it."""

    request = FakeCall

    def forward(self, x: torch.Tensor) -> Any:
        """Return the kernel's name and x."""
        raise NotImplementedError


class OtherInterface(KernelInterface[FakeCall]):
    """A second place to call kernels, with calls of the same type."""

    request = FakeCall

    def forward(self, x: torch.Tensor) -> Any:
        """Return the kernel's name and x."""
        raise NotImplementedError


Refusal = str | None | Callable[[FakeCall], Any]


class Fake:
    """Makes fake kernels and ops, and logs what is asked of them.

    `log` holds `(what, kernel's name)`: `("refusal", …)`, `("entry_for", …)`, `("built", …)`, `("ran", …)`.
    """

    Call = FakeCall
    Interface = FakeInterface
    Other = OtherInterface

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []

    def call(self, n: int = 1, device: str = "cpu", tag: object = None) -> FakeCall:
        """A call of a fake op."""
        return FakeCall(torch.device(device), n, tag)

    def asked(self, what: str) -> list[str]:
        """The kernels that `what` happened to, in order."""
        return [name for logged, name in self.log if logged == what]

    def kernel(
        self,
        name: str = "Fake",
        *,
        refuse: Refusal = None,
        devices: tuple[str, ...] = ("cpu",),
        archs: Any = None,
        general: bool = False,
        over: tuple[str, ...] = (),
        entry: Callable[[Any, FakeCall], Any] | None = None,
        run: Callable[..., Any] | None = None,
        of: tuple[type[KernelInterface[Any]], ...] = (FakeInterface,),
    ) -> type[Kernel[Any]]:
        """A kernel class: what it refuses (a reason, or a function of the call), how it is built, what it does."""
        log = self.log

        def refusal(cls: Any, call: FakeCall) -> Any:
            log.append(("refusal", name))
            return refuse(call) if callable(refuse) else refuse

        def entry_for(cls: Any, call: FakeCall) -> Any:
            log.append(("entry_for", name))
            return (call, lambda: cls(call)) if entry is None else entry(cls, call)

        def build(self: Any, call: FakeCall | None = None) -> None:
            log.append(("built", name))
            Kernel.__init__(self, call)

        def forward(self: Any, x: torch.Tensor) -> Any:
            log.append(("ran", name))
            return (name, x) if run is None else run(x)

        members = {
            "__module__": __name__,
            "__init__": build,
            "refusal": classmethod(refusal),
            "entry_for": classmethod(entry_for),
            "forward": forward,
            "devices": frozenset(devices),
            "supported_archs": archs,
            "general": general,
            "preferred_over": frozenset(over),
        }
        return type(name, of, members)

    def upto(self, limit: int) -> Callable[[FakeCall], str | None]:
        """A refusal of calls above `limit`."""
        return lambda call: None if call.n <= limit else f"n is {call.n}; serves up to {limit}"

    def op(
        self,
        kernels: Mapping[str, type[Kernel[Any]]] | None = None,
        *,
        name: str = "FakeOp",
        interfaces: Mapping[str, type[KernelInterface[Any]]] | None = None,
        base: type[Op] = Op,
    ) -> type[Op]:
        """An op class whose call with an x of n elements asks for a kernel for n."""

        def forward(self: Any, x: torch.Tensor) -> Any:
            return self.kernel_for("fake", FakeCall(x.device, x.numel()))(x)

        members: dict[str, Any] = {
            "__module__": __name__,
            "forward": forward,
            "check": lambda self, x: None,
            "empty_results": lambda self, x: x.clone(),
        }
        if base is Op or interfaces is not None:
            members["interfaces"] = {"fake": FakeInterface} if interfaces is None else dict(interfaces)
        if kernels is not None:
            members["kernel_types"] = dict(kernels)
        return type(name, (base,), members)


@pytest.fixture
def fake(no_backends: None) -> Fake:
    """Fake kernels and ops on CPU, in a process without backends."""
    return Fake()


# ---------------------------------------------------------------------------- distributions made on the spot


class Site:
    """A folder on the import path that distributions are installed in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: set[str] = set()

    def module(self, name: str, source: str) -> None:
        """Write a module (dotted names make packages)."""
        path = self.folder.joinpath(*name.split("."))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(textwrap.dedent(source), encoding="utf-8")
        self.modules.add(name.partition(".")[0])
        importlib.invalidate_caches()

    def distribution(
        self,
        name: str,
        entry_points: str | None,
        version: str = "1.0",
        *,
        metadata: str = "",
        suffix: str = "dist-info",
    ) -> Path:
        """Write the metadata of a distribution, with further lines of METADATA; the path of its folder."""
        folder = self.folder / f"{name.replace('-', '_')}-{version}.{suffix}"
        folder.mkdir(parents=True)
        core = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{textwrap.dedent(metadata)}"
        folder.joinpath("METADATA" if suffix == "dist-info" else "PKG-INFO").write_text(core)
        folder.joinpath("RECORD").write_text(f"{folder.name}/METADATA,,\n{folder.name}/RECORD,,\n")
        if entry_points is not None:
            folder.joinpath("entry_points.txt").write_text(textwrap.dedent(entry_points))
        importlib.invalidate_caches()
        return folder

    def backend(self, name: str, source: str, *, version: str = "1.0", attribute: str = "", metadata: str = "") -> str:
        """Install `tileops-backend-NAME` with one module, which its entry point names; the module's name."""
        module = f"plug_{name.replace('-', '_')}"
        self.module(module, source)
        value = f"{module}:{attribute}" if attribute else module
        self.distribution(
            f"tileops-backend-{name}", f"[tileops.backends]\n{name} = {value}\n", version, metadata=metadata
        )
        return module

    def another(self, folder: Path) -> Site:
        """A second folder, whose modules are forgotten with those of this one."""
        folder.mkdir()
        other = Site(folder)
        other.modules = self.modules
        return other

    def python(
        self, code: str, *options: str, policy: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in a process of its own, which sees the installed distributions."""
        environment = {key: value for key, value in os.environ.items() if key not in VARIABLES}
        environment["PYTHONPATH"] = os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        if policy is not None:
            environment[POLICY_VARIABLE] = policy
        command = [sys.executable, *options, "-c", textwrap.dedent(code)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A folder that is first on the import path, of this process and of those that `site.python` starts."""
    folder = tmp_path / "site"
    folder.mkdir()
    before = set(sys.modules)  # one of them may have the name of a module that a test writes: a compiler
    monkeypatch.syspath_prepend(folder)
    made = Site(folder)
    yield made
    for name in list(sys.modules):
        if name.partition(".")[0] in made.modules and name not in before:
            del sys.modules[name]


@pytest.fixture
def only_the_site(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide what is installed elsewhere from discovery, for tests that are about what they install themselves."""
    folder = str(site.folder)
    monkeypatch.setattr(discovery, "_distributions", lambda: importlib.metadata.distributions(path=[folder]))


class WarmParent:
    """Runs programs in children of one process that has imported torch."""

    def __init__(self, folder: Path) -> None:
        script = Path(__file__).with_name("warm_parent.py")
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore::DeprecationWarning", str(script)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={name: value for name, value in os.environ.items() if name not in VARIABLES},
        )  # fmt: skip
        self._outputs = {name: folder / name for name in ("stdout", "stderr")}

    def __call__(self, site: Site, program: str, *, policy: str | None = "-example", check: bool = True) -> Any:
        """Run a program that sees what is installed in `site`; what it printed and its exit code."""
        request = {
            "folder": str(site.folder),
            "environment": {} if policy is None else {POLICY_VARIABLE: policy},
            "program": textwrap.dedent(program),
            **{name: str(path) for name, path in self._outputs.items()},
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        code = int(self._server.stdout.readline())
        printed = {name: path.read_text() for name, path in self._outputs.items()}
        assert not check or code == 0, f"the program ended with {code}\n{printed['stderr']}"
        return subprocess.CompletedProcess("program", code, **printed)

    def end(self) -> None:
        """End the parent."""
        self._server.communicate()


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmParent]:
    """Run a program in a process of its own, without the seconds that a new one takes to import torch."""
    parent = WarmParent(tmp_path_factory.mktemp("forked"))
    yield parent
    parent.end()


# ------------------------------------------------------------------------------------------------------- ops


@pytest.fixture(scope="session")
def backends() -> None:
    """A process in which the installed backends are loaded: ops run on CPU."""
    loading.load()


class Close:
    """Compares results with a reference computed in float64 from the same values."""

    TOLERANCES = {
        torch.float64: (1e-12, 1e-12),
        torch.float32: (1e-5, 1e-5),
        torch.float16: (2e-3, 2e-3),
        torch.bfloat16: (1.6e-2, 1.6e-2),
    }

    def __call__(self, result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """Assert that `result`, in `dtype`, is what float64 gives, to the rounding of its dtype."""
        assert result.dtype is (dtype or result.dtype)
        relative, absolute = self.TOLERANCES[result.dtype]
        torch.testing.assert_close(result.double(), expected.double(), rtol=relative, atol=absolute)


@pytest.fixture(scope="session")
def close() -> Close:
    """Compare a result with float64."""
    return Close()


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors with the values of a two-dimensional x, in every memory layout that is awkward for a kernel."""
    wide = torch.zeros(x.shape[0], 2 * x.shape[1], dtype=x.dtype, device=x.device)
    wide[:, ::2] = x
    flat = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    flat[1:] = x.reshape(-1)
    reversed_rows = x.flip(0).contiguous()
    padded = torch.zeros(x.shape[0], x.shape[1] + 3, dtype=x.dtype, device=x.device)
    padded[:, 3:] = x
    return {
        "contiguous": x.contiguous(),
        "strided": wide[:, ::2],
        "transposed": x.t().contiguous().t(),
        "misaligned": flat[1:].view(x.shape),
        "padded": padded[:, 3:],
        "reversed": reversed_rows.flip(0),
    }


@pytest.fixture(scope="session")
def in_layouts() -> Callable[[torch.Tensor], dict[str, torch.Tensor]]:
    """The values of a matrix in awkward memory layouts."""
    return layouts
