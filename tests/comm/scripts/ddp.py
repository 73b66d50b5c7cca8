"""The loop of PyTorch's tutorial on DDP, for any backend: train, save on one rank, load on all, train on.

`torchrun ... ddp.py BACKEND OUTPUT` leaves the final parameters, and the counters where there are any.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 (as the tutorial has it)
from torch.optim import SGD


class ToyModel(nn.Module):
    def __init__(self, *, lazy: bool = False) -> None:
        super().__init__()
        self.net1, self.net2 = nn.Linear(10, 10), nn.Linear(10, 5)
        self.relu, self.unused, self.lazy = nn.ReLU(), nn.Linear(3, 3), lazy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net2(self.relu(self.net1(x)))
        return y if self.lazy else y + 0 * self.unused(x[:, :3]).sum()


def batches(steps: int) -> Any:
    """Yield what this rank sees, the same in every run."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(steps):
        yield (
            torch.randn(20, 10, dtype=torch.float64, generator=generator),
            torch.randn(20, 5, dtype=torch.float64, generator=generator),
        )


def train(model: nn.Module, optimizer: Any, steps: int = 4) -> None:
    loss_fn = nn.MSELoss()
    for inputs, labels in batches(steps):
        optimizer.zero_grad()
        loss_fn(model(inputs), labels).backward()
        optimizer.step()


def fresh(**how: Any) -> tuple[DDP, SGD]:
    torch.manual_seed(dist.get_rank())  # DDP itself makes the ranks alike
    model = DDP(ToyModel(lazy=how.get("find_unused_parameters", False)).double(), **how)
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9)


def basic_with_checkpoint(folder: Path) -> DDP:
    model, optimizer = fresh()
    train(model, optimizer)
    checkpoint = folder / "model.checkpoint"
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), checkpoint)
    dist.barrier()
    model.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True))
    train(model, optimizer)
    dist.barrier()
    return model


def accumulating() -> DDP:
    model, optimizer = fresh(gradient_as_bucket_view=True)
    loss_fn = nn.MSELoss()
    for inputs, labels in batches(3):
        with model.no_sync():
            loss_fn(model(inputs[:10]), labels[:10]).backward()
        loss_fn(model(inputs[10:]), labels[10:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def trained(**how: Any) -> DDP:
    model, optimizer = fresh(**how)
    train(model, optimizer)
    return model


def compressed() -> DDP:
    model, optimizer = fresh()
    model.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    train(model, optimizer)
    return model


def sharded_optimizer() -> DDP:
    model, _ = fresh()
    train(model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01))
    return model


def main(backend: str, output: Path) -> None:
    dist.init_process_group(backend)
    torch.set_num_threads(1)
    models = {
        "basic": basic_with_checkpoint(output.parent),
        "unused": trained(find_unused_parameters=True),
        "static": trained(static_graph=True),
        "accumulating": accumulating(),
        "small buckets": trained(bucket_cap_mb=0.0001),
        "compressed": compressed(),
        "sharded optimizer": sharded_optimizer(),
    }
    found = {f"{name} {key}": value for name, model in models.items() for key, value in model.state_dict().items()}
    # The ranks of a job must agree among themselves.
    for value in found.values():
        least = value.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        assert torch.equal(least, value)
    if dist.get_rank() == 0:
        torch.save({"parameters": found, "counters": getattr(dist.group.WORLD, "counters", {})}, output)
    # Models hold their group too, and whoever lets go of Gloo last may wait for a thread of it that waits for Python.
    models.clear()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
