"""A GPU's rank is killed while NCCL runs between hosts: all others raise an error that names it, and nothing is left.

Needs an NVIDIA GPU, three parts of which play the hosts.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mimatrix.core.exit_codes import PEER_LOST
from mimatrix.lab import collect_gpu, mps_daemon, parse_parts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
SCRIPT = Path(__file__).parent / "scripts" / "killed_on_gpu.py"
DEADLINE_S = 30.0
# Under CUDA MPS the last two are a fault of every process on the GPU.
WAYS = (*("between", "training") * 4, "inside", "inside")


def test_a_rank_that_is_killed_while_nccl_runs_is_named_by_all_others(tmp_path: Path) -> None:
    before = used_mib()
    with mps_daemon() as daemon:
        tries = [kill(way, tmp_path, daemon) for way in WAYS]
    (tmp_path / "tries.json").write_text(json.dumps(tries, indent=1))
    wait_until_free(before)
    for found in tries:
        check(found)


def kill(way: str, tmp_path: Path, daemon: dict[str, str]) -> dict[str, Any]:
    """Have rank 2 kill itself, and return what became of the others."""
    env = {"MIMATRIX_CACHE": str(tmp_path / "cache")}
    parts = parse_parts("60:40GiB,25:20GiB,10:10GiB", "a,b,c")
    words = [sys.executable, str(SCRIPT), way]
    *others, victim = collect_gpu(parts, words, env=env, timeout_s=40, daemon=daemon)
    reports = [json.loads((rank.stdout.splitlines() or ["{}"])[-1]) for rank in (*others, victim)]
    died_at = reports.pop().get("at", 0.0)
    return {
        "way": way,
        "victim": victim.returncode,
        "codes": [rank.returncode for rank in others],
        "after_s": [report.get("at", float("inf")) - died_at for report in reports],
        "texts": [report.get("text", "") for report in reports],
        "said": [[line for line in rank.stderr.splitlines() if line.startswith("mimatrix: ")] for rank in others],
        "stderr": [rank.stderr[-1500:] for rank in others],
    }


def check(found: dict[str, Any]) -> None:
    """Check what `kill` has returned."""
    assert found["victim"] == -9
    for code, after_s, text, said, stderr in zip(
        *(found[key] for key in ("codes", "after_s", "texts", "said", "stderr")), strict=True
    ):
        # What the script saw, or if that was a fault of the GPU, what the process says at its end.
        assert "rank 2 on c was lost" in text + "".join(said), stderr
        assert after_s < DEADLINE_S, stderr
        assert code == (1 if found["way"] == "between" else PEER_LOST), stderr


def used_mib() -> int:
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(words, check=True, capture_output=True, text=True, timeout=30).stdout)


def wait_until_free(before: int) -> None:
    """Wait until the GPU's memory is free again, which takes the driver a moment; and no process is left on it."""
    until = time.monotonic() + 20
    while used_mib() > before + 20 and time.monotonic() < until:
        time.sleep(0.5)
    assert used_mib() <= before + 20
    words = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    assert not subprocess.run(words, check=True, capture_output=True, text=True, timeout=30).stdout.strip()
