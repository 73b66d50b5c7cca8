"""A group's way to the shards: it pushes to all at once, pulls from all at once, and goes on where one is lost."""

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


@dataclass(frozen=True, slots=True)
class PulledParams:
    """All parameters, each shard of one version."""

    values: torch.Tensor
    versions: tuple[int, ...]
    samples: int
    """That all groups together have pushed; of the shard that has the fewest."""
    ahead: int = 0
    """Pushes by which this group is ahead of the last one that is there."""
    last: int = -1
    """That one."""


@dataclass(frozen=True, slots=True)
class PushResult:
    """What became of a push, over all shards."""

    staleness: float
    """A mean."""
    waited_s: float
    """At the shard that was busiest with pushes of others."""
    pulled: PulledParams
    """As each shard is after it."""


class ShardsClient:
    """Of one group. `places` has for each shard where it may be, in their order.

    `beside`: a service of this group's that has no shards yet, and stays as long as the group is there.
    """

    def __init__(
        self,
        group: int,
        count: int,
        shares: Shares,
        places: Sequence[Sequence[Address]],
        token: str,
        *,
        timeout_s: float = 30.0,
        beside: Connection | None = None,
    ) -> None:
        self._group, self._beside = group, beside
        self._sizes = list(shares.cut(count))
        self._lines = [ShardClient(group, number, found, token, timeout_s) for number, found in enumerate(places)]
        self._threads = ThreadPoolExecutor(max(1, len(places)), thread_name_prefix="mimatrix-link")
        self._number = self._life = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each shard."""
        return tuple(self._sizes)

    def join(self) -> None:
        """Go on after the last push that any shard had of this group, whichever process it came from.

        From now on pushes of earlier ones are refused.
        """
        with self.holding() as held:
            self._number, self._life = held.join(self._group)

    def holding(self, lease_s: float = 10.0) -> ConsistentCut:
        """All shards, to be held for a moment; not while a push of this group is under way."""
        return ConsistentCut([line.another() for line in self._lines], lease_s)

    def pull(self) -> PulledParams:
        """The newest of every shard."""
        return self._whole(self._from_all([line.pull for line in self._lines]))

    def _from_all(self, asks: Sequence[Callable[[], ClientReply]]) -> list[ClientReply]:
        """What all lines answer; where one fails, not before the others are through: they are used again."""
        under_way = [self._threads.submit(ask) for ask in asks]
        wait(under_way)
        return [each.result() for each in under_way]

    def _whole(self, found: Sequence[ClientReply]) -> PulledParams:
        versions = tuple(int(head["version"]) for head, _ in found)
        samples = min(int(head["samples"]) for head, _ in found)
        clocks = {int(group): int(pushes) for group, pushes in found[0][0]["clocks"].items()}
        last = min(clocks, key=lambda group: clocks[group], default=self._group)
        ahead = self._number - clocks.get(last, self._number)
        return PulledParams(torch.cat([values for _, values in found]), versions, samples, ahead, last)

    def push(
        self,
        gradient: torch.Tensor,
        samples: int,
        nominal: int,
        settings: Sequence[Hyperparameters],
        seen: Sequence[int],
        untouched: Collection[int] = (),
    ) -> PushResult:
        """The mean gradient of so many samples, at parameters of the versions `seen`. Back when all shards have it."""
        self._number += 1
        heads = [
            {
                "what": "push",
                "group": self._group,
                "number": self._number,
                "life": self._life,
                "samples": samples,
                "nominal": nominal,
                "seen": version,
                "settings": list(map(dict, settings)),
                "untouched": sorted(untouched),
            }
            for version in seen
        ]
        parts = torch.split(gradient, self._sizes)
        whole = zip(self._lines, heads, parts, strict=True)
        answers = self._from_all([partial(line.push, head, part) for line, head, part in whole])
        late = [int(head["staleness"]) for head, _ in answers]
        waited_s = max(float(head["waited_s"]) for head, _ in answers)
        return PushResult(sum(late) / len(late), waited_s, self._whole(answers))

    def close(self) -> None:
        """Say goodbye."""
        for line in self._lines:
            line.close()
        if self._beside:
            self._beside.close()
        self._threads.shutdown(wait=True)
