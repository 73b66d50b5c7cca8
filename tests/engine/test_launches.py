"""Across launchers: examples/train.py gives the same losses under `mimatrix run`, under torchrun, and alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train.py"
RUN = ("-m", "mimatrix.cli.main", "run", "-n", "3", "--speeds", "1,0.5,0.25", str(SCRIPT), "--batch", "32,20,12")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT))


def losses(file: Path, *words: str) -> list[float]:
    command = [sys.executable, *words, "--epochs", "1", "--losses", str(file)]
    settings = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=settings)
    assert done.returncode == 0, done.stderr[-3000:]
    recorded: list[float] = json.loads(file.read_text())
    return recorded


def test_the_example_gives_the_same_losses_under_mimatrix_run(tmp_path: Path) -> None:
    alone = losses(tmp_path / "alone", str(SCRIPT))
    assert len(alone) == 32
    assert losses(tmp_path / "run", *RUN, "--stage", "3") == pytest.approx(alone, abs=1e-12)


@pytest.mark.long
def test_the_example_gives_the_same_losses_under_torchrun(tmp_path: Path) -> None:
    alone = losses(tmp_path / "alone", str(SCRIPT))
    assert losses(tmp_path / "torchrun", *TORCHRUN) == pytest.approx(alone, abs=1e-12)
