"""Type checkers see what `run.prepare` returns: the user's own model class, and the wrappers by their names."""

import re
import subprocess
import sys
from pathlib import Path
from typing import assert_type

import pytest
import torch
from support.models import Perceptron, vectors
from support.runs import in_runs

from mimatrix.engine.loop.loader import MicroBatchLoader
from mimatrix.engine.loop.lr_scheduler import SyncedLRScheduler
from mimatrix.engine.loop.prepared_optimizer import PreparedOptimizer
from mimatrix.engine.run import Run

ROOT = Path(__file__).resolve().parents[2]


def test_prepare_returns_what_it_is_annotated_with() -> None:
    """Check the classes here; mypy reads `assert_type` where it checks this file."""

    def on_rank(run: Run) -> None:
        network = Perceptron()
        adamw = torch.optim.AdamW(network.parameters())
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, 10)
        model, optimizer, loader, scheduler = run.prepare(network, adamw, vectors(8), cosine)
        assert_type(model, Perceptron)
        assert_type(optimizer, PreparedOptimizer)
        assert_type(loader, MicroBatchLoader)
        assert_type(scheduler, SyncedLRScheduler)
        assert model is network
        assert [type(optimizer), type(loader), type(scheduler)] == [
            PreparedOptimizer,
            MicroBatchLoader,
            SyncedLRScheduler,
        ]

    in_runs(1, on_rank, global_batch=4)


@pytest.mark.long
def test_mypy_reveals_the_types_of_the_example(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    example = (ROOT / "examples" / "train.py").read_text()
    script.write_text(example + "\nreveal_type((run, model, optimizer, loader))\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (revealed,) = re.findall(r'Revealed type is "tuple\[(.*)\]"', done.stdout)
    assert [name.rpartition(".")[2] for name in revealed.split(", ")] == [
        "Run",
        "Sequential",
        "PreparedOptimizer",
        "MicroBatchLoader",
    ]
