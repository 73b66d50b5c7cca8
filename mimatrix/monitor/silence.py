"""Who does not come: the rank that others wait for inside of a collective, said in one sentence."""

from collections.abc import Sequence
from dataclasses import dataclass

from mimatrix.core.units import format_seconds
from mimatrix.monitor.figures import RankFigures

LATE_S = 8.0


@dataclass(frozen=True, slots=True)
class Hang:
    """One rank, and who waits for it."""

    rank: int
    place: str
    call: str
    round: int
    step: int
    since_s: float
    waits: tuple[int, ...]

    def __str__(self) -> str:
        who = ", ".join(map(str, self.waits[:8])) + (" and others" if len(self.waits) > 8 else "")
        ranks = f"rank {who} waits" if len(self.waits) == 1 else f"ranks {who} wait"
        return (
            f"rank {self.rank} on {self.place} has not come to {self.call}, round {self.round}, in step {self.step} "
            f"for {format_seconds(self.since_s)}; {ranks} for it"
        )


def hanging(ranks: Sequence[RankFigures], now_s: float, late_s: float = LATE_S) -> Hang | None:
    """Whom others wait for longest, who is not waiting for somebody else himself."""
    late = {each.rank: _waited_s(each, now_s) for each in ranks if each.awaited and _waited_s(each, now_s) >= late_s}
    free = {each.rank: each for each in ranks if each.rank not in late}
    if not late or not free:
        return None
    by_rank = {each.rank: each.awaited for each in ranks}
    for rank in sorted(late, key=lambda rank: -late[rank]):
        awaited = by_rank[rank]
        assert awaited
        culprit = free.get(awaited.peer) if awaited.peer is not None else min(free.values(), key=lambda each: each.at_s)
        if culprit:
            since_s = late[rank]
            return Hang(
                culprit.rank, culprit.place, awaited.call, awaited.round, culprit.step, since_s, tuple(sorted(late))
            )
    return None


def _waited_s(each: RankFigures, now_s: float) -> float:
    assert each.awaited
    return each.awaited.seconds + max(0.0, now_s - each.at_s)
