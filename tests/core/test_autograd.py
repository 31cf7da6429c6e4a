"""Gradients: agreement with torch on every road that reaches them, and refusals where there is none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tileops
import torch
import torch.nn.functional as F  # noqa: N812
from tileops import (
    AmbiguousDispatchError,
    BackwardOp,
    BatchNormFwdOp,
    DeclarationError,
    GroupNormFwdOp,
    InputError,
    InstanceNormFwdOp,
    LayerNormBwdOp,
    LayerNormFwdOp,
    OpNotAvailableError,
    RMSNormFwdOp,
    TorchOp,
    autograd,
)
from tileops.kernels.batch_norm import BatchNormTrain
from tileops.kernels.rms_norm import RMSNorm, RMSNormBwd
from tileops.scopes import in_force
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, stack_module_state, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("backends")

Norm = Callable[..., Tensor]
N = 6
LAYER, RMS, TRAIN, INFER = LayerNormFwdOp(N), RMSNormFwdOp(N, 1e-5), BatchNormFwdOp(training=True), BatchNormFwdOp()
GROUP, INSTANCE = GroupNormFwdOp(2), InstanceNormFwdOp()


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


MEAN, VAR = drawn(N, seed=7), drawn(N, seed=8).abs() + 0.5
X, W, B = drawn(4, N), drawn(N, seed=1), drawn(N, seed=2)
XS, WS = drawn(3, 4, N), drawn(3, N)


def plain_layer(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    """Composed of torch's smallest ops, whose derivatives of every order are right."""
    centred = x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled(y, w, b)


def plain_rms(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    return scaled(x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt(), w, b)


def plain_train(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    centred = x - x.mean(0)
    return scaled(centred / (centred.square().mean(0) + 1e-5).sqrt(), w, b)


def plain_infer(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    return scaled((x - MEAN) / (VAR + 1e-5).sqrt(), w, b)


def plain_group(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    return scaled(plain_layer(x.unflatten(-1, (2, 3)), None, None).flatten(-2), w, b)


def plain_instance(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    return scaled(plain_layer(x.t(), None, None).t(), w, b)


def scaled(y: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    y = y if w is None else y * w
    return y if b is None else y + b


OURS: dict[str, Norm] = {
    "layer": LAYER,
    "rms": lambda x, w, b: scaled(RMS(x, w), None, b),
    "train": lambda x, w, b: TRAIN(x, None, None, w, b)[0],
    "infer": lambda x, w, b: INFER(x, MEAN, VAR, w, b)[0],
    "group": GROUP,
    "instance": lambda x, w, b: INSTANCE(x.t()[None], None, None, w, b)[0].t(),  # rows are elements in space
}
PLAIN: dict[str, Norm] = {
    "layer": plain_layer,
    "rms": plain_rms,
    "train": plain_train,
    "infer": plain_infer,
    "group": plain_group,
    "instance": plain_instance,
}

each_norm = pytest.mark.parametrize("name", list(OURS))


def agree(ours: Any, plain: Any) -> None:
    """Both hold equal numbers to 1e-12, in the same structure."""
    ours, plain = tree_leaves(ours), tree_leaves(plain)
    assert len(ours) == len(plain) > 0
    for one, other in zip(ours, plain):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.clone().requires_grad_() for tensor in tensors)


def cubed(norm: Norm) -> Norm:
    """A loss whose derivatives of every order depend on the inputs."""
    return lambda x, w, b: (norm(x, w, b).pow(3) / 8).sum()


# ------------------------------------------------------------------------------------------------------- eager


@each_norm
@pytest.mark.parametrize("wanted", [bits for bits in itertools.product((True, False), repeat=3) if any(bits)])
def test_any_subset_of_arguments_gets_its_gradient(name: str, wanted: tuple[bool, ...]) -> None:
    def gradients(norm: Norm) -> list[Tensor]:
        given = [one.clone().requires_grad_(is_wanted) for one, is_wanted in zip((X, W, B), wanted)]
        cubed(norm)(*given).backward()
        assert [one.grad is not None for one in given] == list(wanted)
        return [one.grad for one in given if one.grad is not None]

    agree(gradients(OURS[name]), gradients(PLAIN[name]))


@each_norm
@pytest.mark.parametrize("absent", [("w",), ("b",), ("w", "b")], ids=" ".join)
def test_absent_affine_tensors_have_no_gradient(name: str, absent: tuple[str, ...]) -> None:
    def gradients(norm: Norm) -> Any:
        x, w, b = leaves(X, W, B)
        w, b = (None if "w" in absent else w), (None if "b" in absent else b)
        return torch.autograd.grad(cubed(norm)(x, w, b), [one for one in (x, w, b) if one is not None])

    agree(gradients(OURS[name]), gradients(PLAIN[name]))


@each_norm
def test_a_gradient_is_differentiable_again_and_again(name: str) -> None:
    def derivatives(norm: Norm) -> list[Any]:
        given = leaves(X, W, B)
        orders, value = [], cubed(norm)(*given)
        for _ in range(3):
            orders.append(torch.autograd.grad(value, given, create_graph=True, materialize_grads=True))
            value = sum(one.square().sum() for one in orders[-1])
        return orders

    agree(derivatives(OURS[name]), derivatives(PLAIN[name]))


@pytest.mark.parametrize("norm", [LAYER, lambda x, w, b: TRAIN(x, None, None, w, b)[0]])
def test_torchs_own_checks_of_gradients_pass(norm: Norm) -> None:
    assert torch.autograd.gradcheck(norm, leaves(X, W, B))
    assert torch.autograd.gradgradcheck(norm, leaves(X, W, B))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("affine", [("own", "own"), ("float32", "own"), ("own", "float32")], ids=" ".join)
def test_each_gradient_has_the_dtype_of_its_argument(dtype: torch.dtype, affine: tuple[str, str], close: Any) -> None:
    kinds = [dtype if one == "own" else torch.float32 for one in affine]
    for name in ("layer", "rms", "train"):
        given = [one.to(kind).requires_grad_() for one, kind in zip((X, W, B), (dtype, *kinds))]
        with torch.no_grad():
            wide = leaves(*(one.double() for one in given))
        up = drawn(4, N, seed=9, dtype=dtype)
        with tileops.selection(exclude="example:row"):  # it would be compiled
            y = OURS[name](*given)
        got = torch.autograd.grad(y, given, up.to(y.dtype))
        expected = torch.autograd.grad(PLAIN[name](*wide), wide, up.double())
        for one, right, argument in zip(got, expected, given):
            close(one, right, argument.dtype)


def test_a_frozen_batch_norm_keeps_float32_statistics_beside_bfloat16(close: Any) -> None:
    x, w = X.bfloat16().requires_grad_(), W.bfloat16().requires_grad_()
    wide = leaves(x.detach().double(), w.detach().double())
    got = torch.autograd.grad(INFER(x, MEAN.float(), VAR.bfloat16(), w)[0].sum(), (x, w))
    theirs = F.batch_norm(wide[0], MEAN.float().double(), VAR.bfloat16().double(), wide[1])
    for one, right in zip(got, torch.autograd.grad(theirs.sum(), wide)):
        close(one, right, torch.bfloat16)


@pytest.mark.parametrize(
    "of",
    [lambda y: y.sum(), lambda y: y.t().reshape(-1)[::2].sum(), lambda y: (y.t() @ torch.ones_like(y)).sum()],
)  # fmt: skip
@each_norm
def test_a_gradient_may_have_any_layout(name: str, of: Callable[[Tensor], Tensor]) -> None:
    def gradients(norm: Norm) -> Any:
        x, w, b = leaves(X, W, B)
        return torch.autograd.grad(of(norm(x.t().contiguous().t(), w, b)), (x, w, b))

    agree(gradients(OURS[name]), gradients(PLAIN[name]))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(2, N, 3, 2), (3, N, 4), (2, N, 2, 3, 2)])
def test_channels_last_memory_stays_so_in_the_gradient(training: bool, shape: tuple[int, ...]) -> None:
    values = drawn(*shape)
    x = values.movedim(1, -1).contiguous().movedim(-1, 1).requires_grad_()
    plain = values.clone().requires_grad_()
    up = drawn(*shape, seed=3)
    (got,) = torch.autograd.grad(BatchNormFwdOp(training)(x, MEAN.clone(), VAR.clone(), W, B)[0], x, up)
    theirs = F.batch_norm(plain, MEAN.clone(), VAR.clone(), W, B, training)
    agree(got, torch.autograd.grad(theirs, plain, up))
    assert got.stride() == x.stride()


def test_rows_over_several_axes_have_gradients_of_their_shape() -> None:
    x, w, b = leaves(drawn(2, 3, 4), drawn(3, 4, seed=1), drawn(3, 4, seed=2))
    ours = torch.autograd.grad(LayerNormFwdOp((3, 4))(x, w, b).pow(3).sum(), (x, w, b))
    agree(ours, torch.autograd.grad(F.layer_norm(x, (3, 4), w, b).pow(3).sum(), (x, w, b)))
    ours = torch.autograd.grad(LayerNormFwdOp((3, 4))(x, None, b).pow(3).sum(), (x, b))
    agree(ours, torch.autograd.grad(F.layer_norm(x, (3, 4), None, b).pow(3).sum(), (x, b)))


def test_no_rows_have_gradients_of_zero() -> None:
    x, w, b = leaves(torch.empty(0, N), torch.ones(N), torch.ones(N))
    got = torch.autograd.grad(LAYER(x, w, b).sum(), (x, w, b))
    agree(got, (torch.empty(0, N), torch.zeros(N), torch.zeros(N)))


def test_statistics_take_no_gradient_and_running_ones_are_updated_once() -> None:
    x, *_ = leaves(X)
    mean, variance = MEAN.clone(), VAR.clone()
    y, save_mean, save_invstd = TRAIN(x, mean, variance)
    assert y.requires_grad
    assert not save_mean.requires_grad
    assert not save_invstd.requires_grad
    theirs = MEAN.clone(), VAR.clone()
    F.batch_norm(X, *theirs, training=True)
    agree((mean, variance), theirs)
    y.sum().backward()
    agree((mean, variance), theirs)


def test_a_frozen_batch_norm_whose_statistics_change_before_its_backward_is_refused_by_torch() -> None:
    x, *_ = leaves(X)
    mean, variance = MEAN.clone(), VAR.clone()
    y = INFER(x, mean, variance)[0]
    TRAIN(X, mean, variance)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("mode", [torch.enable_grad(), torch.device("cpu")], ids=["plain", "through"])
@each_norm
def test_the_result_may_be_changed_in_place(name: str, mode: Any) -> None:
    def gradients(norm: Norm) -> Any:
        x, w, b = leaves(X, W, B)
        return torch.autograd.grad(norm(x, w, b).mul_(2).relu_().sum(), (x, w, b))

    with mode:
        ours = gradients(OURS[name])
    agree(ours, gradients(PLAIN[name]))


def test_no_gradient_is_recorded_where_none_is_wanted() -> None:
    x, *_ = leaves(X)
    with torch.no_grad():
        assert LAYER(x).grad_fn is None
    with torch.inference_mode():
        assert LAYER(x).grad_fn is None
    assert LAYER(X, W).grad_fn is None


# ------------------------------------------------------------------------------------------------ torch's own ways


class Block(nn.Module):
    def __init__(self, norm: Norm = LAYER) -> None:
        super().__init__()
        self.norm = norm
        self.weight, self.bias = nn.Parameter(W.clone()), nn.Parameter(B.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.sin(x), self.weight, self.bias)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_recomputes_the_same_gradients(reentrant: bool) -> None:
    def gradients(norm: Norm, *, keep: bool) -> Any:
        block, (x,) = Block(norm), leaves(X)
        y = block(x) if keep else checkpoint(block, x, use_reentrant=reentrant)
        y.pow(3).sum().backward()
        return x.grad, *(one.grad for one in block.parameters())

    agree(gradients(LAYER, keep=False), gradients(plain_layer, keep=True))


def test_a_functional_call_takes_parameters_from_outside() -> None:
    def gradients(norm: Norm) -> Any:
        w, b = leaves(W * 2, B * 3)
        y = functional_call(Block(norm), {"weight": w, "bias": b}, (X,))
        return torch.autograd.grad(y.pow(3).sum(), (w, b))

    agree(gradients(LAYER), gradients(plain_layer))


def test_saved_tensors_pass_the_hooks() -> None:
    packed: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Any:
        packed.append(tuple(tensor.shape))
        return tensor.detach().numpy().copy()

    x, w, b = leaves(X, W, B)
    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        y = LAYER(x, w, b)
    assert packed == [(4, N), (N,)]
    got = torch.autograd.grad(y, (x, w, b), X)
    agree(got, torch.autograd.grad(plain_layer(x, w, b), (x, w, b), X))


def test_an_ensemble_of_models_is_one_vmap() -> None:
    def gradients(norm: Norm) -> Any:
        models = [Block(norm) for _ in range(3)]
        for at, model in enumerate(models):
            model.weight.data += at
        parameters, buffers = stack_module_state(models)

        def loss(parameters: Any, buffers: Any, x: Tensor) -> Tensor:
            return functional_call(models[0], (parameters, buffers), (x,)).pow(3).sum()

        return vmap(grad(loss), in_dims=(0, 0, None))(parameters, buffers, X)

    agree(gradients(LAYER), gradients(plain_layer))


class SeenOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("tileops."):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_around_the_backward_alone_sees_the_backward() -> None:
    x, w, b = leaves(X, W, B)
    y = LAYER(x, w, b)
    with SeenOps() as mode:
        y.sum().backward()
    assert mode.seen == ["tileops._layer_norm_backward.default"]


def test_a_mode_around_both_sees_both_and_gradients_are_the_same() -> None:
    x, w, b = leaves(X, W, B)
    with SeenOps() as mode:
        got = torch.autograd.grad(TRAIN(x, None, None, w, b)[0].pow(3).sum(), (x, w, b))
    assert mode.seen == ["tileops._batch_norm_train.default", "tileops._batch_norm_backward.default"]
    agree(got, torch.autograd.grad(plain_train(x, w, b).pow(3).sum(), (x, w, b)))


# --------------------------------------------------------------------------------------------------- torch.func


def over(norm: Norm) -> Any:
    """Plain autograd over a functional gradient."""
    x, w, b = leaves(X, W, B)
    return torch.autograd.grad(grad(cubed(norm))(x, w, b).square().sum(), (x, w))


TRANSFORMS: dict[str, Callable[[Norm], Any]] = {
    "grad": lambda norm: grad(cubed(norm), argnums=(0, 1, 2))(X, W, B),
    "vmap of x": lambda norm: vmap(norm, in_dims=(0, None, None))(XS, W, B),
    "vmap of x and w": lambda norm: vmap(norm, in_dims=(0, 0, None))(XS, WS, B),
    "vmap of grad": lambda norm: vmap(grad(cubed(norm), argnums=(0, 1)), in_dims=(0, 0, None))(XS, WS, B),
    "grad of vmap": lambda norm: grad(
        lambda x, w: vmap(norm, in_dims=(0, 0, None))(x, w, B).pow(3).sum(), argnums=(0, 1)
    )(XS, WS),
    "jacrev": lambda norm: jacrev(norm, argnums=(0, 1, 2))(X, W, B),
    "jacrev of jacrev": lambda norm: jacrev(jacrev(lambda x: cubed(norm)(x, W, B)))(X),
    "grad of grad": lambda norm: grad(lambda x, w: grad(cubed(norm))(x, w, B).square().sum(), argnums=(0, 1))(X, W),
    "grad of grad of grad": lambda norm: grad(
        lambda x: grad(lambda x: grad(cubed(norm))(x, W, B).square().sum())(x).square().sum()
    )(X),
    "vmap of jacrev": lambda norm: vmap(jacrev(norm), in_dims=(0, None, None))(XS, W, B),
    "autograd over grad": over,
}


@each_norm
@pytest.mark.parametrize("transform", list(TRANSFORMS))
def test_transforms_and_their_nestings_agree_with_torch(name: str, transform: str) -> None:
    agree(TRANSFORMS[transform](OURS[name]), TRANSFORMS[transform](PLAIN[name]))


FORWARD_MODE: dict[str, Callable[[Norm], Any]] = {
    "jvp": lambda norm: jvp(lambda x: norm(x, W, B), (X,), (X,)),
    "jvp of w": lambda norm: jvp(lambda w: norm(X, w, B), (W,), (W,)),
    "jacfwd": lambda norm: jacfwd(lambda x: norm(x, W, B))(X),
    "hessian": lambda norm: torch.func.hessian(lambda x: cubed(norm)(x, W, B))(X),
    "jacrev of jacfwd": lambda norm: jacrev(jacfwd(lambda x: cubed(norm)(x, W, B)))(X),
    "jvp of vmap": lambda norm: jvp(lambda x: vmap(norm, in_dims=(0, None, None))(x, W, B), (XS,), (XS,)),
    "jvp of grad": lambda norm: jvp(lambda x: grad(cubed(norm))(x, W, B), (X,), (X,)),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own use of it
@each_norm
@pytest.mark.parametrize("transform", list(FORWARD_MODE))
def test_forward_mode_is_refused_by_a_sentence(name: str, transform: str) -> None:
    with pytest.raises(InputError, match="an argument has a tangent and .*FwdOp has no forward-mode derivative"):
        FORWARD_MODE[transform](OURS[name])


# ------------------------------------------------------------------------------------------------------ repeats


def test_repeated_calls_with_a_gradient_pass_a_guard_and_keep_apart_from_those_without() -> None:
    op = LayerNormFwdOp(N)
    for n in (4, 5, 6, 5):
        x, w, b = leaves(drawn(n, N), W, B)
        agree(
            torch.autograd.grad(cubed(op)(x, w, b), (x, w, b)),
            torch.autograd.grad(cubed(plain_layer)(x, w, b), (x, w, b)),
        )
        with torch.no_grad():
            assert op(x, w, b).grad_fn is None
        assert op(x.detach(), W, B).grad_fn is None
        agree(torch.autograd.grad(op(x, W, b).sum(), x), torch.autograd.grad(plain_layer(x, W, b).sum(), x))
    assert len(op._repeats.known) == 4


def test_a_repeated_call_is_refused_once_nobody_serves_its_backward() -> None:
    x, *_ = leaves(X)
    op = RMSNormFwdOp(N, 1e-5)
    for _ in range(3):
        op(x)
    assert op._repeats.known
    with (
        tileops.selection(exclude="example", op="RMSNormBwdOp"),
        pytest.raises(OpNotAvailableError, match="RMSNormBwdOp"),
    ):
        op(x)
    op(x)


# ----------------------------------------------------------------------------------------------------- refusals


@pytest.mark.usefixtures("no_backends")
def test_a_backward_that_nobody_serves_is_refused_at_the_forward_call() -> None:
    written: list[Tensor] = []

    class Writes(BatchNormTrain):
        devices = frozenset({"cpu"})

        def forward(self, x: Tensor, mean: Any, variance: Any, weight: Any, bias: Any) -> Any:
            written.append(mean)
            return x.clone(), x.mean(0), x.mean(0)

    tileops.register_kernel_type("BatchNormFwdOp", "writes", Writes)
    x = torch.randn(4, N)
    TRAIN(x, torch.zeros(N), torch.ones(N))
    assert len(written) == 1
    for mode in (torch.enable_grad(), torch.device("cpu")):  # a default device takes calls through the torch op
        with mode, pytest.raises(OpNotAvailableError, match="in-tree kernels do not run on cpu: BatchNormBwdOp"):
            TRAIN(x.clone().requires_grad_(), torch.zeros(N), torch.ones(N))
    assert len(written) == 1


def test_an_op_without_a_backward_refuses_a_wanted_gradient_on_every_road(fake: Any) -> None:
    op = fake.op({"a": fake.kernel(run=torch.sin)}, name="SineOp")()
    sentence = r"a gradient is wanted \(an argument requires grad\) and SineOp has no backward; call it under"
    (x,) = leaves(X)
    with pytest.raises(InputError, match=sentence):
        op(x)
    with torch.device("cpu"), pytest.raises(InputError, match=sentence):
        op(x)
    with pytest.raises(InputError, match=sentence):
        grad(lambda x: op(x).sum())(X)
    agree(op(X), torch.sin(X))


def test_every_public_torch_op_of_ours_has_an_autograd_kernel_of_its_own() -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in tileops.catalogue.IN_TREE_OPS:
        for route in tileops.catalogue.find_op(name)._routes:
            getattr(torch.ops.tileops, route.name)
            assert has_kernel(f"tileops::{route.name}", "Autograd")
            assert has_kernel(f"tileops::_{route.name}", "Autograd")


# -------------------------------------------------------------------------------------------------------- scopes


@pytest.fixture
def two_backwards() -> None:
    """Two backward kernels of RMS norm that say which of them ran."""
    for key, value in (("twos", 2.0), ("threes", 3.0)):

        def forward(self: Any, grad: Tensor, x: Tensor, weight: Any, value: float = value) -> Any:
            return torch.full_like(x, value), None

        members = {"devices": frozenset({"cpu"}), "forward": forward, "__module__": __name__}
        tileops.register_kernel_type("RMSNormBwdOp", key, type(key, (RMSNormBwd,), members))


@pytest.mark.usefixtures("two_backwards")
@pytest.mark.parametrize("mode", [torch.enable_grad(), torch.device("cpu")], ids=["plain", "through"])
def test_a_backward_runs_in_the_scope_of_its_forward(mode: Any) -> None:
    (x,) = leaves(X)
    with mode, tileops.selection(prefer="local:twos"):
        y = RMS(x)
    with tileops.selection(prefer="local:threes"):
        agree(torch.autograd.grad(y.sum(), x, retain_graph=True), torch.full_like(X, 2))
    agree(torch.autograd.grad(y.sum(), x), torch.full_like(X, 2))


@pytest.mark.usefixtures("two_backwards")
def test_a_forward_without_a_scope_has_a_backward_without_one() -> None:
    (x,) = leaves(X)
    with tileops.selection(prefer="local:twos"), pytest.raises(AmbiguousDispatchError):
        tileops.clear()
        with in_force(None):
            RMS(x)


@pytest.mark.usefixtures("two_backwards")
def test_the_backward_of_a_compiled_graph_runs_in_the_scope_that_is_in_force_then() -> None:
    (x,) = leaves(X)
    with tileops.selection(prefer="local:twos"):
        y = torch.compile(RMS, backend="aot_eager", fullgraph=True)(x)
    with tileops.selection(prefer="local:threes"):
        agree(torch.autograd.grad(y.sum(), x), torch.full_like(X, 3))


@pytest.mark.usefixtures("two_backwards")
def test_a_checkpoint_with_our_contexts_recomputes_in_the_scope_of_its_forward() -> None:
    ran: list[str] = []

    class Logs(RMSNorm):
        devices = frozenset({"cpu"})

        def forward(self, x: Tensor, weight: Tensor | None) -> Tensor:
            ran.append("logs")
            return x.clone()

    tileops.register_kernel_type("RMSNormFwdOp", "logs", Logs)
    (x,) = leaves(X)
    for contexts, recomputed in ((tileops.checkpoint_contexts, ["logs", "logs"]), (None, ["logs"])):
        ran.clear()
        options = {} if contexts is None else {"context_fn": contexts}
        with tileops.selection(prefer=["local:logs", "local:twos"]):
            y = checkpoint(lambda x: RMS(x).exp(), x, use_reentrant=False, **options)
        with tileops.selection(exclude="local:logs", prefer="local:threes"):
            (got,) = torch.autograd.grad(y.sum(), x)
        assert ran == recomputed
        agree(got, torch.full_like(X, 2))


# ------------------------------------------------------------------------------------------------------- authors


@pytest.fixture
def sine(fake: Any) -> Iterator[Any]:
    """An op with a backward as an author writes them."""

    class Sine(fake.Interface):
        def forward(self, grad: Tensor, x: Tensor) -> Tensor:
            raise NotImplementedError

        @classmethod
        def reference(cls, call: Any, *tensors: Any) -> Any:
            return (tensors[0] * torch.cos(tensors[1]),)

    class Cosine(Sine):
        devices = frozenset({"cpu"})

        def forward(self, grad: Tensor, x: Tensor) -> Tensor:
            return grad * torch.cos(x)

    class SineBwdOp(BackwardOp):
        interfaces = {"fake": Sine}
        kernel_types = {"a": Cosine}
        results = ("grad_x",)

        def __init__(self, need: tuple[bool, ...] = (True,), *, target: str | None = None) -> None:
            super().__init__(need, target=target)

        def request(self, x: Tensor) -> Any:
            return "fake", fake.call(x.numel())

        def check(self, grad: Tensor, x: Tensor) -> None: ...

        def empty_results(self, grad: Tensor, x: Tensor) -> Any:
            return (torch.empty_like(x),)

        def forward(self, grad: Tensor, x: Tensor) -> Any:
            return (self.kernel_for(*self.request(x))(grad, x),)

    base = fake.op({"a": fake.kernel(run=torch.sin)}, name="SineFwdOp")
    return type("SineFwdOp", (base,), {"backward": SineBwdOp, "__module__": __name__, "forward": forward_of(fake)})()


def forward_of(fake: Any) -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.kernel_for("fake", fake.call(x.numel()))(x)

    return forward


def test_an_op_that_names_a_backward_op_is_differentiable(sine: Any) -> None:
    (x,) = leaves(X)
    agree(torch.autograd.grad(sine(x).sum(), x), torch.cos(X))
    with torch.device("cpu"):
        agree(torch.autograd.grad(sine(x).sum(), x), torch.cos(X))
    agree(grad(lambda x: sine(x).sum())(X), torch.cos(X))


def test_a_backward_op_of_other_names_is_refused_where_a_gradient_is_wanted(fake: Any) -> None:
    base = fake.op({"a": fake.kernel(run=torch.sin)}, name="StrangeOp")
    strange = type("StrangeOp", (base,), {"backward": LayerNormBwdOp, "forward": forward_of(fake)})()
    with pytest.raises(DeclarationError, match="LayerNormBwdOp is no backward of StrangeOp, which takes x"):
        strange(*leaves(X))


def test_a_target_that_has_the_backward_op_takes_it_over(fake: Any) -> None:
    calls: list[Any] = []

    def build(*specs: Any, **params: Any) -> Any:
        calls.append(params)
        return lambda grad, x, weight: (grad * 7, None)

    tileops.register_kernel_builder("RMSNormFwdOp", "seven", lambda *_, **params: lambda x, w: x * 7)
    tileops.register_kernel_builder("RMSNormBwdOp", "seven", build)
    (x,) = leaves(X)
    agree(torch.autograd.grad(RMSNormFwdOp(N, target="seven")(x).sum(), x), torch.full_like(X, 7))
    assert calls == [{"normalized_shape": (N,), "eps": None, "need": (True, False)}]


def test_a_target_without_the_backward_op_leaves_it_to_selection() -> None:
    (x,) = leaves(X)
    ours = torch.autograd.grad(RMSNormFwdOp(N, 1e-5, target="example")(x, W).pow(3).sum(), x)
    agree(ours, torch.autograd.grad(plain_rms(x, W, None).pow(3).sum(), x))


# ------------------------------------------------------------------------------------------------------ autocast


def test_autocast_on_cuda_is_torchs_own_table() -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    found = {
        name
        for name in ("layer_norm", "rms_norm", "batch_norm_train", "group_norm", "instance_norm", "instance_norm_train")
        if getattr(torch.ops.tileops, name) and has_kernel(f"tileops::{name}", "AutocastCUDA")
    }
    assert found == {"layer_norm", "rms_norm", "group_norm"}
    theirs = {
        name for name in ("layer_norm", "group_norm", "instance_norm") if has_kernel(f"aten::{name}", "AutocastCUDA")
    }
    assert theirs == {"layer_norm", "group_norm"}


class CastLayerNormOp(LayerNormFwdOp):
    torch_ops = {"": TorchOp(autocast={"cpu": torch.float32})}


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_gives_arguments_the_dtype_that_the_op_declares(compiled: bool, close: Any) -> None:
    op: Any = CastLayerNormOp(N)
    call = torch.compile(op, backend="aot_eager", fullgraph=True) if compiled else op
    x, w, b = (one.bfloat16().requires_grad_() for one in (X, W, B))
    with torch.autocast("cpu", dtype=torch.bfloat16), tileops.selection(exclude="example:row"):  # it would be compiled
        y = call(x, w, b)
    assert y.dtype is torch.float32
    wide = leaves(*(one.detach().double() for one in (x, w, b)))
    close(y, plain_layer(*wide), torch.float32)
    got = torch.autograd.grad(y, (x, w, b), X.float())
    for one, right in zip(got, torch.autograd.grad(plain_layer(*wide), wide, X.float().double())):
        close(one, right, torch.bfloat16)


# --------------------------------------------------------------------------------------------------- private names


@pytest.mark.parametrize("name", ["_ExcludeDispatchKeyGuard", "DispatchKeySet", "_dispatch_key_parse"])
def test_this_torch_has_the_private_name(name: str) -> None:
    assert hasattr(torch._C, name)


def test_this_torch_has_the_private_names_outside_its_c_module() -> None:
    from torch._functorch.utils import enable_single_level_autograd_function

    assert callable(enable_single_level_autograd_function)
    assert callable(torch.autograd.forward_ad._set_fwd_grad_enabled)
    assert autograd._call.__self__ is autograd._Differentiated
