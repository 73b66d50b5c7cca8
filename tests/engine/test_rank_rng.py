"""Ranks draw different random numbers, the same in every run, and a resumed run draws what it would have drawn."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from mimatrix.engine.rank_rng import separate_rng

SCRIPT = Path(__file__).parent / "scripts" / "dropout.py"


@pytest.fixture(autouse=True)
def _restored() -> Any:
    states = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])


def draw(rank: int, group: int = 0, *, extra: bool = False) -> tuple[list[float], float, float]:
    """Return the first numbers of a rank that the script has seeded like all others."""
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    if extra:
        torch.rand(3)
    separate_rng(rank, group)
    return torch.rand(4).tolist(), random.random(), float(numpy.random.rand())


def test_ranks_that_are_seeded_alike_draw_different_numbers_from_every_generator() -> None:
    drawn = [draw(rank, group) for group in range(2) for rank in range(3)]
    for generator in zip(*drawn, strict=True):
        assert len({str(numbers) for numbers in generator}) == 6


def test_the_numbers_of_a_rank_are_the_same_in_every_run() -> None:
    assert draw(2) == draw(2)
    assert draw(2)[0] == draw(2, extra=True)[0], "what was drawn before does not matter"


def test_the_first_rank_and_a_single_process_draw_what_a_plain_loop_draws() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4).tolist()
    assert draw(0)[0] == expected


def train(folder: Path, output: Path, steps: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "mimatrix.cli.main", "run", "-n", "2", str(SCRIPT)]
    settings = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(folder), str(output), str(steps)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=settings,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(Path(f"{output}.{rank}").read_text()) for rank in range(2)]


@pytest.mark.long
def test_masks_differ_between_ranks_and_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = train(tmp_path / "saved", tmp_path / "whole", 6)
    rest = train(tmp_path / "saved", tmp_path / "rest", 6)
    torch.manual_seed(11)
    assert {report["first"] for report in whole} == {float(torch.nn.Linear(4, 4).double().weight[0, 0].detach())}
    ones, others = whole[0]["masks"], whole[1]["masks"]
    assert len(ones) == 9
    assert len(others) == 3
    assert not any(mask in ones for mask in others)
    for rank in range(2):
        assert rest[rank]["masks"] == whole[rank]["masks"]
        assert rest[rank]["weights"] == whole[rank]["weights"]
