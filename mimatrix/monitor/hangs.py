"""Find the rank that does not enter a collective in which others wait for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mimatrix.core.units import format_seconds
from mimatrix.monitor.rank_metrics import RankFigures

LATE_S, ASIDE_S = 8.0, 60.0
"""Waits that are too long: in a step, and where a rank evaluates or saves."""
_SHOWN = 16


@dataclass(frozen=True, slots=True)
class Hang:
    """One rank, and those that wait for it."""

    rank: int
    device: str
    call: str
    round: int
    step: int
    since_s: float
    waits: tuple[int, ...]

    def describe(self) -> str:
        """Return one sentence for people."""
        who = ", ".join(map(str, self.waits[:8])) + (" and others" if len(self.waits) > 8 else "")
        ranks = f"rank {who} waits" if len(self.waits) == 1 else f"ranks {who} wait"
        return (
            f"rank {self.rank} on {self.device} has not entered {self.call}, round {self.round}, in step {self.step} "
            f"for {format_seconds(self.since_s)}; {ranks} for it"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "rank": self.rank,
            "device": self.device,
            "call": self.call,
            "round": self.round,
            "step": self.step,
            "since_s": self.since_s,
            "waits": list(self.waits[:_SHOWN]),
        }


def find_hang(ranks: Sequence[RankFigures]) -> Hang | None:
    """Return the rank that others wait for longest and that does not itself wait for another.

    Only what ranks say counts: one that was stopped said last, perhaps, that it waits for a moment.
    """
    late_s = ASIDE_S if any(each.aside for each in ranks) else LATE_S
    late = {each.rank: each.awaited for each in ranks if each.awaited and each.awaited.seconds >= late_s}
    free = {each.rank: each for each in ranks if each.rank not in late}
    for awaited in sorted(late.values(), key=lambda each: -each.seconds) if free else ():
        culprit = free.get(awaited.peer) if awaited.peer is not None else min(free.values(), key=lambda each: each.at_s)
        if culprit:
            waits = tuple(sorted(late))
            return Hang(culprit.rank, culprit.device, awaited.call, awaited.round, culprit.step, awaited.seconds, waits)
    return None
