"""GPU ranks, where there is a GPU: CUDA IPC between ranks that share one, refused or not, and CPU ranks beside them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "scripts" / "gpu.py"
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize(("what", "size"), [("mixed", 2), ("mixed", 3), ("shared", 3), ("refused", 2), ("refused", 3)])
def test_ranks_with_gpus(what: str, size: int, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    shared = os.environ | {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"MIMATRIX_CACHE": str(tmp_path), "MIMATRIX_ARENA": "512MiB", "PYTHONPATH": str(ROOT)}
    ranks = []
    for rank in range(size):
        own = {"RANK": str(rank)} | ({"CUDA_VISIBLE_DEVICES": ""} if what == "mixed" and rank == 1 else {})
        ranks.append(subprocess.Popen([sys.executable, str(SCRIPT), what], env=shared | own))
    try:
        assert [rank.wait(timeout=100) for rank in ranks] == [0] * size
    finally:
        for process in ranks:
            process.kill()
