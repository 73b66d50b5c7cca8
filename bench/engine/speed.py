"""A step of the engine next to DDP and FSDP2 on Gloo, in turns in the same two processes.

`python -m bench.engine.speed [STEPS]` starts the ranks and prints one JSON object: seconds of each, by model.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

STEPS = 100
WARM_UP = 5
BATCH = 16


def main(steps: int) -> None:
    """Start two ranks; what rank 0 prints is the result."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    shared = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared["MIMATRIX_CACHE"] = tempfile.mkdtemp()
    command = [sys.executable, "-m", "bench.engine.speed", "rank", str(steps)]
    ranks = [subprocess.Popen(command, env=shared | {"RANK": str(rank)}) for rank in range(2)]
    sys.exit(max(rank.wait(timeout=900) for rank in ranks))


def rank_alone(steps: int) -> None:
    """Measure as one rank: for each model the same step in each way in turn."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("mimatrix")
    found = {name: _measure(*made, steps) for name, made in _models().items()}
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def _models() -> dict[str, tuple[Callable[[], Any], Any]]:
    """Return a model with much communication and little computation, and the reverse, with one rank's inputs."""
    import torch
    from torch import nn

    def linear() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))

    def convolutions() -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
        for _ in range(4):
            layers += [nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))

    return {
        "communication": (linear, torch.randn(BATCH, 1024)),
        "computing": (convolutions, torch.randn(BATCH, 3, 32, 32)),
    }


def _measure(model: Callable[[], Any], inputs: Any, steps: int) -> dict[str, list[float]]:
    """Return the quartiles of the seconds of a step, by way."""
    import torch
    import torch.distributed as dist

    ways = _ways(model, inputs)
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    barrier = torch.zeros(1)
    for number in range(steps + WARM_UP):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            dist.all_reduce(barrier)
            started = time.perf_counter()
            next(ways[name])
            if number >= WARM_UP:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.quantiles(took, n=4) for name, took in times.items()}


def _ways(model: Callable[[], Any], inputs: Any) -> dict[str, Iterator[None]]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    gloo: Any = dist.new_group(backend="gloo")

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = model()
        return made

    ddp = nn.parallel.DistributedDataParallel(fresh(), process_group=gloo)
    sharded = fresh()
    mesh = DeviceMesh.from_group(gloo, "cpu")
    for layer in sharded.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    return {
        "computing alone": _plain(fresh(), inputs),
        "DDP, Gloo": _plain(ddp, inputs),
        "stage 0": _ours(fresh(), inputs, 0),
        "FSDP2, Gloo": _plain(sharded, inputs),
        "stage 1": _ours(fresh(), inputs, 1),
        "stage 2": _ours(fresh(), inputs, 2),
        "stage 3": _ours(fresh(), inputs, 3),
    }


def _plain(model: Any, inputs: Any) -> Iterator[None]:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        yield


def _ours(model: Any, inputs: Any, stage: Any) -> Iterator[None]:
    import torch

    import mimatrix

    run = mimatrix.init(global_batch=2 * BATCH, stage=stage, quiet=True)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = [row for row in inputs for _ in range(2)]
    model, optimizer, loader = run.prepare(model, optimizer, rows * 10)
    for _ in run.epochs(1 << 30):
        for batch in loader:
            run.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            yield


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank_alone(int(sys.argv[2]))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else STEPS)
