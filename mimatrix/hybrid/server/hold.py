"""Pushes held back for a moment, so that all shards can be looked at with the same pushes in them. No torch here."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from mimatrix.hybrid.server.push_log import Push, PushLog


@dataclass
class ShardHold:
    """By one who looks at a shard. It ends by itself: whoever has died holds nobody up for long."""

    owner: object
    until_s: float
    upto: Mapping[int, int] = field(default_factory=dict)
    """The pushes of each group that other shards have already: they must come in here, too."""

    @property
    def left_s(self) -> float:
        """How long it lasts at most."""
        return max(0.0, self.until_s - time.monotonic())

    def lets(self, push: Push, ledger: PushLog) -> bool:
        """Whether a push may come in: one that others have, or that came before and only wants to be told so."""
        return push.number <= max(self.upto.get(push.group, 0), ledger.pushes.get(push.group, 0))


def missing_pushes(upto: Mapping[int, int], ledger: PushLog) -> dict[int, int]:
    """Of the groups that have not all their pushes in a shard, the number that should be the last."""
    return {group: number for group, number in upto.items() if ledger.pushes.get(group, 0) < number}


def latest_pushes(ledgers: Sequence[PushLog]) -> dict[int, int]:
    """The last push of each group that any shard has: what is in one must come into all."""
    groups = {group for ledger in ledgers for group in ledger.pushes}
    return {group: max(ledger.pushes.get(group, 0) for ledger in ledgers) for group in sorted(groups)}


def resolve_join(group: int, ledgers: Sequence[PushLog], there: Collection[int]) -> tuple[int, int]:
    """After which number a group that comes goes on, and which of its lives it is.

    One that returns is where the last of those is who are there, or they would have to wait for it.
    """
    life = 1 + max(ledger.lives.get(group, 0) for ledger in ledgers)
    clocks = latest_pushes(ledgers)
    others = [clocks.get(other, 0) for other in there if other != group]
    return max(clocks.get(group, 0), min(others, default=0) if life > 1 else 0), life
