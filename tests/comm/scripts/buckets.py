"""DDP's buckets are read in place: the same parameters as with Gloo, also if one rank cannot share its buckets."""

from typing import Any

import torch
import torch.distributed as dist
from forks import forked, joined, require, say, world
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIZE, STEPS = 320, 5


def shared_storages() -> Any:
    return world().mimatrix.endpoint.arenas["host"].window.storages


def train(rank: int, group: Any, **how: Any) -> tuple[list[torch.Tensor], int]:
    """Return the parameters, and how many buckets peers read in place at the end."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(4))).double()
    model = DistributedDataParallel(layers, process_group=group, bucket_cap_mb=1, **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(3, SIZE, dtype=torch.float64, generator=numbers)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in layers.parameters()], len(shared_storages())


def scenarios(rank: int) -> None:
    joined("mimatrix")
    torch.set_num_threads(1)
    gloo = dist.new_group(backend="gloo")
    for name in ("copied", "views", "one without"):
        how = {"gradient_as_bucket_view": name == "views"}
        shared_storages().refused = "for this test" if name == "one without" and rank == 1 else ""
        (ours, count), (theirs, _) = train(rank, None, **how), train(rank, gloo, **how)
        apart = max(float((mine - other).abs().max()) for mine, other in zip(ours, theirs, strict=True))
        say({"scenario": name, "rank": rank, "apart": apart, "shared": count})
    # A tensor that Python holds stays where it is: there may be an array of NumPy's over it.
    tensor = torch.ones(1 << 16)
    seen = tensor.numpy()
    for _ in range(3):
        dist.all_reduce(tensor)
    assert (seen == 2**3).all()
    dist.destroy_process_group()


if __name__ == "__main__":
    require(forked(2, scenarios))
