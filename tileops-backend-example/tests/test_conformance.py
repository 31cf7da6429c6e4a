"""The rules that every kernel holds to, inherited from tileops."""

from tileops.testing import ConformanceTests


class TestExample(ConformanceTests):
    backend = "example"
