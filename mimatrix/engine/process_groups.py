"""Process groups of a run: further groups of all ranks, each with a thread of its own."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mimatrix.comm.group import Group


class GroupFactory:
    """Makes process groups of all ranks by name; `reduce` is the default group of the process, where it is ours."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def __call__(self, name: str) -> Group:
        """Return the default group, or make one more. A collective."""
        world: Any = dist.group.WORLD
        if name == "reduce" and hasattr(world, "mimatrix"):
            default: Group = world.mimatrix
            return default
        process_group: Any = dist.new_group(backend="mimatrix", timeout=self._timeout)
        group: Group = process_group.mimatrix
        # Collectives of one group must never wait for another group's.
        group.queue.use_own_thread()
        return group
