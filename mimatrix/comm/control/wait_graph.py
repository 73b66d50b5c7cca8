"""Who holds everybody up? Decided from what ranks say for whom they wait; no sockets, no clock of its own."""

from collections.abc import Collection
from dataclasses import dataclass, field

ANSWER_S = 1.0
"""How long a rank may take to say for whom it waits before it counts as stopped itself."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """The rank that everybody waits for, directly or not."""

    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class Query:
    """Ask these ranks for whom they wait."""

    ranks: tuple[int, ...]


@dataclass(slots=True)
class WaitGraphSearch:
    """Follows the waiting from the one complained about to one that waits for nobody, or is silent.

    Where whoever complains does not know for whom it waits, all are asked, and one that is silent is the one.
    """

    waited_s: float
    known: bool
    """Whether the complaint named a rank."""
    asked: list[int] = field(default_factory=list)
    silent: set[int] = field(default_factory=set)
    until_s: float = 0.0

    def start(self, suspects: Collection[int], now_s: float) -> Query:
        """Begin with these."""
        self.asked += suspects
        self.silent = set(suspects)
        self.until_s = now_s + ANSWER_S
        return Query(tuple(suspects))

    def answer(self, rank: int, waits_for: int | None, now_s: float) -> Culprit | Query | None:
        """A rank has answered."""
        if rank not in self.silent:
            return None
        self.silent.discard(rank)
        if not self.known:
            return None
        if waits_for is None or waits_for in self.asked:
            return Culprit(rank, f"it did not come for {self.waited_s:.1f} s")
        return self.start([waits_for], now_s)

    def overdue(self, now_s: float) -> Culprit | None:
        """Somebody has been silent for too long."""
        if now_s < self.until_s or not self.silent:
            return None
        return Culprit(min(self.silent), f"it did not come for {self.waited_s:.1f} s and does not answer")

    def is_over(self, now_s: float) -> bool:
        """Nothing more will come of it."""
        return now_s >= self.until_s and not self.silent
