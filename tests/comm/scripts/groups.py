"""Groups come and go: overlapping, of one rank, in meshes, beside Gloo, again in the same process, never destroyed."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forks import forked, joined, require, say, world
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import init_device_mesh

from mimatrix.comm.tuning.choice import C10D


def summed(rank: int, group: Any = None, count: int = 5) -> float:
    tensor = torch.full((count,), float(10**rank))
    dist.all_reduce(tensor, group=group)
    assert (tensor == tensor[0]).all()
    return float(tensor[0])


def sub_groups(rank: int) -> None:
    joined("cpu:mimatrix,cuda:mimatrix")
    left, right = dist.new_group([0, 1, 2]), dist.new_group([1, 2, 3])
    alone = [dist.new_group([each]) for each in range(4)]
    for _ in range(3):
        assert summed(rank) == 1111
        if rank != 3:
            assert summed(rank, left) == 111
        if rank != 0:
            assert summed(rank, right) == 1110
        assert summed(rank, alone[rank]) == 10**rank
    halves(rank, alone[rank], 1)
    turned = dist.new_group([3, 1])
    if rank in (1, 3):
        assert summed(rank, turned) == 1010
        tensor = torch.tensor([float(rank)])
        dist.broadcast(tensor, 3, group=turned)
        assert tensor.item() == 3
    if rank != 3:
        dist.destroy_process_group(left)
    assert summed(rank) == 1111
    mesh(rank)
    if rank == 0:
        say({"world": world().counters})
    dist.destroy_process_group()


def mesh(rank: int) -> None:
    """Two dimensions: rows and columns are groups of their own."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    assert summed(rank, both.get_group("columns")) == (11 if rank < 2 else 1100)
    assert summed(rank, both.get_group("rows")) == (101 if rank % 2 == 0 else 1010)
    halves(rank, both.get_group("columns"), 2)
    assert sum(both.get_group("rows").counters.values()) == 1  # type: ignore[attr-defined]


def halves(rank: int, group: Any, ranks: int) -> None:
    whole, part = torch.empty(ranks * 3), torch.empty(3)
    dist.all_gather_into_tensor(whole, torch.full((3,), float(rank)), group=group)
    dist.reduce_scatter_tensor(part, whole, group=group)
    assert (part == ranks * whole.view(ranks, 3)[dist.get_rank(group)]).all()


def beside_gloo(rank: int) -> None:
    """Use overlapping groups of ours next to Gloo's default group, first without one that has all ranks."""
    joined("gloo")
    left, right = (dist.new_group(ranks, backend="mimatrix") for ranks in ([0, 1], [1, 2]))
    if rank != 2:
        assert summed(rank, left) == 11
    if rank != 0:
        assert summed(rank, right) == 110
    whole = dist.new_group(backend="mimatrix")
    assert summed(rank, whole) == 111
    dist.destroy_process_group()


def again(rank: int) -> None:
    """Make and destroy groups over one store, as torchrun's agent gives it, and leave nothing behind."""
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0)
    left_over = []
    for _ in range(5):
        dist.init_process_group("mimatrix", store=store, rank=rank, world_size=2)
        assert summed(rank) == 11
        assert summed(rank, dist.new_group([0, 1]), 1000) == 11
        dist.destroy_process_group()
        settle()
        threads, files = (len(list(Path("/proc/self", kind).iterdir())) for kind in ("task", "fd"))
        left_over.append((threading.active_count(), threads, files))
    assert all(last <= first for first, last in zip(left_over[1], left_over[-1], strict=True)), left_over
    assert left_over[-1][0] == 1, left_over


def settle() -> None:
    """Threads that were told to end take a moment."""
    until = time.monotonic() + 5
    while threading.active_count() > 1 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)


def never_destroyed(rank: int) -> None:
    """Leave on quick ranks while the last collective is still in flight on slow ones."""
    joined()
    for _ in range(20):
        assert summed(rank, count=100_000) == 111
    time.sleep(0.3 * rank)
    assert summed(rank) == 111


def in_order(rank: int) -> None:
    """Asynchronous collectives of ours and c10d collectives of the caller are matched on every rank."""
    joined()
    world().mimatrix.tuner.cached_choice = lambda _: C10D
    for step in range(20):
        first, second = torch.full((1000,), float(rank)), [torch.zeros(10) for _ in range(3)]
        time.sleep(0.002 * ((rank + step) % 3))
        work = dist.all_reduce(first, async_op=True)
        dist.all_gather(second, torch.full((10,), float(rank)))
        assert work
        work.wait()
        assert (first == 3).all()
        assert [each[0].item() for each in second] == [0, 1, 2]
    dist.destroy_process_group()


if __name__ == "__main__":
    for size, scenario in ((4, sub_groups), (3, beside_gloo), (2, again), (3, never_destroyed), (3, in_order)):
        require(forked(size, scenario, timeout_s=25))
        say(scenario.__name__)
