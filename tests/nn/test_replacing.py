"""`tileops.nn.replace` and `restore`: what is replaced, what is left and why, and that all else stays."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import tileops.nn
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from tileops import InputError, functional
from tileops.nn import NORMS, replace, restore
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import remove_parametrizations

pytestmark = pytest.mark.usefixtures("backends")


class Block(nn.Module):
    """A block with norms at several depths, one of them in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4))
        self.norm = nn.RMSNorm(4)
        self.same = self.norm

    def forward(self, x: Tensor) -> Tensor:
        return self.same(self.inner(self.norm(x)))


class ScaledNorm(nn.Module):
    """A norm that is not torch's, as model libraries have them: `(1 + weight)`, eps under another name."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((n,), 0.5))
        self.variance_epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon) * (1 + self.weight)


class OurScaledNorm(ScaledNorm):
    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, 1 + self.weight, self.variance_epsilon)


class LayerNormOverChannels(nn.LayerNorm):
    """A norm of torch's with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def block() -> Block:
    model = Block()
    generator = torch.Generator().manual_seed(0)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.uniform_(0.5, 2, generator=generator)
    return model


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def reasons(model: nn.Module, **options: Any) -> dict[str, str | None]:
    return {module.name: module.reason for module in replace(model, **options).modules}


# ------------------------------------------------------------------------------------------------- what is replaced


@pytest.mark.parametrize("training", [True, False])
def test_a_model_gives_the_same_with_its_norms_replaced(training: bool) -> None:
    theirs, ours = block().train(training), block().train(training)
    replace(ours)
    with torch.no_grad():
        torch.testing.assert_close(ours(X), theirs(X))
    for own, other in zip(ours.state_dict().values(), theirs.state_dict().values()):
        torch.testing.assert_close(own, other)


def test_every_norm_is_replaced_once_and_reported_by_its_first_name() -> None:
    model = block()
    report = replace(model)
    assert [(one.name, one.before, one.after) for one in report.replaced] == [
        ("inner.1", nn.LayerNorm, tileops.nn.LayerNorm),
        ("inner.2", nn.BatchNorm1d, tileops.nn.BatchNorm1d),
        ("norm", nn.RMSNorm, tileops.nn.RMSNorm),
    ]
    assert report.left == ()
    assert model.norm is model.same


@pytest.mark.parametrize("cls", NORMS, ids=lambda cls: cls.__name__)
def test_a_norm_by_itself_is_replaced(cls: type[nn.Module]) -> None:
    norm = cls(2, 4) if cls is nn.GroupNorm else cls(4)
    assert str(replace(norm)) == (
        f"1 replaced, 0 left\n  (the model): torch.nn.{cls.__name__} is now tileops.nn.{cls.__name__}"
    )
    assert type(norm) is NORMS[cls]


def test_a_replaced_module_is_the_object_that_it_was() -> None:
    model = block()
    held = [model.inner[1], *model.parameters(), *model.buffers()]
    replace(model)
    now = [model.inner[1], *model.parameters(), *model.buffers()]
    assert all(one is other for one, other in zip(held, now))


def test_hooks_modes_and_frozen_parameters_stay() -> None:
    model = block()
    seen: list[str] = []
    model.inner[1].register_forward_hook(lambda *_: seen.append("forward"))
    model.inner[1].register_forward_pre_hook(lambda *_: seen.append("before"))
    model.inner[2].eval()
    model.norm.weight.requires_grad_(False)
    replace(model)
    with torch.no_grad():
        model(X)
    assert seen == ["before", "forward"]
    assert model.training
    assert not model.inner[2].training
    assert not model.norm.weight.requires_grad


def test_a_second_time_replaces_nothing_and_reports_nothing() -> None:
    model = block()
    replace(model)
    assert replace(model).modules == ()


def test_only_the_classes_that_are_given_are_replaced() -> None:
    model = block()
    report = replace(model, {nn.RMSNorm: tileops.nn.RMSNorm})
    assert [one.name for one in report.replaced] == ["norm"]
    assert {one.name: one.reason for one in report.left} == dict.fromkeys(
        ["inner.1", "inner.2"], "no class in `classes` stands for it"
    )


def test_a_norm_that_is_not_torchs_is_replaced_by_a_subclass_of_it() -> None:
    model = nn.Sequential(ScaledNorm(4), nn.LayerNorm(4))
    with torch.no_grad():
        expected = model(X)
        report = replace(model, {**NORMS, ScaledNorm: OurScaledNorm})
        torch.testing.assert_close(model(X), expected)
    assert len(report.replaced) == 2
    assert report.replaced[0].after is OurScaledNorm


def test_a_compiled_model_sees_that_its_norms_are_replaced_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    model = block().eval()
    graphs: list[str] = []

    def record(module: Any, inputs: Any) -> Any:
        graphs.append(module.code)
        return module

    compiled = torch.compile(model, fullgraph=True, backend=record)
    with torch.no_grad():
        expected = compiled(X)
        replace(model)
        torch.testing.assert_close(compiled(X), expected)
        restore(model)
        torch.testing.assert_close(compiled(X), expected)
    assert ["tileops" in code for code in graphs] == [False, True]
    torch._dynamo.reset()


def test_a_copy_and_a_pickle_of_a_model_stay_replaced() -> None:
    model = block().eval()
    replace(model)
    with torch.no_grad():
        expected = model(X)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert classes(twin) == classes(model)
            assert torch.equal(twin(X), expected)


# ---------------------------------------------------------------------------------------------------- what is left


def test_a_norm_whose_statistics_are_of_all_processes_is_left() -> None:
    assert reasons(nn.SyncBatchNorm(4)) == {"": "its statistics are those of all processes; ours are of one"}


def test_a_norm_that_is_not_initialised_is_left_until_it_is() -> None:
    norm = nn.LazyBatchNorm1d()
    assert reasons(norm) == {"": "not initialised; run the model once, then replace"}
    norm(X)
    assert reasons(norm) == {"": None}


def test_a_parametrized_norm_is_left_until_it_is_plain() -> None:
    norm = nn.LayerNorm((4, 4))
    parametrizations.spectral_norm(norm)
    assert reasons(norm) == {"": "parametrized; replace first, then parametrize"}
    remove_parametrizations(norm, "weight")
    assert reasons(norm) == {"": None}
    parametrizations.spectral_norm(norm)
    with torch.no_grad():
        torch.testing.assert_close(norm(X[:4]), F.layer_norm(X[:4], (4, 4), norm.weight, norm.bias))


def test_a_subclass_of_torchs_norm_is_left_and_stays_right() -> None:
    model = nn.Sequential(LayerNormOverChannels(6))
    x = torch.ones(2, 6, 3)
    expected = model(x)
    (module,) = replace(model).left
    assert str(module) == (
        f"0: {__name__}.LayerNormOverChannels is left: a subclass of torch.nn.LayerNorm may compute something else; "
        "name it in `classes` to replace it"
    )
    assert torch.equal(model(x), expected)


def test_a_norm_with_a_forward_set_on_the_object_is_left() -> None:
    norm = nn.LayerNorm(4)
    norm.forward = lambda x: x
    assert reasons(norm) == {"": "a forward is set on the object, and would run whatever its class"}


def test_norms_that_no_class_stands_for_are_left_by_name() -> None:
    model = nn.Sequential(nn.LocalResponseNorm(2), ScaledNorm(4), nn.Sequential(nn.Linear(4, 4)))
    assert reasons(model) == dict.fromkeys("01", "no class in `classes` stands for it")


def test_a_block_around_a_norm_is_not_reported_itself() -> None:
    class PreNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)

    assert reasons(PreNorm()) == {"norm": None}


# -------------------------------------------------------------------------------------------------------- restoring


def test_restoring_undoes_the_replacement() -> None:
    model, before = block(), classes(block())
    replace(model)
    report = restore(model)
    assert classes(model) == before
    assert str(report) == (
        "3 replaced, 0 left\n"
        "  inner.1: tileops.nn.LayerNorm is now torch.nn.LayerNorm\n"
        "  inner.2: tileops.nn.BatchNorm1d is now torch.nn.BatchNorm1d\n"
        "  norm: tileops.nn.RMSNorm is now torch.nn.RMSNorm"
    )


def test_a_copy_and_a_model_written_with_our_modules_become_torchs() -> None:
    model = block()
    replace(model)
    twin = copy.deepcopy(model)
    restore(twin)
    assert classes(twin) == classes(block())
    written = nn.Sequential(tileops.nn.LayerNorm(4))
    restore(written)
    assert type(written[0]) is nn.LayerNorm


def test_what_was_replaced_by_given_classes_is_restored_by_them() -> None:
    model = nn.Sequential(ScaledNorm(4), nn.LayerNorm(4))
    given = {ScaledNorm: OurScaledNorm}
    replace(model, given)
    assert restore(model).modules == ()
    restore(model, given)
    assert type(model[0]) is ScaledNorm


# ----------------------------------------------------------------------------------------------- errors and reports


def test_a_class_that_is_no_subclass_is_refused_before_anything_is_replaced() -> None:
    model = block()
    wrong: Any = {nn.LayerNorm: tileops.nn.LayerNorm, nn.RMSNorm: tileops.nn.BatchNorm1d}
    with pytest.raises(InputError, match=r"gives tileops.nn.BatchNorm1d for torch.nn.RMSNorm; it must be a subclass"):
        replace(model, wrong)
    assert classes(model) == classes(block())


def test_one_class_for_two_is_refused_since_restoring_could_not_tell_them_apart() -> None:
    class Both(nn.LayerNorm, ScaledNorm):
        pass

    with pytest.raises(InputError, match=r"Both for torch.nn.LayerNorm and for .*ScaledNorm; give each its own"):
        replace(block(), {nn.LayerNorm: Both, ScaledNorm: Both})


def test_a_report_is_a_frozen_value_that_prints_a_line_for_each_norm() -> None:
    report = replace(nn.Sequential(nn.LayerNorm(4), nn.LocalResponseNorm(2)))
    assert str(report) == (
        "1 replaced, 1 left\n"
        "  0: torch.nn.LayerNorm is now tileops.nn.LayerNorm\n"
        "  1: torch.nn.LocalResponseNorm is left: no class in `classes` stands for it"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.modules = ()
