"""The rules that every kernel holds to, whoever ships it."""

from __future__ import annotations

from tileops.testing import ConformanceTests


class TestConformance(ConformanceTests):
    backend = "example"
