"""Ops under torch's own machinery on a GPU: opcheck, compiled graphs, CUDA graphs, streams."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import tileops
import torch
import torch.nn.functional as F  # noqa: N812
from tileops import BatchNormFwdOp, LayerNormFwdOp, functional
from torch import Tensor, nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("backends", "fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning"),  # inductor's own use of it
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),  # float32 sums stay as they are
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # torch's own, when it makes a memory pool
]

N = 256


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


class Block(nn.Module):
    """A pre-norm transformer block, with a batch norm at its end."""

    def __init__(self, module: Any = tileops.nn, n: int = N) -> None:
        super().__init__()
        self.norm, self.rms, self.batch = module.LayerNorm(n), module.RMSNorm(n, eps=1e-6), module.BatchNorm1d(n)
        self.qkv, self.out = nn.Linear(n, 3 * n), nn.Linear(n, n)
        self.up, self.down = nn.Linear(n, 2 * n), nn.Linear(2 * n, n)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.rms(x))))
        return self.batch(x.transpose(1, 2)).transpose(1, 2)


def blocks() -> tuple[Block, Block]:
    """A block of our norms, and one of torch's, with the same parameters."""
    torch.manual_seed(0)
    theirs = Block(nn).cuda()
    ours = copy.deepcopy(theirs)
    assert len(tileops.nn.replace(ours).replaced) == 3
    return ours, theirs


def step(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The results and gradients of one training step, whose memory later steps may take."""
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = run(x)
    y.square().mean().backward()
    assert x.grad is not None
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return y.detach().clone(), {"x": x.grad.clone(), **gradients}


def agree(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------------------------------- opcheck


def wanted(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def checked() -> list[tuple[str, tuple[Any, ...]]]:
    x, w, b = drawn(8, N), drawn(N, seed=1), drawn(N, seed=2)
    mean, variance = torch.zeros(N, device="cuda"), torch.ones(N, device="cuda")
    return [
        ("layer_norm", (x, w, b, [N], 1e-5)),
        ("layer_norm", (wanted(x), wanted(w), wanted(b), [N], 1e-5)),
        ("layer_norm", (wanted(x.bfloat16().t().contiguous().t()), None, None, [N], 1e-5)),
        ("rms_norm", (wanted(x), wanted(w), [N], 1e-5)),
        ("rms_norm", (x.bfloat16(), None, [N], 1e-5)),
        ("fused_add_layer_norm", (x, x.flip(0), w, b, 1e-6)),
        ("fused_add_rms_norm", (x.bfloat16(), x.bfloat16(), w.bfloat16(), 1e-6)),
        ("batch_norm_infer", (x, mean, variance, w, b, 1e-5)),
        ("batch_norm_infer", (wanted(x), mean, variance, wanted(w), None, 1e-5)),
        ("batch_norm_train", (x, mean.clone(), variance.clone(), w, b, 0.1, 1e-5)),
        ("batch_norm_train", (wanted(x), None, None, wanted(w), b, 0.1, 1e-5)),
        ("batch_norm_train", (wanted(x), mean.repeat(2)[::2], variance.repeat(2)[::2], wanted(w), b, 0.1, 1e-5)),
        ("layer_norm_backward", (x, x, w, [N], 1e-5, [True, False, True], torch.float32)),
        ("rms_norm_backward", (x, x, None, [N], 1e-5, [True, False])),
        ("batch_norm_backward", (x, x, w, b.exp(), w, True, [True, True, True], None)),
    ]


@pytest.mark.parametrize("at", range(15))
def test_opcheck_finds_nothing(at: int) -> None:
    name, arguments = checked()[at]
    torch.library.opcheck(getattr(torch.ops.tileops, name).default, arguments, rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------------------------ compiled graphs


def test_fifty_batch_sizes_of_a_block_are_one_graph_with_gradients() -> None:
    ours, theirs = blocks()
    compiled = torch.compile(ours, fullgraph=True, dynamic=True)
    for rows in range(2, 52):
        x = drawn(rows, 16, N, seed=rows)
        agree(step(ours, compiled, x), step(theirs, theirs, x))
    agree(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("compiled", [False, True])
def test_mixed_precision_trains_as_with_torchs_norms(compiled: bool) -> None:
    runs = []
    for model, is_compiled in zip(blocks(), (compiled, False)):
        run: Any = torch.compile(model, fullgraph=True, backend="aot_eager") if is_compiled else model
        optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-2), torch.amp.GradScaler("cuda")
        losses = []
        for at in range(5):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = (run(drawn(8, 16, N, seed=at)) - 1).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        runs.append(losses)
    torch.testing.assert_close(runs[0], runs[1], rtol=2e-3, atol=2e-3)


# ---------------------------------------------------------------------------------------------------- CUDA graphs


@pytest.mark.parametrize("training", [False, True])
def test_reduce_overhead_replays_cuda_graphs_of_changing_inputs(training: bool) -> None:
    ours, theirs = blocks()
    compiled = torch.compile(ours.train(training), fullgraph=True, mode="reduce-overhead")
    theirs.train(training)
    optimizers = [torch.optim.SGD(model.parameters(), 1e-2) for model in (ours, theirs)]
    for at in range(6):  # the first runs warm up and record, the others replay
        x = drawn(4, 16, N, seed=at)
        torch.compiler.cudagraph_mark_step_begin()
        if training:
            agree(step(ours, compiled, x), step(theirs, theirs, x))
            for optimizer in optimizers:  # what replays reads the parameters of now
                optimizer.step()
        else:
            with torch.no_grad():
                agree(compiled(x).clone(), theirs(x))
    agree(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")  # the capture's, on purpose
def test_an_eager_training_step_is_captured_and_replayed_with_other_inputs() -> None:
    ours, theirs = blocks()
    x = drawn(4, 16, N).requires_grad_()
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(ours), (x,))
    with torch.no_grad():  # the warm-up has moved its statistics
        for own, initial in zip(graphed.buffers(), ours.buffers()):
            own.copy_(initial)
    for at in range(1, 4):
        x = drawn(4, 16, N, seed=at)
        agree(step(graphed, graphed, x), step(theirs, theirs, x))
    agree(dict(graphed.named_buffers()), dict(theirs.named_buffers()))


def test_an_op_that_was_prepared_alone_is_captured_with_its_running_statistics() -> None:
    op, x = BatchNormFwdOp(training=True), drawn(32, 64, dtype=torch.bfloat16)
    mean, variance = torch.zeros(64, device="cuda"), torch.ones(64, device="cuda")
    op.prepare(x, mean, variance)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, *_ = op(x, mean, variance)
    expected = torch.zeros(64, device="cuda"), torch.ones(64, device="cuda")
    for at in range(3):
        x.copy_(drawn(32, 64, seed=at))
        graph.replay()
        right = F.batch_norm(x, *expected, training=True)
        torch.testing.assert_close(y, right, rtol=1.6e-2, atol=1.6e-2)
    torch.testing.assert_close((mean, variance), expected)


# -------------------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("compiled", [False, True])
def test_both_directions_run_on_the_stream_of_the_forward(compiled: bool) -> None:
    op: Any = LayerNormFwdOp(N)
    call = torch.compile(op, fullgraph=True) if compiled else op
    x, w, b = (one.requires_grad_() for one in (drawn(64, N), drawn(N, seed=1), drawn(N, seed=2)))
    expected = torch.autograd.grad(call(x, w, b).square().sum(), (x, w, b))  # and all is built
    late = torch.zeros_like(x).requires_grad_()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # a kernel on another stream would overtake the copy
        with torch.no_grad():
            late.copy_(x)
        y = call(late, w, b)
        got = torch.autograd.grad(y.square().sum(), (late, w, b))
    stream.synchronize()
    agree(got, expected)


def test_functions_on_several_streams_at_once_give_the_same_bits() -> None:
    x, w = drawn(512, N), drawn(N, seed=1)
    expected = functional.rms_norm(x, (N,), w, 1e-5)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(functional.rms_norm(x, (N,), w, 1e-5))
    torch.cuda.synchronize()
    assert all(torch.equal(one, expected) for one in results)
