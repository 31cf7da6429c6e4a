"""Calls like those that an op has served: which go to their entries at once, and which must not."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tileops
import torch
import torch.nn.functional as F  # noqa: N812
from tileops import BatchNormFwdOp, InputError, LayerNormBwdOp, LayerNormFwdOp, RMSNormFwdOp, torch_guards
from tileops.backend import register_kernel_type, unregister_kernel_type
from tileops.kernels.layer_norm import LayerNorm
from tileops.ops import op_base, repeats
from tileops.ops.op_base import Op
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("backends")


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The op classes whose calls were checked and looked up: those that were no repeats."""
    log: list[str] = []
    for name in ("_run", "call_through"):
        owner: Any = Op if name == "_run" else op_base
        inner = getattr(owner, name)

        def logged(op: Any, *given: Any, inner: Any = inner) -> Any:
            log.append(type(op).__name__)
            return inner(op, *given)

        monkeypatch.setattr(owner, name, logged)
    return log


def warm() -> tuple[LayerNormFwdOp, tuple[Tensor, Tensor, Tensor]]:
    """An op that has noted a call of float32 rows of 64, and tensors of another such call."""
    op = LayerNormFwdOp(64)
    generator = torch.Generator().manual_seed(0)
    tensors = tuple(torch.randn(*shape, generator=generator) for shape in ((8, 64), (64,), (64,)))
    with torch.no_grad():
        op(*tensors)
    return op, tensors


def expected(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, (64,), weight, bias)


# --------------------------------------------------------------------------------------------- what is a repeat


@pytest.mark.parametrize("rows", [1, 7, 4096])
def test_a_call_with_other_rows_is_a_repeat(rows: int, checked: list[str]) -> None:
    op, (_, w, b) = warm()
    checked.clear()
    x = torch.randn(rows, 64)
    torch.testing.assert_close(op(x, w, b), expected(x, w, b))
    assert checked == []


def test_every_way_to_pass_arguments_is_a_repeat_of_the_others(checked: list[str]) -> None:
    op, (x, w, b) = warm()
    op(x, w)
    op(x, None, b)
    op(x, w, None)
    checked.clear()
    for result in (op(x=x, weight=w, bias=b), op(x, bias=b, weight=w), op(x, w, b)):
        torch.testing.assert_close(result, expected(x, w, b))
    for result in (op(x, w), op(x, w, None), op(x, bias=None, weight=w)):
        torch.testing.assert_close(result, expected(x, w))
    torch.testing.assert_close(op(x, bias=b), expected(x, None, b))
    assert checked == []


def test_parameters_repeat_where_gradients_are_off(checked: list[str]) -> None:
    op, (x, w, b) = warm()
    w, b = nn.Parameter(w), nn.Parameter(b)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            op(x, w, b)
            checked.clear()
            op(x, w, b)
            assert checked == []


def test_batches_of_any_rank_repeat(checked: list[str]) -> None:
    op, (_, w, b) = warm()
    op(torch.randn(2, 3, 64), w, b)
    checked.clear()
    for shape in ((5, 1, 64), (1, 1, 64), (4, 9, 64)):
        x = torch.randn(shape)
        torch.testing.assert_close(op(x, w, b), expected(x, w, b))
    assert checked == []


def test_a_gradient_of_other_rows_is_no_repeat(checked: list[str]) -> None:
    op, x = LayerNormBwdOp(64, need=(True, False, False)), torch.randn(8, 64)
    op(x, x.flip(0))
    checked.clear()
    op(x[:3], x[3:6])
    assert checked == []
    with pytest.raises(InputError, match=r"grad has shape \(1, 64\)"):
        op(x[:1], x[:3])


def test_rows_over_several_axes_repeat(checked: list[str]) -> None:
    op = RMSNormFwdOp((4, 16))
    weight = torch.randn(4, 16)
    op(torch.randn(2, 4, 16), weight)
    checked.clear()
    x = torch.randn(5, 4, 16)
    torch.testing.assert_close(op(x, weight), F.rms_norm(x, (4, 16), weight))
    assert checked == []


def test_threads_share_what_an_op_noted() -> None:
    op, (_, w, b) = warm()

    def call(seed: int) -> bool:
        x = torch.randn(seed % 5 + 1, 64, generator=torch.Generator().manual_seed(seed))
        return torch.equal(op(x, w, b), LayerNormFwdOp(64)(x, w, b))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(200)))


# ------------------------------------------------------------------------------------- what is none: the arguments


def tangent(x: Tensor) -> Tensor:
    return forward_ad.make_dual(x, torch.ones_like(x))


OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "another dtype": lambda x: x.to(torch.float64),
    "another width": lambda x: torch.randn(8, 32),
    "another rank": lambda x: x[0],
    "a strided tensor": lambda x: torch.randn(64, 8).t(),
    "an expanded tensor": lambda x: x[:1].expand(8, 64),
    "a tensor that is not aligned": lambda x: torch.randn(8 * 64 + 1)[1:].view(8, 64),
    "no rows": lambda x: x[:0],
    "a meta tensor": lambda x: x.to("meta"),
    "a sparse tensor": lambda x: x.to_sparse(),
    "a nested tensor": lambda x: torch.nested.nested_tensor([x, x]),
    "a negative-bit view": lambda x: torch.randn(8, 64, dtype=torch.complex64).conj().imag,
    "integers": lambda x: x.to(torch.int32),
    "a list": lambda x: x.tolist(),
    "a parameter": nn.Parameter,
    "a tensor that requires grad": lambda x: x.requires_grad_(),
    "a subclass": lambda x: x.as_subclass(type("Other", (Tensor,), {})),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", OTHERS)
def test_another_argument_is_checked(name: str, checked: list[str]) -> None:
    op, (x, w, b) = warm()
    checked.clear()
    with contextlib.suppress(Exception):
        op(OTHERS[name](x), w, b)
    assert checked == ["LayerNormFwdOp"] or set(checked) == {"LayerNormFwdOp"}


@pytest.mark.parametrize("position", [1, 2])
@pytest.mark.parametrize("other", [torch.ones(32), torch.ones(64, dtype=torch.float16), torch.ones(65)[1:], None])
def test_another_affine_tensor_is_checked(position: int, other: Tensor | None, checked: list[str]) -> None:
    op, (x, *affine) = warm()
    checked.clear()
    affine[position - 1] = other  # type: ignore[call-overload]
    with contextlib.suppress(InputError):
        op(x, *affine)
    assert checked == ["LayerNormFwdOp"]


def test_a_wanted_gradient_is_no_repeat(checked: list[str]) -> None:
    op, (x, w, b) = warm()
    w = nn.Parameter(w)
    with torch.no_grad():
        op(x, w, b)
        op(x, w, b)
    checked.clear()
    with contextlib.suppress(InputError):
        op(x, w, b)
    assert set(checked) == {"LayerNormFwdOp"}


# ------------------------------------------------------------------------------ what is none: the state of the thread


class Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def traced(call: Callable[[], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(lambda x: (call(), x + 1)[1], (torch.ones(2),), check_trace=False)


def within(make: Callable[[], Any]) -> Callable[[Callable[[], Any]], None]:
    def run(call: Callable[[], Any]) -> None:
        with make():
            call()

    return run


STATES: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "a function mode": within(Functions),
    "a default device": within(lambda: torch.device("cpu")),
    "a dispatch mode": within(Operators),
    "a forward-mode level": within(forward_ad.dual_level),
    "autocast": within(lambda: torch.autocast("cpu")),
    "vmap": lambda call: torch.func.vmap(lambda t: (call(), t)[1])(torch.ones(2)),
    "grad": lambda call: torch.func.grad(lambda t: (call(), t.sum())[1])(torch.ones(2)),
    "functionalize": lambda call: torch.func.functionalize(lambda t: (call(), t + 1)[1])(torch.ones(2)),
    "tracing": traced,
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_torch_must_see_is_no_repeat(name: str, checked: list[str]) -> None:
    op, tensors = warm()
    results: list[Tensor] = []
    checked.clear()
    STATES[name](lambda: results.append(op(*tensors)))
    assert checked
    if name != "autocast":
        torch.testing.assert_close(results[0], expected(*tensors))


@pytest.mark.parametrize("name", [name for name in STATES if name != "tracing"])
def test_a_state_in_which_an_op_was_called_leaves_no_repeat_of_it(name: str, checked: list[str]) -> None:
    op, tensors = warm()
    STATES[name](lambda: op(*tensors))
    checked.clear()
    STATES[name](lambda: op(*tensors))
    assert checked
    checked.clear()
    op(*tensors)
    assert checked == []


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own use of it
def test_a_tangent_is_no_repeat() -> None:
    op, (x, w, b) = warm()
    with forward_ad.dual_level(), pytest.raises((InputError, RuntimeError), match="tangent"):
        op(tangent(x), w, b)


def test_the_outer_torch_op_of_a_compiled_call_is_no_repeat(checked: list[str]) -> None:
    op, tensors = warm()
    compiled = torch.compile(op, backend="eager", fullgraph=True)
    checked.clear()
    torch.testing.assert_close(compiled(*tensors), expected(*tensors))
    assert checked


# -------------------------------------------------------------------------------- what is none: the op and its class


def test_a_changed_parameter_takes_effect_at_the_next_call() -> None:
    op, (x, w, b) = warm()
    op.eps = 10.0
    torch.testing.assert_close(op(x, w, b), F.layer_norm(x, (64,), w, b, 10.0))


class Twice(LayerNorm):
    devices = frozenset({"cpu"})
    preferred_over = frozenset({"example:torch", tileops.IN_TREE})

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if x.shape[0] == 13:
            raise ArithmeticError("thirteen rows")
        return x * 2


@pytest.fixture
def registering() -> Iterator[None]:
    yield
    with contextlib.suppress(Exception):
        unregister_kernel_type("LayerNormFwdOp", "twice")


@pytest.mark.usefixtures("registering")
def test_a_registration_takes_effect_at_the_next_call() -> None:
    op, (x, w, b) = warm()
    op(x, w, b)
    register_kernel_type("LayerNormFwdOp", "twice", Twice)
    selection = op.explain(x, w, b)
    with contextlib.suppress(tileops.AmbiguousDispatchError):
        result = op(x, w, b)
        assert selection.key == "local:twice"
        torch.testing.assert_close(result, x * 2)


def test_clear_forgets_repeats(checked: list[str]) -> None:
    op, tensors = warm()
    tileops.clear()
    checked.clear()
    op(*tensors)
    op(*tensors)
    assert checked == ["LayerNormFwdOp"]


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))])
def test_a_copy_holds_the_parameters_alone(make: Callable[[Any], Any]) -> None:
    op, tensors = warm()
    other = make(op)
    assert vars(other) == {"target": None, "normalized_shape": (64,), "eps": 1e-5}
    torch.testing.assert_close(other(*tensors), op(*tensors))


def test_a_class_with_a_forward_of_its_own_has_no_repeats_unless_it_says_so(checked: list[str]) -> None:
    class Doubled(LayerNormFwdOp):
        def forward(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
            return super().forward(x, weight, bias) * 2

    op, x = Doubled(64), torch.randn(8, 64)
    checked.clear()
    for _ in range(3):
        torch.testing.assert_close(op(x), expected(x) * 2)
    assert checked == ["Doubled"] * 3


def test_a_class_that_changes_no_call_repeats_like_its_base(checked: list[str]) -> None:
    class Named(LayerNormFwdOp):
        results = ("y",)

    op, x = Named(64), torch.randn(8, 64)
    op(x)
    checked.clear()
    op(x)
    assert checked == []


def test_an_op_that_writes_is_checked_on_every_call(checked: list[str]) -> None:
    op, x, mean, variance = BatchNormFwdOp(training=True), torch.randn(8, 4), torch.zeros(4), torch.ones(4)
    for _ in range(3):
        op(x, mean, variance)
    assert len(checked) == 3


def test_an_op_notes_a_few_kinds_of_calls_and_serves_all_others(checked: list[str]) -> None:
    op = LayerNormFwdOp(64)
    ranks = [torch.randn(*(2,) * rank, 64) for rank in range(1, 8)]
    for x in ranks:
        op(x)
    checked.clear()
    for x in ranks:
        torch.testing.assert_close(op(x), expected(x))
    assert len(checked) == len(ranks) - repeats.MOST


def test_an_op_stops_trying_to_note_calls_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    guarded = repeats.guarded
    monkeypatch.setattr(repeats, "guarded", lambda *given, **options: (tried.append(1), guarded(*given, **options))[1])
    op, x = LayerNormFwdOp(64), torch.randn(64, 8).t()
    for _ in range(repeats.ATTEMPTS + 5):
        op(x)
    assert len(tried) == repeats.ATTEMPTS


def test_a_torch_without_such_guards_serves_every_call(monkeypatch: pytest.MonkeyPatch, checked: list[str]) -> None:
    monkeypatch.setattr(torch_guards, "_C", object())
    op, tensors = warm()
    for _ in range(2):
        torch.testing.assert_close(op(*tensors), expected(*tensors))
    assert checked == ["LayerNormFwdOp"] * 3


@pytest.mark.skipif(not hasattr(BaseException, "add_note"), reason="notes came with Python 3.11")
@pytest.mark.usefixtures("registering", "no_backends")
def test_an_exception_of_a_repeat_names_the_kernel() -> None:
    register_kernel_type("LayerNormFwdOp", "twice", Twice)
    op, (x, w, b) = warm()
    with pytest.raises(ArithmeticError) as caught:
        op(x.new_ones(13, 64), w, b)
    assert caught.value.__notes__ == ["raised in local:twice (local)"]


def test_torch_has_the_guards_that_repeats_are_told_by() -> None:
    call = torch_guards.guarded(torch.neg, 1, (torch.ones(2, 3),), [(None, 3)], print)
    assert call is not None
    assert torch.equal(call((torch.ones(5, 3),)), -torch.ones(5, 3))
    assert call((torch.ones(5, 4),)) is None
