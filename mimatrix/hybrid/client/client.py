"""A group's client of all shards: it pushes to and pulls from all of them at once, and survives lost servers."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import torch

from mimatrix.collectives.shares import Shares
from mimatrix.hybrid.client.consistent_cut import ConsistentCut
from mimatrix.hybrid.client.shard_client import ShardClient
from mimatrix.hybrid.net import Address, Connection, Header
from mimatrix.hybrid.server.shard import Hyperparameters

ClientReply = tuple[Header, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledParams:
    """All parameters, each shard of one version."""

    values: torch.Tensor
    versions: tuple[int, ...]
    samples: int
    """Samples that all groups together have pushed, at the shard that has the fewest."""
    lead: int
    """Pushes by which this group is ahead of the slowest connected group."""
    slowest_group: int


@dataclass(frozen=True, slots=True)
class PushResult:
    """The outcome of a push, over all shards."""

    staleness: float
    """The mean over the shards."""
    waited_s: float
    """The longest wait for pushes of others at any shard."""
    pulled: PulledParams
    """The parameters of each shard after the push."""


class ShardsClient:
    """One group's client of all shards.

    Args:
        group: The number of the group.
        numel: Elements of the flat parameters.
        shares: How they are divided into shards.
        addresses: For each shard, where it may be, in order.
        token: The secret of the run.
        timeout_s: How long each server may take to answer.
        own_server: A connection that keeps a new server of this group alive while it has no shards yet.
    """

    def __init__(
        self,
        group: int,
        numel: int,
        shares: Shares,
        addresses: Sequence[Sequence[Address]],
        token: str,
        *,
        timeout_s: float = 30.0,
        own_server: Connection | None = None,
    ) -> None:
        self._group, self._own_server = group, own_server
        self._sizes = list(shares.cut(numel))
        self._clients = [ShardClient(group, shard, order, token, timeout_s) for shard, order in enumerate(addresses)]
        self._threads = ThreadPoolExecutor(max(1, len(addresses)), thread_name_prefix="mimatrix-shards-client")
        self._number = self._incarnation = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each shard."""
        return tuple(self._sizes)

    def join(self) -> None:
        """Continue after the last push that any shard has of this group; pushes of earlier processes are refused."""
        with self.hold() as cut:
            self._number, self._incarnation = cut.join(self._group)

    def hold(self, lease_s: float = 10.0) -> ConsistentCut:
        """Hold all shards for a moment; must not be called while a push of this group is in flight."""
        return ConsistentCut.hold([client.clone() for client in self._clients], lease_s)

    def pull(self) -> PulledParams:
        """Return the newest version of every shard."""
        return self._merge(self._request_all([client.pull for client in self._clients]))

    def push(
        self,
        gradient: torch.Tensor,
        samples: int,
        nominal_samples: int,
        hyperparameters: Sequence[Hyperparameters],
        base_versions: Sequence[int],
        without_grad: Collection[int] = (),
    ) -> PushResult:
        """Push a mean gradient to all shards and wait until all have applied it.

        Args:
            gradient: One value for each element of the flat parameters.
            samples: Samples in this push.
            nominal_samples: Samples of the group's usual pushes.
            hyperparameters: Of each parameter group.
            base_versions: The version of each shard that the gradient was computed on.
            without_grad: Parameters that had no gradient.
        """
        self._number += 1
        headers = [
            {
                "type": "push",
                "group": self._group,
                "number": self._number,
                "incarnation": self._incarnation,
                "samples": samples,
                "nominal_samples": nominal_samples,
                "base_version": version,
                "hyperparameters": list(map(dict, hyperparameters)),
                "without_grad": sorted(without_grad),
            }
            for version in base_versions
        ]
        parts = torch.split(gradient, self._sizes)
        requests = zip(self._clients, headers, parts, strict=True)
        replies = self._request_all([partial(client.push, header, part) for client, header, part in requests])
        staleness = [int(header["staleness"]) for header, _ in replies]
        waited_s = max(float(header["waited_s"]) for header, _ in replies)
        return PushResult(sum(staleness) / len(staleness), waited_s, self._merge(replies))

    def close(self) -> None:
        """Leave: tell the servers that this group is done, and close all connections."""
        for client in self._clients:
            client.close()
        if self._own_server:
            self._own_server.close()
        self._threads.shutdown(wait=True)

    def _request_all(self, requests: Sequence[Callable[[], ClientReply]]) -> list[ClientReply]:
        """Run all requests at once; if one fails, still wait for the others, since their connections are used again."""
        futures = [self._threads.submit(request) for request in requests]
        wait(futures)
        return [future.result() for future in futures]

    def _merge(self, replies: Sequence[ClientReply]) -> PulledParams:
        clocks = {int(group): int(pushes) for group, pushes in replies[0][0]["clocks"].items()}
        slowest = min(clocks, key=lambda group: clocks[group], default=self._group)
        return PulledParams(
            values=torch.cat([values for _, values in replies]),
            versions=tuple(int(header["version"]) for header, _ in replies),
            samples=min(int(header["samples"]) for header, _ in replies),
            lead=self._number - clocks.get(slowest, self._number),
            slowest_group=slowest,
        )
