"""All-reduce among processes that hold unequal parts of one GPU under CUDA MPS, side by side with Gloo.

`python -m bench.allreduce.gpu OUT.json` on a machine with an NVIDIA GPU: starts its own MPS, 60/25/10 % of the GPU.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mimatrix.lab import GpuPart, run_gpu

PERCENT = (60, 25, 10)
MEMORY_BYTES = (40 << 30, 20 << 30, 10 << 30)
SIZES = (1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
TURNS = 15


def main() -> None:
    """Start the ranks; rank 0 prints, and writes the file."""
    parts = [GpuPart(percent, memory) for percent, memory in zip(PERCENT, MEMORY_BYTES, strict=True)]
    words = [sys.executable, "-m", "bench.allreduce.gpu", "rank", sys.argv[1]]
    with tempfile.TemporaryDirectory() as cache:
        more = {"MIMATRIX_ARENA": "1GiB", "MIMATRIX_CACHE": cache}
        ending = run_gpu(parts, words, env=more, timeout_s=400)
    if ending.code:
        print(ending.describe(), file=sys.stderr)
    sys.exit(ending.code)


def rank_alone(out: str) -> None:
    """Measure as one rank."""
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
    """Count the elements that differ from the plain sum."""
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
