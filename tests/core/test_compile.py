"""Compiled and exported programs: how many graphs, what is in them, and that kernels are selected when they run."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tileops
import tileops_backend_example
import torch
import torch.nn.functional as F  # noqa: N812
from tileops import BatchNormFwdOp, LayerNormFwdOp, OpNotAvailableError, RMSNormFwdOp
from tileops.kernels.rms_norm import RMSNorm
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("backends", "fresh_dynamo")

N = 8
NORM, TRAIN, INFER = LayerNormFwdOp(N), BatchNormFwdOp(training=True), BatchNormFwdOp()
SOURCES = [str(Path(package.__file__ or "").parents[1]) for package in (tileops, tileops_backend_example)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """In float64, which the example's compiled kernel leaves to its torch kernel: no test waits for a compiler."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


X, W, B = drawn(4, N), drawn(N, seed=1), drawn(N, seed=2)


def statistics() -> tuple[Tensor, Tensor]:
    return torch.zeros(N, dtype=torch.float64), torch.ones(N, dtype=torch.float64)


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.clone().requires_grad_() for tensor in tensors)


def compiled(call: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(call, fullgraph=True, **{"backend": "aot_eager", **options})


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


class Block(nn.Module):
    """The half of a pre-norm transformer block that has no attention."""

    def __init__(self, norm: Callable[..., Tensor] = NORM) -> None:
        super().__init__()
        self.norm = norm
        self.weight, self.bias = nn.Parameter(W.clone()), nn.Parameter(B.clone())
        self.up, self.down = nn.Linear(N, 2 * N, dtype=torch.float64), nn.Linear(2 * N, N, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x, self.weight, self.bias))))


class TransformerBlock(nn.Module):
    """A pre-norm transformer block, its parts as small as they can be."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rms = (getattr(tileops.nn, one)(N, dtype=torch.float64) for one in ("LayerNorm", "RMSNorm"))
        self.attention, self.mix = nn.Linear(N, 3 * N, dtype=torch.float64), nn.Linear(N, N, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.attention(self.norm(x)).chunk(3, -1)
        x = x + torch.softmax(query @ key.mT, -1) @ value
        return x + F.gelu(self.mix(self.rms(x)))


# ------------------------------------------------------------------------------------------------------- graphs


def test_a_call_is_one_node_of_ours_wherever_the_op_comes_from() -> None:
    block = Block()

    def as_global(x: Tensor) -> Tensor:
        return NORM(x, W, B)

    def built_inside(x: Tensor) -> Tensor:
        return LayerNormFwdOp((x.shape[-1],), eps=1e-5)(x, weight=W, bias=B)

    for call in (as_global, built_inside, block.forward, LayerNormFwdOp(N)):
        nodes: list[str] = []

        def backend(graph: Any, inputs: Any, nodes: list[str] = nodes) -> Any:
            nodes += [str(node.target) for node in graph.graph.nodes]
            return graph

        torch._dynamo.reset()
        torch.testing.assert_close(compiled(call, backend=backend)(X), call(X))
        assert [node for node in nodes if node.startswith("tileops")] == ["tileops.layer_norm.default"]


def test_the_graphs_of_a_training_step_hold_the_inner_ops() -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    nodes: list[str] = []

    def seen(graph: Any, inputs: Any) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes if str(node.target).startswith("tileops"))
        return make_boxed_func(graph.forward)

    x, w, b = leaves(X, W, B)
    compiled(NORM, backend=aot_autograd(fw_compiler=seen))(x, w, b).sum().backward()
    assert nodes == ["tileops._layer_norm.default", "tileops._layer_norm_backward.default"]


@pytest.mark.parametrize("trains", [False, True])
def test_fifty_batch_sizes_of_a_transformer_block_are_one_graph(trains: bool) -> None:
    block = TransformerBlock().requires_grad_(trains)
    call = compiled(block, dynamic=True)
    for n in range(2, 52):
        x = drawn(n, 3, N)
        torch.testing.assert_close(call(x), block(x))
        if trains:
            parameters = tuple(block.parameters())
            ours, theirs = (torch.autograd.grad(run(x).pow(2).sum(), parameters) for run in (call, block))
            torch.testing.assert_close(ours, theirs)
    assert graphs() == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    "op", [RMSNormFwdOp(N), lambda x: TRAIN(x, *statistics(), W)[0], lambda x: INFER(x, *statistics())[0]]
)
def test_fifty_batch_sizes_of_the_other_norms_are_one_graph_with_gradients(op: Callable[[Tensor], Tensor]) -> None:
    call = compiled(op, dynamic=True)
    for n in range(2, 52):
        (x,) = leaves(drawn(n, N))
        (ours,) = torch.autograd.grad(call(x).pow(2).sum(), x)
        torch.testing.assert_close(ours, torch.autograd.grad(op(x).pow(2).sum(), x)[0])
    assert graphs() == 1


def test_twelve_equal_layers_are_one_compilation() -> None:
    layers = [Block(LayerNormFwdOp(N)) for _ in range(12)]
    for layer in layers:
        torch.testing.assert_close(compiled(layer)(X), layer(X))
    assert graphs() == 1


def test_a_compiled_training_step_updates_running_statistics_and_gives_gradients() -> None:
    def step(norm: Callable[..., Tensor], mean: Tensor, variance: Tensor) -> Any:
        x, w, b = leaves(X, W, B)
        return torch.autograd.grad(norm(x, mean, variance, w, b).pow(3).sum(), (x, w, b))

    ours, theirs = statistics(), statistics()
    version = ours[0]._version
    got = step(compiled(lambda *given: TRAIN(*given)[0]), *ours)
    torch.testing.assert_close(got, step(lambda *given: F.batch_norm(*given, training=True), *theirs))
    torch.testing.assert_close(ours, theirs)
    assert ours[0]._version > version


def test_a_compiled_inference_returns_what_eager_returns() -> None:
    y, mean, invstd = compiled(INFER)(X, *statistics(), W, B)
    torch.testing.assert_close(y, F.batch_norm(X, *statistics(), W, B))
    assert (mean, invstd) == (None, None)


def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return NORM(x, w, b).pow(3).sum()


@pytest.mark.parametrize(
    "call",
    [
        grad(loss, argnums=(0, 1, 2)),
        lambda x, w, b: grad(lambda x: grad(loss)(x, w, b).square().sum())(x),
        lambda x, w, b: vmap(grad(loss, argnums=(0, 1)), in_dims=(0, None, None))(torch.stack((x, -x)), w, b),
        lambda x, w, b: checkpoint(loss, x, w, b, use_reentrant=False),
    ],
    ids=["grad", "grad of grad", "vmap of grad", "checkpoint"],
)
def test_transforms_compile_to_one_graph(call: Callable[..., Any]) -> None:
    torch.testing.assert_close(compiled(call)(X, W, B), call(X, W, B))
    assert graphs() == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo reads it
@pytest.mark.parametrize("through", [False, True])
def test_compiled_autograd_gives_the_same_gradients(through: bool) -> None:
    x, w, b = leaves(X, W, B)
    call = compiled(loss) if through else loss
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        call(x, w, b).backward()
    torch.testing.assert_close((x.grad, w.grad, b.grad), torch.autograd.grad(loss(x, w, b), (x, w, b)))


# ------------------------------------------------------------------------------------------------ selection inside


def doubled(of: float) -> type[RMSNorm]:
    class Scaled(RMSNorm):
        devices = frozenset({"cpu"})

        def forward(self, x: Tensor, weight: Tensor | None) -> Tensor:
            return x * of

    return Scaled


def test_a_kernel_that_is_registered_later_serves_the_next_call_of_a_compiled_graph() -> None:
    op = RMSNormFwdOp(N)
    call = compiled(op)
    before = call(X)
    tileops.register_kernel_type("RMSNormFwdOp", "twice", doubled(2))
    torch.testing.assert_close(before, F.rms_norm(X, (N,)))
    torch.testing.assert_close(call(X), X * 2)
    assert graphs() == 1


def test_a_scope_acts_on_a_compiled_graph_when_it_runs() -> None:
    tileops.register_kernel_type("RMSNormFwdOp", "twice", doubled(2))
    tileops.register_kernel_type("RMSNormFwdOp", "thrice", doubled(3))
    call = compiled(RMSNormFwdOp(N))
    for key, factor in (("local:twice", 2), ("local:thrice", 3), ("local:twice", 2)):
        with tileops.selection(prefer=key):
            torch.testing.assert_close(call(X), X * factor)
    assert graphs() == 1


def in_a_block(x: Tensor) -> Tensor:
    with tileops.selection(prefer="local:twice"):
        return RMSNormFwdOp(N)(x) + 1


@tileops.selection(prefer="local:twice")
def in_a_function(x: Tensor) -> Tensor:
    return RMSNormFwdOp(N)(x) + 1


@pytest.mark.parametrize("call", [in_a_block, in_a_function])
def test_a_scope_that_is_opened_inside_is_refused_in_one_graph_and_left_to_python_otherwise(call: Any) -> None:
    tileops.register_kernel_type("RMSNormFwdOp", "twice", doubled(2))
    with pytest.raises(Exception, match="a scope is opened inside what .* open it around the compiled call"):
        compiled(call)(X)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(call, backend="aot_eager")(X), X * 2 + 1)


class CompiledRMSNormOp(RMSNormFwdOp):
    pass


def test_a_target_and_a_subclass_compute_compiled_what_they_compute_eagerly() -> None:
    tileops.register_kernel_builder("RMSNormFwdOp", "five", lambda *_, **params: lambda x, w: x * 5)
    tileops.register_kernel_type("CompiledRMSNormOp", "seven", doubled(7))
    for op, factor in ((RMSNormFwdOp(N, target="five"), 5), (CompiledRMSNormOp(N), 7)):
        torch.testing.assert_close(op(X), X * factor)
        torch.testing.assert_close(compiled(op)(X), X * factor)


def test_selection_errors_leave_a_compiled_graph_as_they_are() -> None:
    strange = X.to(torch.float8_e4m3fn)
    with pytest.raises(OpNotAvailableError) as eager:
        NORM(strange)
    with pytest.raises(OpNotAvailableError) as raised:
        compiled(NORM)(strange)
    assert str(raised.value) == str(eager.value)
    assert raised.value.selection == eager.value.selection


@pytest.mark.usefixtures("no_backends")
def test_a_backward_that_nobody_serves_is_refused_when_the_node_of_a_compiled_graph_runs() -> None:
    tileops.register_kernel_type("RMSNormFwdOp", "twice", doubled(2))
    (x,) = leaves(X)
    y = compiled(RMSNormFwdOp(N))(x)
    with pytest.raises(OpNotAvailableError, match="in-tree kernels do not run on cpu: RMSNormBwdOp"):
        y.sum().backward()


def test_the_sentence_of_a_bad_argument_survives() -> None:
    with pytest.raises(Exception, match=r"weight has shape \(3,\); it must have \(8,\)"):
        compiled(NORM)(X, torch.ones(3))


# ------------------------------------------------------------------------------------------------------- inductor


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch's own use of it
def test_inductor_trains_through_layer_and_batch_norm() -> None:
    """Both norms in one program, and inputs that are not contiguous: inductor takes seconds for each."""

    def ours(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        y = NORM(torch.sin(x).t().contiguous().t(), w, b)
        return TRAIN(y.t().contiguous().t() * 2, mean, variance, w)[0].pow(3).sum()

    def theirs(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        y = F.layer_norm(torch.sin(x), (N,), w, b)
        return F.batch_norm(y * 2, mean, variance, w, training=True).pow(3).sum()

    given, kept, expected = leaves(X, W, B), statistics(), statistics()
    got = torch.autograd.grad(torch.compile(ours, fullgraph=True)(*given, *kept), given)
    torch.testing.assert_close(got, torch.autograd.grad(theirs(*given, *expected), given))
    torch.testing.assert_close(kept, expected)


# --------------------------------------------------------------------------------------------------------- export


def exported(module: nn.Module, path: Path, *, strict: bool = False) -> Any:
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(module, (X,), dynamic_shapes=({0: batch},), strict=strict)
    torch.export.save(program, path)
    return program


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_module_is_one_node(strict: bool, tmp_path: Path) -> None:
    program = exported(Block(), tmp_path / "block.pt2", strict=strict)
    names = [str(node.target) for node in program.graph.nodes if str(node.target).startswith("tileops")]
    assert names == ["tileops.layer_norm.default"]


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")  # torch's own use of it
def test_an_exported_batch_norm_keeps_its_running_statistics(tmp_path: Path) -> None:
    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            mean, variance = statistics()
            self.register_buffer("mean", mean)
            self.register_buffer("variance", variance)

        def forward(self, x: Tensor) -> Tensor:
            return TRAIN(x, self.mean, self.variance)[0]

    program = exported(Trained(), tmp_path / "norm.pt2", strict=False).run_decompositions()
    written = {one.target for one in program.graph_signature.output_specs if one.kind.name == "BUFFER_MUTATION"}
    assert written == {"mean", "variance"}
    loaded = torch.export.load(tmp_path / "norm.pt2").module()
    loaded(X)
    expected = statistics()
    F.batch_norm(X, *expected, training=True)
    torch.testing.assert_close((loaded.mean, loaded.variance), expected)


ACME = """
    from dataclasses import dataclass
    from torch import Tensor
    from tileops import CallSpec, KernelInterface, Op
    from tileops.backend import register_kernel_type

    @dataclass(frozen=True)
    class RowCall(CallSpec):
        n: int

    class Row(KernelInterface[RowCall]):
        request = RowCall
        def forward(self, x): raise NotImplementedError

    class Scaled(Row):
        devices = frozenset({"cpu"})
        def forward(self, x): return x * 5

    class RowOp(Op):
        interfaces = {"row": Row}
        def __init__(self, size: int = 1, *, target: str | None = None) -> None:
            super().__init__(target=target)
            self.size = size
        def check(self, x): pass
        def empty_results(self, x): return x.clone()
        def forward(self, x: Tensor) -> Tensor:
            return self.kernel_for("row", RowCall(x.device, x.numel()))(x)

    register_kernel_type("RowOp", "scaled", Scaled)
"""


def test_a_fresh_process_that_imports_tileops_runs_what_was_exported_bit_for_bit(
    site: Any, tmp_path: Path, fresh: None
) -> None:
    """Our op and a backend's, whose module nobody imports there."""
    op = importlib.import_module(site.backend("acme", ACME)).RowOp(3)

    class Rows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op(x)

    block, x = Block(), drawn(7, N)
    exported(block, tmp_path / "block.pt2")
    exported(Rows(), tmp_path / "rows.pt2")
    torch.save(x, tmp_path / "x.pt")
    site.python(f"""
        import sys
        sys.path[:0] = {SOURCES!r}
        import tileops, torch
        for name in ("block", "rows"):
            program = torch.export.load(f"{tmp_path}/{{name}}.pt2").module()
            torch.save(program(torch.load("{tmp_path}/x.pt")), f"{tmp_path}/{{name}}.y")
        """)
    assert torch.equal(torch.load(tmp_path / "block.y"), block(x))
    assert torch.equal(torch.load(tmp_path / "rows.y"), x * 5)


@pytest.mark.skipif(shutil.which("c++") is None, reason="AOTInductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")  # torch's own use of it
@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
def test_a_package_of_aotinductor_runs_where_the_op_was_named_before_it_is_loaded(
    site: Any, forked: Any, tmp_path: Path
) -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return NORM(x, W, B)

    x, package = drawn(7, N), tmp_path / "norm.pt2"
    program = exported(Norm(), tmp_path / "exported.pt2")
    quickly = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
    known = {name: value for name, value in quickly.items() if hasattr(torch._inductor.config, name)}
    torch._inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs=known)
    torch.save(x, tmp_path / "x.pt")
    load = f"""
        import tileops, torch
        {{named}}
        model = torch._inductor.aoti_load_package("{package}")
        with torch.no_grad():
            torch.save(model(torch.load("{tmp_path}/x.pt")), "{tmp_path}/y.pt")
    """
    unnamed = forked(site, load.format(named=""), policy=None, check=False)
    assert "Could not find schema for tileops::_layer_norm" in unnamed.stderr
    forked(site, load.format(named="torch.ops.tileops.layer_norm"), policy=None)
    assert torch.equal(torch.load(tmp_path / "y.pt"), NORM(x, W, B))
