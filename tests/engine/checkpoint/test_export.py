"""`mimatrix export` writes plain weights of a checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.models import Transformer
from support.runs import in_runs
from test_manager import TASKS, PreparedTask, names, same, settings

from mimatrix.engine.run import Run

pytestmark = pytest.mark.timeout(90)


def test_export_writes_the_weights_of_all_ranks_under_all_names(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    def on_rank(run: Run) -> dict[str, torch.Tensor]:
        prepared = PreparedTask(run, TASKS["tokens"])
        prepared.train(epochs=1)
        run.save(tmp_path / "all", wait=True)
        return run.full_state_dict(prepared.model)

    expected = in_runs(2, on_rank, **settings({"batch": [3, 5], "stage": 3}))[0]
    file = tmp_path / "model.safetensors"
    words = ["export", str(tmp_path / "all"), str(file), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "mimatrix.cli.main", *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["step"], report["tensors"]) == (6, len(expected))
    assert report["tied"] == [["words.weight", "output.weight"]]
    same(load_file(file), expected)
    Transformer().double().load_state_dict(load_file(file))
    assert names(tmp_path) == ["all", "model.safetensors"]
    words = ["export", str(tmp_path), str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "mimatrix.cli.main", *words], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("mimatrix: there is no checkpoint in")
