"""Across launcher and engine: after a lost worker and a restart, a run resumes from its last checkpoint exactly."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "interrupted.py"


def train(folder: Path, *more: str) -> dict[int, float]:
    """Return the losses of the attempt that finished, by step."""
    folder.mkdir()
    words = [sys.executable, "-m", "mimatrix.cli.main", "run", "-n", "2", "--max-restarts", "1", str(SCRIPT)]
    done = subprocess.run([*words, str(folder), *more], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("started again" in done.stderr or "restart" in done.stderr) == bool(more), done.stderr
    (file,) = folder.glob("losses-*.json")
    assert file.name == f"losses-{len(more)}.json"
    return {int(step): loss for step, loss in json.loads(file.read_text()).items()}


def test_a_lost_worker_costs_only_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    resumed = train(tmp_path / "lost", "lose")
    assert sorted(whole) == list(range(20))
    assert sorted(resumed) == list(range(10, 20))  # two epochs of five steps were saved
    assert list(resumed.values()) == pytest.approx([whole[step] for step in resumed], abs=1e-10)
