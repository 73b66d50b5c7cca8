"""Shard servers for groups that are threads of one process, and a model for them."""

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
from mimatrix.hybrid.server.push_log import Push
from mimatrix.hybrid.server.server import ShardServer
from mimatrix.hybrid.server.shard import Shard
from support.models import Perceptron

BATCH, SAMPLES = 6, 40
TWO = Shares((0.6, 0.4))


def replicate_in_ring(servers: Sequence[ShardServer]) -> None:
    """Let each server know all others, and replicate its shard at the next one."""
    addresses = [server.address for server in servers]
    for number, server in enumerate(servers):
        server.replicas.set_peers(addresses, len(addresses))
        server.replicas.attach(number, addresses[(number + 1) % len(addresses)])


class ShardServers:
    """Servers, each with one shard and the replica of the previous one; started by the first group that connects."""

    def __init__(self, policy: Policy, shares: Shares) -> None:
        self._policy, self._shares, self._lock = policy, shares, threading.Lock()
        self.servers: list[ShardServer] = []

    def connect(self, group: int, layout: FlatLayout, flat: torch.Tensor) -> ShardsClient:
        count = len(self._shares)
        with self._lock:
            if not self.servers:
                specs = layout.optimizer_specs(self._shares, self._policy.outer)
                parts = torch.split(flat, list(self._shares.cut(layout.numel)))
                for k in range(count):
                    shards = {n: Shard(parts[n], specs[n], self._policy.scaling) for n in (k, (k - 1) % count)}
                    self.servers.append(ShardServer.open(shards, "secret"))
                if count > 1:
                    replicate_in_ring(self.servers)
        addresses = [[self.servers[k].address, self.servers[(k + 1) % count].address][:count] for k in range(count)]
        return ShardsClient(group, layout.numel, self._shares, addresses, "secret")

    def optimizer(self, group: int, rank: int = 0, **options: Any) -> GroupOptimizer:
        """Return the outer optimizer of one rank of a group."""
        return GroupOptimizer(
            lambda *given: self.connect(group, *given), self._policy, group=group, is_first=rank == 0, **options
        )

    def shards(self) -> list[Shard]:
        """Return the primary of each shard."""
        return [server._shards[number] for number, server in enumerate(self.servers)]


@contextmanager
def shard_servers(policy: Policy, shares: Shares = TWO) -> Iterator[ShardServers]:
    servers = ShardServers(policy, shares)
    try:
        yield servers
    finally:
        for server in servers.servers:
            server.close()


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return Perceptron().double()


def make_push(group: int, number: int, samples: int, base_version: int) -> Push:
    """Return a push that has as many samples as all of its group's."""
    return Push(group=group, number=number, samples=samples, nominal_samples=samples, base_version=base_version)
