"""What each stage keeps on each rank, as the kernel counts it; and a model that fits only when it is cut."""

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


def measured(stage: int, shares: tuple[float, ...], limit: int = 0) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, what the ranks said, and the errors."""
    command = [sys.executable, "-m", "mimatrix.cli.main", "run", "-n", str(len(shares)), str(SCRIPT)]
    done = subprocess.run(
        [*command, str(stage), ",".join(map(str, shares)), str(limit)],
        capture_output=True,
        text=True,
        timeout=100,
        # So that what is freed is given back, and the kernel's count is of what is kept.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
        check=False,
    )
    said = [json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines() if "{" in line]
    return done.returncode, sorted(said, key=lambda each: int(each["rank"])), done.stderr


@pytest.mark.long
@pytest.mark.parametrize("stage", range(4))
def test_each_zero_stage_holds_only_what_it_shards(stage: int) -> None:
    code, said, errors = measured(stage, SHARES)
    assert code == 0, errors
    for share, each in zip(SHARES, said, strict=True):
        model = each["model"]
        parameters = model * (share if stage == 3 else 1)
        gradients = model * (share if stage >= 2 else 1)
        optimizer = 2 * model * (share if stage >= 1 else 1)
        kept = parameters + gradients + optimizer
        assert 0.95 * kept <= each["peak"] <= 1.05 * kept + IN_FLIGHT, (stage, share, each["peak"] / 1e6, kept / 1e6)
        assert each["counted"]["optimizer"] == pytest.approx(optimizer, rel=0.01)


def test_zero3_trains_a_model_whose_state_exceeds_one_rank() -> None:
    shares, model = (0.4, 0.3, 0.3), 32 * UNIT
    limit = int(2.6 * model)
    code, said, errors = measured(3, shares, limit)
    assert code == 0, errors
    assert all(each["peak"] < limit for each in said)
    code, _, errors = measured(0, shares, limit)
    assert code != 0
    assert "can't allocate memory" in errors
