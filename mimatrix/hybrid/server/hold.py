"""Holds on pushes, so that a client can copy all shards with the same pushes applied. No torch here."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from mimatrix.hybrid.server.push_log import Push, PushLog


@dataclass
class ShardHold:
    """One client's hold on a shard. It expires by itself, so a client that died blocks pushes only briefly."""

    owner: object
    expires_s: float
    admitted: Mapping[int, int] = field(default_factory=dict)
    """The last push of each group that other shards have applied; pushes up to it must be applied here, too."""

    @property
    def remaining_s(self) -> float:
        """The time until the hold expires."""
        return max(0.0, self.expires_s - time.monotonic())

    def admits(self, push: Push, log: PushLog) -> bool:
        """Return whether a push may pass: other shards have it, or it is a duplicate that only needs its outcome."""
        return push.number <= max(self.admitted.get(push.group, 0), log.pushes.get(push.group, 0))


def missing_pushes(admitted: Mapping[int, int], log: PushLog) -> dict[int, int]:
    """Return the groups whose pushes up to `admitted` are not all in the log, with the last number of each."""
    return {group: number for group, number in admitted.items() if log.pushes.get(group, 0) < number}


def latest_pushes(logs: Sequence[PushLog]) -> dict[int, int]:
    """Return the last push of each group that any shard has applied."""
    groups = {group for log in logs for group in log.pushes}
    return {group: max(log.pushes.get(group, 0) for log in logs) for group in sorted(groups)}


def resolve_join(group: int, logs: Sequence[PushLog], connected: Collection[int]) -> tuple[int, int]:
    """Return the push number after which a joining group continues, and its incarnation.

    A group that rejoins starts level with the slowest connected group, or the others would have to wait for it.
    """
    incarnation = 1 + max(log.incarnations.get(group, 0) for log in logs)
    clocks = latest_pushes(logs)
    others = [clocks.get(other, 0) for other in connected if other != group]
    return max(clocks.get(group, 0), min(others, default=0) if incarnation > 1 else 0), incarnation
