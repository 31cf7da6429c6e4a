"""The processes that these tests run on: four with gloo on a CPU, or two with NCCL on GPUs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

sys.path.insert(0, str(Path(__file__).parent))  # the processes import what they run from here

from ranks import Ranks  # noqa: E402


@pytest.fixture(scope="session", params=["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)])
def ranks(request: Any) -> Iterator[Ranks]:
    """Processes of one group."""
    if not torch.distributed.is_available():
        pytest.skip("this torch is built without torch.distributed")
    processes = Ranks(4 if request.param == "gloo" else 2, request.param)
    yield processes
    processes.stop()
