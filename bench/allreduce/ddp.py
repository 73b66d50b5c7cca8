"""DDP on 8 linear layers of 1024, batch 16, SGD: our backend and Gloo in turns, in the same two processes.

`python -m bench.allreduce.ddp` starts the ranks and prints one JSON object.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

STEPS = 120
BACKENDS = ("mimatrix", "gloo")


def main() -> None:
    """Start two ranks; what rank 0 prints is the result."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    shared = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared["MIMATRIX_CACHE"] = tempfile.mkdtemp()
    ranks = [
        subprocess.Popen([sys.executable, "-m", "bench.allreduce.ddp", "rank"], env=shared | {"RANK": str(rank)})
        for rank in range(2)
    ]
    sys.exit(max(rank.wait(timeout=300) for rank in ranks))


def rank_alone() -> None:
    """Train as one rank: the same step with each backend in turn."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from mimatrix.comm.registration import register

    register()
    torch.set_num_threads(1)
    dist.init_process_group("mimatrix")
    world: Any = dist.group.WORLD
    groups = {"mimatrix": world, "gloo": dist.new_group(backend="gloo")}
    batch = torch.randn(16, 1024)
    models, optimizers = {}, {}
    for name, group in groups.items():
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
        models[name] = nn.parallel.DistributedDataParallel(layers, process_group=group)
        optimizers[name] = torch.optim.SGD(layers.parameters(), lr=0.01)
    times: dict[str, list[float]] = {name: [] for name in groups}
    for step in range(STEPS + 5):
        for name in BACKENDS if step % 2 else BACKENDS[::-1]:
            world.mimatrix.barrier()
            started = time.perf_counter()
            optimizers[name].zero_grad()
            models[name](batch).square().mean().backward()
            optimizers[name].step()
            if step >= 5:
                times[name].append(time.perf_counter() - started)
    pairs = zip(models["mimatrix"].parameters(), models["gloo"].parameters(), strict=True)
    apart = max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)
    if dist.get_rank() == 0:
        figures = {name: statistics.quantiles(took, n=4) for name, took in times.items()}
        print(json.dumps({"seconds": figures, "apart": apart, "counters": world.counters}))
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_alone() if sys.argv[1:] == ["rank"] else main()
