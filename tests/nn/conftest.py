"""Fixtures of the tests of modules and functions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """A process that has compiled nothing."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
