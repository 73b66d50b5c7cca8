"""Collectives, DDP and FSDP2 among three GPU hosts, ours and NCCL's own side by side in the same processes.

`python -m bench.allreduce.gpu_hosts OUT.json` on a machine with an NVIDIA GPU: three unlike parts of it (60/25/10 %)
play the hosts, and NCCL connects them over sockets.
"""

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mimatrix.lab import parse_parts, run_gpu

PARTS, HOSTS = "60:40GiB,25:20GiB,10:10GiB", "a,b,c"
SHARES = (0.6, 0.25, 0.15)
LARGE, SMALL = 64 << 20, 4 << 10
TURNS, SMALL_TURNS, STEPS = 40, 300, 150
CONTROL = "control: NCCL again"
LAYERS, WIDTH, BATCH = 16, 1024, 8
"""16.8 million parameters, 67 MB of gradients, and next to nothing to compute."""
Call = Callable[[], object]


def main() -> None:
    """Start the ranks; rank 0 prints, and writes the file."""
    words = [sys.executable, "-m", "bench.allreduce.gpu_hosts", "rank", sys.argv[1]]
    with tempfile.TemporaryDirectory() as cache:
        ending = run_gpu(parse_parts(PARTS, HOSTS), words, env={"MIMATRIX_CACHE": cache}, timeout_s=280)
    if ending.code:
        print(ending.describe(), file=sys.stderr)
    sys.exit(ending.code)


class TurnTimes:
    """What one rank measures, all ways in turn; a turn counts as long as its slowest rank took."""

    def __init__(self) -> None:
        import torch.distributed as dist

        world: Any = dist.group.WORLD
        self.group = world.mimatrix
        self.rows: list[dict[str, Any]] = []

    def compare(self, what: str, calls: dict[str, Call], turns: int) -> None:
        """Time the calls turn by turn, and add a row for each."""
        import torch

        times: dict[str, list[float]] = {name: [] for name in calls}
        order, shuffle = list(calls), random.Random(0).shuffle
        for turn in range(turns + 5):
            shuffle(order)  # alike on all ranks: who comes first or last has no advantage
            took_s = []
            for name in order:
                torch.cuda.synchronize()
                self.group.barrier()
                started = time.perf_counter()
                calls[name]()
                torch.cuda.synchronize()
                took_s.append(time.perf_counter() - started)
            slowest_s = self.group.cpu_backend.max_over_ranks(took_s)
            for name, seconds in zip(order, slowest_s, strict=True):
                if turn >= 5:  # the first ones warm up
                    times[name].append(seconds)
        for name, seconds in times.items():
            quartiles = statistics.quantiles(seconds, n=4)
            spread_s = (quartiles[2] - quartiles[0]) / 2
            self.rows.append(
                {"what": what, "who": name, "median_s": quartiles[1], "spread_s": spread_s, "turns": turns}
            )
            if self.group.rank == 0:
                print(f"{what:32} {name:24} {quartiles[1] * 1e3:9.3f} ms +- {spread_s * 1e3:.3f}", flush=True)


def rank_alone(out: str) -> None:
    """Measure as one rank."""
    import torch
    import torch.distributed as dist

    from mimatrix.comm.registration import register

    register()
    torch.cuda.set_device(0)
    dist.init_process_group("mimatrix")
    nccl, again = dist.new_group(backend="nccl"), dist.new_group(backend="nccl")
    measurements = TurnTimes()
    wrong = measure_collectives(measurements, nccl)
    ddp = measure_training(measurements, (nccl, again), "DDP", with_ddp)
    fsdp = measure_training(measurements, (nccl, again), "FSDP2", with_fsdp)
    world: Any = dist.group.WORLD
    if dist.get_rank() == 0:
        result = {
            "facts": {"gpu": torch.cuda.get_device_name(0), "parts": PARTS, "hosts": HOSTS, "torch": torch.__version__},
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
            "rows": measurements.rows,
            "wrong": wrong,
            "apart": {"DDP": ddp, "FSDP2": fsdp},
            "tuner": measurements.group.tuner.table,
            "counters": world.counters,
            "transports": [str(row) for row in measurements.group.transport_status()],
        }
        Path(out).write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps({"wrong": wrong, "apart": result["apart"], "counters": world.counters}))
    dist.destroy_process_group()


def measure_collectives(measurements: TurnTimes, nccl: Any) -> int:
    """Compare all-reduces, and reduce-scatters and all-gathers with shares; return how many elements were wrong."""
    import torch
    import torch.distributed as dist

    from mimatrix.collectives.shares import Shares

    group, rank, ranks = measurements.group, dist.get_rank(), dist.get_world_size()
    for size, turns in ((SMALL, SMALL_TURNS), (LARGE, TURNS)):
        tensor = torch.zeros(size // 4, device="cuda")
        calls: dict[str, Call] = {
            "NCCL": partial(dist.all_reduce, tensor, group=nccl),
            "mimatrix": partial(dist.all_reduce, tensor),
            "mimatrix engine": partial(group.all_reduce, tensor),
        }
        measurements.compare(f"all_reduce {size >> 10} KiB", calls, turns)
    shares = Shares(SHARES)
    flat = torch.zeros(LARGE // 4, device="cuda")
    counts = shares.cut(flat.numel())
    parts, longest = list(torch.split(flat, list(counts))), max(counts)
    own, padded = torch.empty_like(parts[rank]), torch.zeros(ranks, longest, device="cuda")
    row = torch.empty(longest, device="cuda")
    others = [peer for peer in range(ranks) if peer != rank]
    addends = [torch.empty_like(own) for _ in others]

    def gather_padded() -> None:
        padded[rank, : counts[rank]].copy_(parts[rank])
        dist.all_gather_into_tensor(padded.view(-1), padded[rank], group=nccl)
        for part, line in zip(parts, padded, strict=True):
            part.copy_(line[: part.numel()])

    def scatter_padded() -> None:
        for part, line in zip(parts, padded, strict=True):
            line[: part.numel()].copy_(part)
        dist.reduce_scatter_tensor(row, padded.view(-1), group=nccl)
        own.copy_(row[: counts[rank]])

    def exchange(sends: list[Any], receives: list[Any]) -> None:
        messages = [
            dist.P2POp(do, tensor, group=nccl, group_peer=peer)
            for do, tensors in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in zip(others, tensors, strict=True)
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    def scatter_direct() -> None:
        exchange([parts[peer] for peer in others], addends)
        for addend in addends:
            parts[rank].add_(addend)

    gathers: dict[str, Call] = {
        "NCCL lists": lambda: dist.all_gather(parts, parts[rank], group=nccl),
        "NCCL padded": gather_padded,
        "NCCL send and receive": lambda: exchange([parts[rank]] * len(others), [parts[peer] for peer in others]),
        "mimatrix": lambda: group.all_gather(flat, shares=shares),
    }
    scatters: dict[str, Call] = {
        "NCCL lists": lambda: dist.reduce_scatter(own, parts, group=nccl),
        "NCCL padded": scatter_padded,
        "NCCL send and receive": scatter_direct,
        "mimatrix": lambda: group.reduce_scatter(flat, shares=shares),
    }
    measurements.compare("all_gather 64 MiB, shares", gathers, TURNS)
    measurements.compare("reduce_scatter 64 MiB, shares", scatters, TURNS)
    return count_wrong(group, shares)


def count_wrong(group: Any, shares: Any) -> int:
    """Return how many elements of our results differ from what they must be, over all ranks."""
    import torch

    count, ranks = LARGE // 4, group.world_size
    pattern = (torch.arange(count, device="cuda") % 13).float()
    total = ranks * pattern + ranks * (ranks - 1) / 2
    own = slice(*(lambda part: (part.start, part.stop))(group.part(count, shares)))
    reduced, scattered, gathered = pattern + group.rank, pattern + group.rank, torch.zeros_like(pattern)
    gathered[own] = pattern[own]
    group.all_reduce(reduced)
    group.reduce_scatter(scattered, shares=shares)
    group.all_gather(gathered, shares=shares)
    wrong = (reduced != total).sum() + (scattered[own] != total[own]).sum() + (gathered != pattern).sum()
    return int(sum(group.cpu_backend.max_over_ranks([float(wrong)])))


def measure_training(measurements: TurnTimes, nccl: tuple[Any, Any], name: str, wrap: Callable[..., Any]) -> float:
    """Compare steps of one model over our backend and over NCCL's; return how far the parameters are apart.

    NCCL is measured on two communicators, which shows how far two measurements of the same are apart.
    """
    import torch
    from torch import nn

    def build_step(process_group: Any) -> tuple[Any, Call]:
        torch.manual_seed(3)
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).cuda()
        model = wrap(layers, process_group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batch = torch.randn(BATCH, WIDTH, device="cuda")

        def step() -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        return model, step

    (ours, our_step), (theirs, their_step), (_, control_step) = (
        build_step(None),
        build_step(nccl[0]),
        build_step(nccl[1]),
    )
    steps = {"NCCL": their_step, "mimatrix": our_step, CONTROL: control_step}
    measurements.compare(f"{name} step", steps, STEPS)
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float((local(one) - local(other)).abs().max()) for one, other in pairs)


def local(parameter: Any) -> Any:
    """Return a parameter, or this rank's shard of it."""
    return parameter.to_local().detach() if hasattr(parameter, "to_local") else parameter.detach()


def with_ddp(layers: Any, process_group: Any) -> Any:
    """Wrap a model in DDP."""
    from torch import nn

    return nn.parallel.DistributedDataParallel(layers, process_group=process_group)


def with_fsdp(layers: Any, process_group: Any) -> Any:
    """Shard a model by FSDP2, layer by layer."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    world: Any = dist.group.WORLD
    mesh = DeviceMesh.from_group(process_group or world, "cuda")
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(layers, mesh=mesh)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank_alone(sys.argv[2])
    else:
        main()
