"""Two services for groups that are threads, and a model for them."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mimatrix.collectives.shares import Shares
from mimatrix.hybrid.client.client import ShardsClient
from mimatrix.hybrid.client.flat_layout import FlatLayout
from mimatrix.hybrid.client.group_optimizer import GroupOptimizer
from mimatrix.hybrid.policy import Policy
from mimatrix.hybrid.server.server import ShardServer
from mimatrix.hybrid.server.shard import Shard
from support.models import Perceptron

BATCH, SAMPLES = 6, 40
TWO = Shares((0.6, 0.4))


def mirror_round(services: Sequence[ShardServer]) -> None:
    """Each has its shard once more at the next one, and knows all others."""
    places = [service.place for service in services]
    for number, service in enumerate(services):
        service.mirrors.know(places, len(places))
        service.mirrors.begin(number, places[(number + 1) % len(places)])


class Town:
    """Services, each with one shard and the mirror of the one before; made by the first group that comes."""

    def __init__(self, policy: Policy, shares: Shares) -> None:
        self._policy, self._shares, self._lock = policy, shares, threading.Lock()
        self.services: list[ShardServer] = []

    def connect(self, group: int, layout: FlatLayout, row: torch.Tensor) -> ShardsClient:
        count = len(self._shares)
        with self._lock:
            if not self.services:
                steppings = layout.steppings(self._shares, self._policy.outer)
                parts = torch.split(row, list(self._shares.cut(layout.count)))
                for k in range(count):
                    held = {n: Shard(parts[n], steppings[n], self._policy.scaling) for n in (k, (k - 1) % count)}
                    self.services.append(ShardServer(held, "secret", say=print))
                if count > 1:
                    mirror_round(self.services)
        places = [[self.services[k].place, self.services[(k + 1) % count].place][:count] for k in range(count)]
        return ShardsClient(group, layout.count, self._shares, places, "secret")

    def member(self, group: int, rank: int = 0, **more: Any) -> GroupOptimizer:
        first = rank == 0
        return GroupOptimizer(
            lambda *given: self.connect(group, *given), self._policy, group=group, is_first=first, **more
        )

    def shards(self) -> list[Shard]:
        return [service._shards[number] for number, service in enumerate(self.services)]


@contextmanager
def town(policy: Policy, shares: Shares = TWO) -> Iterator[Town]:
    found = Town(policy, shares)
    try:
        yield found
    finally:
        for service in found.services:
            service.close()


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return Perceptron().double()
