"""Scopes act on a backend's targets as on its kernels: exclude, prefer, require."""

from __future__ import annotations

from typing import Any

import pytest
import tileops
import torch
from tileops import AmbiguousTargetError, LayerNormFwdOp, OpNotAvailableError, ScopeError
from tileops.backend import POLICY_VARIABLE, set_default_target

X = torch.ones(2, 4)

TARGET = """
from tileops.backend import Declined, register_detector, register_kernel_builder

def build(x, *others, normalized_shape, eps):
    if x.shape[0] == 3:
        raise Declined("three rows")
    return lambda x, *others: x + {value}

register_detector("{name}_cpu", lambda device: {claims})
register_kernel_builder("LayerNormFwdOp", "{name}_cpu", build)
"""

KERNEL = """
from tileops.backend import register_kernel_type
from tileops.kernels.layer_norm import LayerNorm

class Row(LayerNorm):
    devices = frozenset({{"cpu"}})
    general = {general}

    @classmethod
    def refusal(cls, call):
        return "too long" if call.n > 8 else None

    def forward(self, x, weight, bias):
        return x + {value}

register_kernel_type("LayerNormFwdOp", "row", Row)
"""


class Backends:
    """Installs backends, and says what served a call by what was added to x."""

    def __init__(self, site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self._site = site
        self._names = list[str]()
        self._environment = monkeypatch

    def target(self, name: str, value: int, *, claims: str = "device.type == 'cpu'") -> None:
        self._install(name, TARGET.format(name=name, value=value, claims=claims))

    def kernel(self, name: str, value: int, *, general: bool = False) -> None:
        self._install(name, KERNEL.format(value=value, general=general))

    def both(self, name: str, target: int, kernel: int) -> None:
        told = TARGET.format(name=name, value=target, claims="True") + KERNEL.format(value=kernel, general=False)
        self._install(name, told)

    def _install(self, name: str, source: str) -> None:
        self._site.backend(name, source)
        self._names.append(name)
        self._environment.setenv(POLICY_VARIABLE, ",".join(self._names))


@pytest.fixture
def backends(site: Any, fresh: None, monkeypatch: pytest.MonkeyPatch) -> Backends:
    return Backends(site, monkeypatch)


def added(x: torch.Tensor = X, **options: Any) -> int:
    return int((LayerNormFwdOp(4, **options)(x) - x).flatten()[0])


def test_an_excluded_target_claims_nothing(backends: Backends) -> None:
    backends.target("acme", 1)
    backends.kernel("zeta", 2)
    op = LayerNormFwdOp(4)
    for name in ("acme", "acme:acme_cpu"):
        for _ in range(2):
            assert added() == 1
            with tileops.selection(exclude=name):
                assert added() == 2
                told = op.explain(X)
            assert (told.target, told.key) == (None, "zeta:row")
            assert told.remarks[0].startswith(
                "target 'acme_cpu' (tileops-backend-acme 1.0) claims cpu and is excluded by"
            )
            assert added() == 1


def test_a_scope_that_excludes_what_the_op_names_is_an_error_with_both(backends: Backends) -> None:
    backends.target("acme", 1)
    op = LayerNormFwdOp(4, target="acme_cpu")
    said = (
        r"LayerNormFwdOp: target= names it, target 'acme_cpu' \(tileops-backend-acme 1.0\), and it is excluded by "
        r"tileops.selection\(exclude=\"acme\"\)"
    )
    with tileops.selection(exclude="acme"), pytest.raises(ScopeError, match=said):
        op(X)
    with tileops.selection(require="in-tree"), pytest.raises(ScopeError, match=r"not what tileops.selection\(require="):
        op(X)
    assert int(op(X)[0, 0]) == 2


def test_a_default_that_a_scope_excludes_is_no_default_there(backends: Backends) -> None:
    backends.target("acme", 1)
    backends.target("zeta", 2, claims="False")
    backends.kernel("rest", 3)
    set_default_target("zeta_cpu")
    assert added() == 2
    with tileops.selection(exclude="zeta"):
        assert added() == 1
        with tileops.selection(exclude="acme"):
            assert added() == 3
    assert added() == 2


def test_a_preference_settles_two_claims(backends: Backends) -> None:
    backends.target("acme", 1)
    backends.target("zeta", 2)
    with pytest.raises(AmbiguousTargetError, match=r'with tileops.selection\(prefer="acme"\)'):
        added()
    for name, value in (("acme", 1), ("zeta", 2), ("zeta:zeta_cpu", 2)):
        with tileops.selection(prefer=name):
            assert added() == value
            assert f'preferred by tileops.selection(prefer="{name}")' in str(LayerNormFwdOp(4).explain(X))
    with tileops.selection(exclude="acme"):
        assert added() == 2
    tileops.set_default_selection(prefer="acme")
    assert added() == 1


def test_a_kernel_that_the_program_prefers_comes_before_a_target_where_it_serves(backends: Backends) -> None:
    backends.target("acme", 1)
    backends.kernel("zeta", 2)
    op, long = LayerNormFwdOp(16), torch.ones(2, 16)
    assert added() == 1
    with tileops.selection(prefer="zeta"):
        for _ in range(2):
            assert added() == 2
            assert int((op(long) - long)[0, 0]) == 1  # zeta refuses it
        told = LayerNormFwdOp(4).explain(X)
        assert (told.target, told.key) == (None, "zeta:row")
        [remark] = told.remarks
        assert remark == (
            "target 'acme_cpu' (tileops-backend-acme 1.0) gives way to zeta:row: preferred by "
            'tileops.selection(prefer="zeta")'
        )
        assert op.explain(long).target == "acme_cpu"
        assert LayerNormFwdOp(4).prepare(X).key == "zeta:row"
        assert added(target="acme_cpu") == 1
    with tileops.selection(prefer=("acme", "zeta")):
        assert added() == 1
    assert added() == 1


def test_a_backends_target_comes_before_its_own_kernel_which_a_key_can_prefer(backends: Backends) -> None:
    backends.both("acme", target=1, kernel=2)
    assert added() == 1
    with tileops.selection(prefer="acme"):
        assert added() == 1
    with tileops.selection(prefer="acme:row"):
        assert added() == 2
    with tileops.selection(exclude="acme:acme_cpu"):
        assert added() == 2


def test_what_is_required_serves_or_the_call_fails_with_the_reasons(backends: Backends) -> None:
    backends.target("acme", 1)
    backends.kernel("zeta", 2)
    three = torch.ones(3, 4)
    assert [added(X), added(three)] == [1, 2]
    with tileops.selection(require="acme"):
        assert added() == 1
        with pytest.raises(OpNotAvailableError) as raised:
            added(three)
    assert "target 'acme_cpu' (tileops-backend-acme 1.0) declined this call: three rows" in str(raised.value)
    assert 'zeta:row      not what tileops.selection(require="acme") requires' in str(raised.value)
    with tileops.selection(require="zeta"):
        assert [added(X), added(three)] == [2, 2]
    with tileops.selection(require=tileops.IN_TREE), pytest.raises(OpNotAvailableError) as raised:
        added()
    assert 'claims cpu and is not what tileops.selection(require="in-tree") requires' in str(raised.value)


def test_a_builder_is_asked_with_no_scope_in_force(backends: Backends) -> None:
    source = """
    from tileops import scopes
    seen = []

    def build(*specs, **params):
        seen.append(scopes.active())
        return lambda x, *others: x + 1
    """
    backends._install("acme", source + "\n    from tileops.backend import register_detector, register_kernel_builder"
                      "\n    register_detector('acme', lambda device: True)"
                      "\n    register_kernel_builder('LayerNormFwdOp', 'acme', build)")  # fmt: skip
    with tileops.selection(prefer="acme"):
        assert added() == 1
    import plug_acme  # type: ignore[import-not-found]

    assert plug_acme.seen == [None]


def test_a_graph_is_served_by_the_scope_that_is_in_force_when_it_runs(backends: Backends) -> None:
    backends.target("acme", 1)
    backends.kernel("zeta", 2)
    op = LayerNormFwdOp(4)

    def call(x: torch.Tensor) -> torch.Tensor:
        return op(x)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert int((compiled(X) - X)[0, 0]) == 1
    with tileops.selection(exclude="acme"):
        assert int((compiled(X) - X)[0, 0]) == 2
