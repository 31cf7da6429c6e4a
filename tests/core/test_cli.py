"""The `tileops` command: what it prints, writes, and refuses."""

from __future__ import annotations

import builtins
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import tileops.__main__
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from tileops import register_kernel_type
from tileops.cli import app
from tileops.kernels.layer_norm import LayerNorm
from typer.testing import CliRunner

FOUR_CALLS = {
    "split_channel": "n=4 c=128 spatial=1048576",
    "held_column": "n=32 c=64 spatial=1",
    "split_column": "n=8192 c=1024 spatial=1",
    "held_channel": "n=32 c=1024 spatial=196",
}
TRAIN = ["explain", "BatchNormFwdOp", "--interface", "batch_norm_fwd_train", "--device", "h200"]


def run(*words: str) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def row(tmp_path: Path) -> Path:
    path = tmp_path / "x.npy"
    np.save(path, np.random.default_rng(0).standard_normal((4, 64), dtype=np.float32))
    return path


# ---------------------------------------------------------------------------------------------------- explain


@pytest.mark.parametrize(("winner", "facts"), FOUR_CALLS.items())
def test_four_batch_norms_on_an_h200_have_four_winners(winner: str, facts: str) -> None:
    done = run(*TRAIN, *facts.split(), "dtype=float16")
    assert done.exit_code == 0
    assert f"selected: {winner}" in done.stdout
    keys = [line.split()[0] for line in done.stdout.splitlines() if "BatchNorm" in line and "tileops-" in line]
    assert keys == ["held_channel", "held_column", "split_channel", "split_column", "example:torch_train"]


def test_json_gives_the_same_with_the_documented_fields() -> None:
    done = run(*TRAIN, *FOUR_CALLS["split_column"].split(), "dtype=float16", "--json")
    answer = json.loads(done.stdout)
    assert set(answer) == {"op", "interface", "call", "scope", "key", "target", "verdicts", "error", "remarks"}
    assert (answer["op"], answer["interface"], answer["key"], answer["error"]) == (
        "BatchNormFwdOp", "batch_norm_fwd_train", "split_column", None,
    )  # fmt: skip
    fields = {"key", "class", "backend", "serves", "reason", "favour"}
    assert all(set(verdict) == fields for verdict in answer["verdicts"])
    assert "channels_last=False" in answer["call"]
    assert "weight_dtype=float32" in answer["call"]
    assert "running=True" in answer["call"]


def test_sizes_are_rounded_as_a_call_rounds_them() -> None:
    done = run(*TRAIN, "n=5", "c=64", "spatial=196", "dtype=float16", "--json")
    assert "n=8, c=64" in json.loads(done.stdout)["call"]


def test_explain_answers_in_the_scope_that_its_options_say() -> None:
    question = ("explain", "LayerNormFwdOp", "--device", "cpu", "n=64", "dtype=float32")
    shown = run(*question, "--exclude", "held_row", "--prefer", "example:torch", "--prefer", "example")
    assert 'scope: tileops.selection(prefer=("example:torch", "example"), exclude="held_row")' in shown.stdout
    assert "selected: example:torch" in shown.stdout
    answer = json.loads(run(*question, "--require", "in-tree", "--json").stdout)
    assert answer["key"] is None
    assert answer["scope"] == ['tileops.selection(require="in-tree")']


@pytest.mark.parametrize("command", ["explain", "run"])
def test_an_option_with_an_unknown_name_is_one_sentence(command: str, row: Path) -> None:
    words = ("--device", "cpu", "n=64", "dtype=float32") if command == "explain" else (row, "normalized_shape=64")
    done = run(command, "LayerNormFwdOp", *words, "--prefer", "exmaple")
    assert done.exit_code == 2
    assert "nothing is called 'exmaple'" in done.stderr
    assert "did you mean 'example'?" in done.stderr
    assert done.stdout == ""


def test_run_runs_what_its_options_say(row: Path) -> None:
    done = run("run", "LayerNormFwdOp", row, "normalized_shape=64", "--device", "cpu", "--exclude", "example:row")
    assert done.exit_code == 0
    assert "selected: example:torch" in done.stdout


def test_a_call_that_nothing_serves_is_an_answer() -> None:
    done = run("explain", "LayerNormFwdOp", "--device", "h200", "n=64", "dtype=float64", "--json")
    answer = json.loads(done.stdout)
    assert done.exit_code == 0
    assert answer["key"] is None
    assert answer["error"].startswith("no implementation serves this call")


def test_an_ambiguous_call_is_an_answer() -> None:
    class Mine(LayerNorm):
        devices = frozenset({"cpu"})

        def forward(self, x: Any, weight: Any, bias: Any) -> Any:
            return x

    class Yours(Mine):
        pass

    register_kernel_type("LayerNormFwdOp", "mine", Mine)
    register_kernel_type("LayerNormFwdOp", "yours", Yours)
    done = run("explain", "LayerNormFwdOp", "--device", "cpu", "n=64", "dtype=float32", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["key"] is None
    assert json.loads(done.stdout)["error"].startswith("dispatch is ambiguous")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["LayerNromFwdOp"], "no op is called 'LayerNromFwdOp'; known ops: .*did you mean 'LayerNormFwdOp'?"),
        (["BatchNormFwdOp"], "several interfaces; name one: --interface batch_norm_fwd_train"),
        (["BatchNormFwdOp", "--interface", "train"], "has no interface 'train'; it has: batch_norm_fwd_train"),
        (["LayerNormFwdOp", "n=4"], "needs dtype=…; such as dtype=float16"),
        (["LayerNormFwdOp", "n=4", "dtype=flot"], "dtype=flot is no dtype"),
        (["LayerNormFwdOp", "n=four", "dtype=float16"], "n=four is no int"),
        (["LayerNormFwdOp", "n=-4", "dtype=float16"], "n=-4 is no int"),
        (["LayerNormFwdOp", "n=4", "dtyp=float16"], "has no fact 'dtyp'.*did you mean 'dtype'?"),
        (["LayerNormFwdOp", "n", "dtype=float16"], "'n' is no name=value"),
        (["LayerNormFwdOp", "--device", "h201", "n=4", "dtype=float16"], "'h201' is no device.*h200"),
    ],
)
def test_a_question_that_cannot_be_asked_is_one_sentence_and_exit_code_2(words: list[str], said: str) -> None:
    done = run("explain", *words)
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert re.search(said, done.stderr)


# -------------------------------------------------------------------------------------------------------- run


def test_an_op_runs_on_a_file_and_its_result_is_written(row: Path, tmp_path: Path) -> None:
    out = tmp_path / "y.npy"
    done = run("run", "LayerNormFwdOp", "--input", row, "--param", "normalized_shape=64", "--out", out)
    assert done.exit_code == 0, done.output
    assert "selected: example:" in done.stdout
    assert "largest error against the reference in float64" in done.stdout
    x = torch.from_numpy(np.load(row))
    torch.testing.assert_close(torch.from_numpy(np.load(out)), F.layer_norm(x, (64,)))


@pytest.mark.parametrize("kind", ["npz", "pt", "safetensors"])
def test_named_tensors_are_read_by_name_and_every_result_is_written(kind: str, tmp_path: Path) -> None:
    tensors = {"running_var": torch.ones(3), "x": torch.randn(4, 3, 5), "running_mean": torch.zeros(3)}
    path, out = tmp_path / f"in.{kind}", tmp_path / f"out.{kind}"
    save = {"npz": lambda: np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()}),
            "pt": lambda: torch.save(tensors, path),
            "safetensors": lambda: safetensors.torch.save_file(tensors, path)}  # fmt: skip
    save[kind]()
    done = run("run", "BatchNormFwdOp", "--input", path, "--param", "training=true", "momentum=0.5", "--out", out)
    assert done.exit_code == 0, done.output
    load = {"npz": lambda: {name: torch.from_numpy(array) for name, array in np.load(out).items()},
            "pt": lambda: torch.load(out, weights_only=True),
            "safetensors": lambda: safetensors.torch.load_file(out)}  # fmt: skip
    written = load[kind]()
    assert set(written) == {"output", "save_mean", "save_invstd", "running_mean", "running_var"}
    torch.testing.assert_close(written["running_mean"], 0.5 * tensors["x"].mean(dim=(0, 2)))


def test_an_op_whose_kernel_takes_some_of_its_tensors_is_compared_with_the_reference(tmp_path: Path) -> None:
    path, out = tmp_path / "in.npz", tmp_path / "out.npy"
    np.savez(path, x=np.arange(24, dtype=np.float32).reshape(2, 3, 4), bias=np.full(3, 7, dtype=np.float32))
    done = run("run", "InstanceNormFwdOp", "--input", path, "--out", out)
    assert done.exit_code == 0, done.output
    assert "largest error against the reference in float64" in done.stdout
    assert np.load(out).mean() == pytest.approx(7)


def test_several_files_are_the_ops_tensors_in_order(row: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.full(64, 2, dtype=np.float32))
    out = tmp_path / "y.npy"
    words = ["--input", row, tmp_path / "w.npy", "--param", "normalized_shape=64", "--out", out]
    assert run("run", "LayerNormFwdOp", *words).exit_code == 0
    x = torch.from_numpy(np.load(row))
    torch.testing.assert_close(torch.from_numpy(np.load(out)), 2 * F.layer_norm(x, (64,)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--input", "nowhere.npy", "--param", "normalized_shape=64"], "nowhere.npy does not exist"),
        (["--input", "x.npy"], "needs --param normalized_shape=…"),
        (["--input", "x.npy", "--param", "normalised_shape=64"], "did you mean 'normalized_shape'"),
        (["--input", "x.npy", "--param", "normalized_shape=63"], "its trailing axes must be (63,)"),
        (["--input", "whole.npy", "--param", "normalized_shape=64"], "x is int64; it must be a floating-point tensor"),
        (["--input", "flat.npy", "--param", "normalized_shape=8,8"], "its trailing axes must be (8, 8)"),
        (["--input", "x.txt", "--param", "normalized_shape=64"], "is of a kind that is not read"),
        (["--input", "broken.npy", "--param", "normalized_shape=64"], "broken.npy cannot be read as .npy"),
        (["--input", "code.pt", "--param", "normalized_shape=64"], "code.pt cannot be read as .pt"),
        (["--input", "x.npy", "--param", "normalized_shape=64", "eps=-1"], "eps is -1; it must be at least 0"),
        (["--input", "x.npy", "--param", "normalized_shape=64", "--param", "target='none'"], "no target is called"),
        (["--param", "normalized_shape=64"], "x is missing; give its file"),
    ],
)
def test_bad_input_is_one_sentence_exit_code_2_and_nothing_written(
    words: list[str], said: str, row: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("whole.npy", np.zeros((4, 64), dtype=np.int64))
    np.save("flat.npy", np.zeros(64, dtype=np.float32))
    Path("broken.npy").write_bytes(b"not an array")
    torch.save({"x": Path("x")}, "code.pt")
    Path("x.txt").write_text("1 2 3")
    before = sorted(Path().iterdir())
    done = run("run", "LayerNormFwdOp", *words, "--out", "y.npy")
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize(
    ("out", "said"),
    [("y.csv", "is of a kind that is not written"), ("no/y.npy", "there is no folder"), ("y.npy", "holds one tensor")],
)
def test_results_that_cannot_be_written_are_refused(
    out: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"x": torch.randn(4, 3)}, "x.pt")
    done = run("run", "BatchNormFwdOp", "--input", "x.pt", "--param", "training=true", "--out", out)
    assert done.exit_code == 2
    assert said in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]


# ------------------------------------------------------------------------------------------------------- demo


def test_the_demo_shows_what_ran_who_ships_it_and_what_an_h200_would_run() -> None:
    done = run("demo")
    assert done.exit_code == 0, done.output
    for shown in ("example:torch_train", "example:torch_infer", "runs on cuda, not on cpu", "tileops-backend-example",
                  "largest error against the reference", "first call", "later calls", "selected: held_row",
                  "selected: elementwise"):  # fmt: skip
        assert shown in done.stdout


@pytest.mark.usefixtures("no_backends")
def test_the_demo_without_a_backend_says_that_in_tree_kernels_do_not_run_on_cpu() -> None:
    done = run("demo")
    assert done.exit_code == 1
    assert "in-tree kernels do not run on cpu" in done.stdout


@pytest.mark.parametrize(("module", "extra"), [("typer", "cli"), ("rich", "cli")])
def test_a_missing_library_is_a_sentence_with_the_pip_line(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "tileops.cli":
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "tileops.cli", raising=False)
    with pytest.raises(SystemExit, match="2"):
        tileops.__main__.main()
    assert f"pip install 'tileops-core[{extra}]'" in capsys.readouterr().err
