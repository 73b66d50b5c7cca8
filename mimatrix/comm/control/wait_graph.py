"""Which rank blocks the others, found by following who waits for whom. No sockets, and no clock of its own."""

from collections.abc import Collection
from dataclasses import dataclass, field

ANSWER_S = 1.0
"""How long a rank may take to answer for whom it waits before it counts as stopped itself."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """The rank that all others wait for, directly or not."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class Query:
    """Ranks to be asked for whom they wait."""

    ranks: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class WaitGraphSearch:
    """A search that starts at the suspect of a complaint and ends at a rank that waits for no other or is silent.

    If the complaint does not name a suspect, all ranks are asked, and one that is silent is the culprit.
    """

    waited_s: float
    has_suspect: bool
    """Whether the complaint named a rank."""
    asked: list[int] = field(default_factory=list)
    silent: set[int] = field(default_factory=set)
    until_s: float = 0.0

    def start(self, suspects: Collection[int], now_s: float) -> Query:
        """Ask the suspects."""
        self.asked += suspects
        self.silent = set(suspects)
        self.until_s = now_s + ANSWER_S
        return Query(tuple(suspects))

    def answer(self, rank: int, waits_for: int | None, now_s: float) -> Culprit | Query | None:
        """Take a rank's answer and return what follows from it."""
        if rank not in self.silent:
            return None
        self.silent.discard(rank)
        if not self.has_suspect:
            return None
        if waits_for is None or waits_for in self.asked:
            return Culprit(rank, f"it did not come for {self.waited_s:.1f} s")
        return self.start([waits_for], now_s)

    def overdue(self, now_s: float) -> Culprit | None:
        """Return a rank that has been silent for too long, if there is one."""
        if now_s < self.until_s or not self.silent:
            return None
        return Culprit(min(self.silent), f"it did not come for {self.waited_s:.1f} s and does not answer")

    def is_over(self, now_s: float) -> bool:
        """Return whether the search has ended without a culprit."""
        return now_s >= self.until_s and not self.silent
