"""Which ops there are, and the public names of the package."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import tileops
from tileops import backend, catalogue, functional, nn, norm, ops
from tileops.ops.op_base import Op


def test_every_op_of_the_release_is_found_under_its_name_and_declares_interfaces_and_kernels() -> None:
    for name in catalogue.IN_TREE_OPS:
        cls = catalogue.find_op(name)
        assert cls is not None
        assert issubclass(cls, Op)
        assert cls.__name__ == name
        assert cls.interfaces
        assert cls.kernel_types
        for interface in cls.interfaces.values():
            assert any(issubclass(kernel, interface) for kernel in cls.kernel_types.values())
            assert interface.forward.__doc__
        for kernel in cls.kernel_types.values():
            assert any(issubclass(kernel, interface) for interface in cls.interfaces.values())


def test_an_op_is_known_from_when_its_class_is_created(fake: Any) -> None:
    assert catalogue.find_op("FreshOp") is None
    cls = fake.op({}, name="FreshOp")
    assert catalogue.find_op("FreshOp") is cls
    assert "FreshOp" in catalogue.op_names()


def test_op_names_are_sorted_and_hold_every_op_of_the_release() -> None:
    names = catalogue.op_names()
    assert list(names) == sorted(names)
    assert {"BatchNormFwdOp", "FusedAddRMSNormFwdOp", "LayerNormFwdOp", "RMSNormFwdOp"} <= set(names)


@pytest.mark.parametrize(
    ("written", "near"),
    [
        ("LayerNormFwdop", "LayerNormFwdOp"),
        ("BatchNormOp", "BatchNormFwdOp"),
        ("RMSNormFwd", "RMSNormFwdOp"),
        ("Q", None),
    ],
)
def test_the_nearest_name_is_what_was_probably_meant(written: str, near: str | None) -> None:
    known = tuple(catalogue.IN_TREE_OPS)
    assert catalogue.nearest(written, known) == near
    assert catalogue.meant(written, known) == ("" if near is None else f"; did you mean {near!r}?")


@pytest.mark.parametrize("module", [tileops, backend, functional, nn, norm, ops,
                                    importlib.import_module("tileops.kernels.fused_add_layer_norm"),
                                    importlib.import_module("tileops.kernels.fused_add_rms_norm"),
                                    importlib.import_module("tileops.kernels.group_norm"),
                                    importlib.import_module("tileops.kernels.instance_norm"),
                                    importlib.import_module("tileops.kernels.layer_norm"),
                                    importlib.import_module("tileops.kernels.rms_norm")], ids=lambda m: m.__name__)  # fmt: skip
def test_every_public_name_resolves_and_is_listed(module: Any) -> None:
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)


@pytest.mark.parametrize("module", [tileops, ops], ids=lambda m: m.__name__)
def test_an_unknown_name_is_an_attribute_error_that_lists_the_known_ones(module: Any) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'LayerNrom'.*LayerNormFwdOp"):
        module.LayerNrom  # noqa: B018


def test_the_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    assert tileops.__version__ == version("tileops-core")
