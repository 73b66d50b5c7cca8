"""All-reduce among processes that hold unlike parts of one GPU under CUDA MPS, side by side with Gloo.

`python -m bench.allreduce.gpu OUT.json` on a machine with an NVIDIA GPU: starts its own MPS, 60/25/10 % of the GPU.
"""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PERCENT = (60, 25, 10)
MEMORY = ("40G", "20G", "10G")
SIZES = (1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
TURNS = 15


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """A control daemon of our own, gone afterwards."""
    folder = tempfile.mkdtemp()
    settings = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=settings, check=True, timeout=30)
    try:
        yield settings
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", env=settings, text=True, timeout=30, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Start the ranks; rank 0 prints, and writes the file."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with mps() as settings:
        ranks = []
        for rank, (percent, memory) in enumerate(zip(PERCENT, MEMORY, strict=True)):
            mine = settings | {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(PERCENT)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent),
                "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={memory}",
                "MIMATRIX_ARENA": "1GiB",
                "MIMATRIX_CACHE": tempfile.mkdtemp(),
            }
            ranks.append(subprocess.Popen([sys.executable, "-m", "bench.allreduce.gpu", "rank", sys.argv[1]], env=mine))
        codes = [rank.wait(timeout=400) for rank in ranks]
    sys.exit(max(codes))


def rank_alone(out: str) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    from mimatrix.comm.registration import register

    register()
    torch.cuda.set_device(0)
    dist.init_process_group("mimatrix")
    world: Any = dist.group.WORLD
    group, rank = world.mimatrix, dist.get_rank()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    rows = []
    for size in SIZES:
        count = size // 4 // len(PERCENT) * len(PERCENT)
        tensors = {"arena": group.empty(count, kind="cuda"), "ordinary": torch.empty(count, device="cuda")}
        tensors["gloo"] = torch.empty(count, device="cuda")
        runs: dict[str, Callable[[torch.Tensor], object]] = {
            "arena": group.all_reduce,
            "ordinary": dist.all_reduce,
            "gloo": lambda tensor: group.cpu_backend.run("all_reduce", tensor, "sum", 0),
        }
        wrong = {who: check(run, tensors[who], rank) for who, run in runs.items()}
        times: dict[str, list[float]] = {who: [] for who in runs}
        for _ in range(TURNS):
            for who, run in runs.items():
                tensors[who].zero_()
                torch.cuda.synchronize()
                group.barrier()
                started = time.perf_counter()
                run(tensors[who])
                torch.cuda.synchronize()
                times[who] += group.cpu_backend.max_over_ranks([time.perf_counter() - started])
        for who, took in times.items():
            quarters = statistics.quantiles(took[2:], n=4)
            rows.append([size, who, quarters[1], quarters[2] - quarters[0], wrong[who]])
            if rank == 0:
                print(f"{size >> 20:4d} MiB {who:9} {quarters[1] * 1e3:9.3f} ms  wrong {wrong[who]}", flush=True)
        for arena in group.endpoint.arenas.values():
            if placed := arena.slot_of(tensors["arena"]):
                placed[0].free()
    if rank == 0:
        facts = {"gpu": torch.cuda.get_device_name(0), "percent": PERCENT, "torch": torch.__version__}
        result = {
            "facts": facts,
            "rows": rows,
            "tuner": group.tuner.table,
            "counters": world.counters,
            "processors": processors,
        }
        Path(out).write_text(json.dumps(result, indent=1))
        print(world.counters)
    dist.destroy_process_group()


def check(run: Callable[[Any], object], tensor: Any, rank: int) -> int:
    """Elements that differ from the plain sum."""
    import torch

    pattern = torch.arange(tensor.numel(), device="cuda") % 13
    tensor.copy_(pattern + rank)
    run(tensor)
    ranks = len(PERCENT)
    return int((tensor != ranks * pattern + ranks * (ranks - 1) // 2).sum())


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank_alone(sys.argv[2])
    else:
        main()
