"""One rank that measures its own memory while it trains: `memory.py STAGE SHARES LIMIT`.

Measured is what the kernel says: private pages, and the pages of this rank's own arena (peers' arenas are theirs). Says
bytes above what the process had before the model, the largest seen in a backward pass. With a LIMIT in bytes above that
the process may not have more private memory.
"""

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mimatrix

LAYERS, WIDTH = 32, 1024


def private_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def arena_bytes() -> int:
    """Pages of the memory that this rank shares: a memfd of its own."""
    world: Any = dist.group.WORLD
    found: int = world.mimatrix.endpoint.arenas["host"].window.touched_bytes
    return found


def main(stage: Any, shares: list[float], limit: int) -> None:
    run = mimatrix.init(batch=[1] * len(shares), stage=stage, shares=shares, unit_bytes=4 << 20, quiet=True)
    _warm_up()
    before = private_bytes() + arena_bytes()
    if limit:
        data = Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]
        resource.setrlimit(resource.RLIMIT_DATA, (int(data) * 1024 + limit,) * 2)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    state = sum(parameter.numel() * 4 for parameter in model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False)
    seen: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _: seen.append(private_bytes() + arena_bytes() - before)
        )
    model, optimizer, loader = run.prepare(model, optimizer, list(torch.randn(4 * len(shares), WIDTH)))
    for batch in loader:
        seen.clear()
        run.backward(model(batch).square().mean())
        optimizer.step()
    counted = run.stats()[-1].memory_bytes
    print(json.dumps({"rank": run.rank, "model": state, "peak": max(seen), "counted": dict(counted)}), flush=True)


def _warm_up() -> None:
    """Let torch set up whatever it needs once."""
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model(torch.randn(1, WIDTH)).sum().backward()
    optimizer.step()


if __name__ == "__main__":
    main(int(sys.argv[1]), [float(word) for word in sys.argv[2].split(",")], int(sys.argv[3]))
