"""A few rounds of the soak: a rank that is killed or stopped in the middle is named by all others, in time."""

import json
import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).parent / "soak.py"


def test_survivors_name_the_rank_that_was_killed_or_stopped() -> None:
    command = [sys.executable, str(SOAK), "--rounds", "6", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["left"] == []
    assert done.returncode == 0
