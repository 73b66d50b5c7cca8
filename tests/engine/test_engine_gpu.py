"""Three unequal parts of one GPU (CUDA MPS) give what one process gives, in every stage; so do two of them and a CPU.

Needs an NVIDIA GPU.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
PARTS = ((60, "40G"), (25, "20G"), (10, "10G"))
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize("last", ["GPU", "CPU"])
def test_unequal_parts_of_a_gpu_are_exact(tmp_path: Path, last: str) -> None:
    for report in reports_of("on_gpu.py", tmp_path, last):
        assert len(report["apart"]) == 12
        assert max(report["apart"].values()) < 1e-10, report["apart"]


def test_habits_of_scripts_are_right_or_refused_on_unequal_parts_of_a_gpu(tmp_path: Path) -> None:
    reports = reports_of("habits_on_gpu.py", tmp_path, "GPU")
    for report in reports:
        assert max(report["apart"].values()) < 1e-10, report["apart"]
        assert "clip_grad_norm_ was called before the gradients are summed" in report["refused"]
    assert len(reports[0]["apart"]) == 8
    assert len({str(report["mask"]) for report in reports}) == len(reports), "ranks draw different dropout masks"


def reports_of(script: str, tmp_path: Path, last: str) -> list[dict[str, Any]]:
    """Run a script on the parts of a GPU, and return what each rank prints last."""
    settings = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path), "CUDA_MPS_LOG_DIRECTORY": str(tmp_path)}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=settings, check=True, timeout=30)
    ranks = []
    try:
        for rank, (percent, memory) in enumerate(PARTS):
            environment = settings | {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(PARTS)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "MIMATRIX_CACHE": str(tmp_path / "cache"),
                "MIMATRIX_ARENA": "256MiB",
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent),
                "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={memory}",
            }
            if rank == 2 and last == "CPU":
                environment["CUDA_VISIBLE_DEVICES"] = ""
            words = [sys.executable, str(SCRIPTS / script)]
            ranks.append(
                subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        outputs = [rank.communicate(timeout=110) for rank in ranks]
    finally:
        for rank_process in ranks:
            rank_process.kill()
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", env=settings, text=True, timeout=30, check=False)
    for rank_process, (_, err) in zip(ranks, outputs, strict=True):
        assert rank_process.returncode == 0, err[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]
