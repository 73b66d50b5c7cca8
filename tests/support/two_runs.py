"""Two training runs side by side on the same ranks, which are threads: as for a GAN."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from torch._C._distributed_c10d import HashStore

from mimatrix.comm import Endpoint, Group
from mimatrix.comm.memory.in_process import InProcessWindows
from mimatrix.engine.mode import Membership
from mimatrix.engine.run import Run
from mimatrix.engine.settings import Settings
from mimatrix.engine.world import World
from support.ranks import together

T = TypeVar("T")


def in_two_runs(ranks: int, on_rank: Callable[[Run, Run], T], *, timeout_s: float = 15.0, **settings: Any) -> list[T]:
    """Run `on_rank(run, other)` on threads, each with two runs of the same settings."""
    meetings = [(HashStore(), InProcessWindows()) for _ in range(2)]

    def join(rank: int, number: int, stack: ExitStack) -> Run:
        if ranks == 1:
            return Run(Membership(World.join(Settings(quiet=True, **settings))))
        store, windows = meetings[number]
        endpoint = Endpoint.join(store, rank, ranks, {"host": windows}, host="here", arena_bytes=16 << 20)
        stack.callback(endpoint.close)

        def group(name: str) -> Group:
            is_main = name == "reduce"
            created = Group.create(endpoint, name, range(ranks), timeout_s=timeout_s, own_thread=not is_main)
            if not is_main:
                stack.callback(created.queue.thread.close)
            return created

        world = World.join(Settings(quiet=True, **settings), rank=rank, world_size=ranks, new_group=group)
        return Run(Membership(world))

    def rank_alone(rank: int) -> T:
        with ExitStack() as stack:
            return on_rank(join(rank, 0, stack), join(rank, 1, stack))

    return together(ranks, rank_alone)
