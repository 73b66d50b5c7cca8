"""Groups whose ranks have a GPU or not, or share one.

`mixed` has ranks with and without a GPU in one group. `shared` runs DDP and FSDP2 among ranks that share one GPU, and
`refused` does so if they may not read each other's memory.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from mimatrix.comm import Group
from mimatrix.comm.memory import peer_access
from mimatrix.comm.registration import register


def mixed(rank: int, size: int) -> None:
    """Rank 1 has no GPU: everybody meets in the host's memory."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert (device == "cpu") == (rank == 1)
    for count in (1, 1000, 3_000_000):
        tensor = torch.arange(count, dtype=torch.float64, device=device) + rank
        dist.all_reduce(tensor)
        wanted = size * torch.arange(count, dtype=torch.float64, device=device) + size * (size - 1) / 2
        assert torch.equal(tensor, wanted)
    tensor = torch.full((10,), float(rank), device=device)
    dist.broadcast(tensor, 1)
    assert (tensor == 1).all()


def shared(rank: int, size: int) -> None:
    """Every rank has the GPU: CUDA IPC; on a side stream too, and with all types."""
    world: Any = dist.group.WORLD
    assert sys.argv[1] == "refused" or "cuda" in world.mimatrix.window_kinds
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64):
        tensor = (torch.arange(100_003, device="cuda") % 5 + rank).to(dtype)
        dist.all_reduce(tensor)
        wanted = size * (torch.arange(100_003, device="cuda") % 5) + size * (size - 1) // 2
        assert torch.equal(tensor, wanted.to(dtype))
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        tensor = torch.full((5_000_000,), 1.0, device="cuda").mul_(rank + 1)
        work = dist.all_reduce(tensor, async_op=True)
        assert work
        work.wait()
        assert (tensor == size * (size + 1) / 2).all()
    alone = _trained(lambda layers: layers, range(size))
    for wrap in (_ddp, _fsdp):
        apart = float((_trained(wrap, [rank]) - alone).abs().max())
        assert apart < 1e-10, f"{wrap.__name__} is {apart} from one process"


def refused(rank: int, size: int) -> None:
    """Peer access is refused: no arena in GPU memory, and everything else as before."""
    world: Any = dist.group.WORLD
    group: Group = world.mimatrix
    assert group.window_kinds == ("host",)
    assert sorted(group.endpoint.arenas) == ["host"]
    (status,) = [row for row in group.transport_status() if (row.transport, row.device) == ("windows", "cuda")]
    assert status.reason == "rank 0 and rank 1 cannot read each other's memory: refused by the test"
    shared(rank, size)


def _trained(wrap: Any, ranks: Sequence[int]) -> torch.Tensor:
    """Parameters after a few steps on the batches of `ranks`, the mean of their losses."""
    torch.manual_seed(3)
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).double().cuda()
    model = wrap(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(8, 64, dtype=torch.float64, device="cuda")
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.stack([model(batch + rank).square().mean() for rank in ranks]).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    whole = [getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()]
    return torch.cat([each.detach().reshape(-1) for each in whole])


def _ddp(layers: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(layers)


def _fsdp(layers: nn.Module) -> nn.Module:
    for layer in layers.children():
        fully_shard(layer)
    fully_shard(layers)
    return layers


def main() -> None:
    register()
    if sys.argv[1] == "refused":
        peer_access.can_access_peer = lambda own, peer: "refused by the test"
    dist.init_process_group("mimatrix")
    rank, size = dist.get_rank(), dist.get_world_size()
    {"mixed": mixed, "shared": shared, "refused": refused}[sys.argv[1]](rank, size)
    world: Any = dist.group.WORLD
    assert any(name.startswith("all_reduce") for name in world.counters)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
