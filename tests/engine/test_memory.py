"""Memory of whole runs as the kernel counts it: each ZeRO stage holds only its shards, so larger models fit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "memory.py"
SHARES = (0.7, 0.2, 0.1)
UNIT = 4 * (1024 * 1024 + 1024)
IN_FLIGHT = 8 * UNIT
"""Gradients: two units in the arena and one or two being made; parameters: one in use, one ahead, one behind; slack."""


def run_measured(stage: int, shares: tuple[float, ...], limit: int = 0) -> tuple[int, list[dict[str, Any]], str]:
    """Return the exit code, the measurements of all ranks, and what was written to stderr."""
    command = [sys.executable, "-m", "mimatrix.cli.main", "run", "-n", str(len(shares)), str(SCRIPT)]
    done = subprocess.run(
        [*command, str(stage), ",".join(map(str, shares)), str(limit)],
        capture_output=True,
        text=True,
        timeout=100,
        # So that freed memory is returned to the kernel, and it counts only what is kept.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
        check=False,
    )
    measurements = [json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines() if "{" in line]
    return done.returncode, sorted(measurements, key=lambda rank: int(rank["rank"])), done.stderr


@pytest.mark.long
@pytest.mark.parametrize("stage", range(4))
def test_each_zero_stage_holds_only_what_it_shards(stage: int) -> None:
    code, measurements, errors = run_measured(stage, SHARES)
    assert code == 0, errors
    for share, measured in zip(SHARES, measurements, strict=True):
        model = measured["model"]
        parameters = model * (share if stage == 3 else 1)
        gradients = model * (share if stage >= 2 else 1)
        optimizer = 2 * model * (share if stage >= 1 else 1)
        kept = parameters + gradients + optimizer
        assert 0.95 * kept <= measured["peak"] <= 1.05 * kept + IN_FLIGHT, (
            stage,
            share,
            measured["peak"] / 1e6,
            kept / 1e6,
        )
        assert measured["counted"]["optimizer"] == pytest.approx(optimizer, rel=0.01)


@pytest.mark.long
def test_zero3_trains_a_model_whose_state_exceeds_one_rank() -> None:
    shares, model = (0.4, 0.3, 0.3), 32 * UNIT
    limit = int(2.6 * model)
    code, measurements, errors = run_measured(3, shares, limit)
    assert code == 0, errors
    assert all(rank["peak"] < limit for rank in measurements)
    code, _, errors = run_measured(0, shares, limit)
    assert code != 0
    assert "can't allocate memory" in errors
