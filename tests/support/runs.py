"""Training runs whose ranks are threads of this process."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from mimatrix.comm import C10dBackend, Endpoint, Group
from mimatrix.comm.memory.in_process import InProcessWindows
from mimatrix.engine.mode import Membership
from mimatrix.engine.outer_optimizer import OuterOptimizer
from mimatrix.engine.run import Run
from mimatrix.engine.settings import Settings
from mimatrix.engine.world import World
from support.ranks import create_gloo, together

T = TypeVar("T")


def in_runs(
    ranks: int,
    on_rank: Callable[[Run], T],
    *,
    timeout_s: float = 15.0,
    arena_bytes: int = 16 << 20,
    own: Callable[[int], dict[str, Any]] | None = None,
    outer: Callable[[int], OuterOptimizer | None] = lambda _: None,
    hosts: Sequence[str] | None = None,
    **settings: Any,
) -> list[T]:
    """Run `on_rank(run)` on threads that are the ranks of one run; `own` are further settings of a rank.

    With `hosts`, the host of each rank, Gloo connects them, and collectives are tuned.
    """
    store, windows = HashStore(), InProcessWindows()
    causes: list[BaseException] = []

    def rank_alone(rank: int) -> T:
        if ranks == 1:
            return on_rank(Run(Membership(World.join(Settings(**{"quiet": True, **settings}), outer=outer(0)))))
        host = hosts[rank] if hosts else "here"
        endpoint = Endpoint.join(store, rank, ranks, {"host": windows}, host=host, arena_bytes=arena_bytes)
        groups: list[Group] = []

        def group(name: str) -> Group:
            is_main = name == "reduce"
            gloo = create_gloo(PrefixStore(name, store), rank, ranks) if hosts else None
            backends = {"cpu": C10dBackend(gloo, rank, ranks, timeout_s)} if gloo else None
            created = Group.create(
                endpoint, name, range(ranks), backends=backends, timeout_s=timeout_s, own_thread=not is_main
            )
            if not is_main:
                groups.append(created)
            return created

        try:
            given = {**settings, **(own(rank) if own else {})}
            world = World.join(
                Settings(**{"quiet": True, **given}), rank=rank, world_size=ranks, new_group=group, outer=outer(rank)
            )
            return on_rank(Run(Membership(world)))
        except BaseException as error:
            causes.append(error)
            raise
        finally:
            for further_group in groups:
                further_group.queue.thread.close()
            endpoint.close()

    with torch.random.fork_rng():
        try:
            return together(ranks, rank_alone, timeout_s=60)
        except BaseException as error:  # noqa: BLE001
            # Not how the other ranks report it, but what happened first.
            raise causes[0] if causes else error  # noqa: B904
