"""Find the rank for which the others wait in every step, how long they wait, and the likely reason.

Compute times have no waiting in them, so that a slow rank can be told from one that waits. A rank is named when it
stays behind for some time: one slow step says nothing.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mimatrix.core.units import format_seconds
from mimatrix.monitor.rank_metrics import RankFigures

LEAST = 0.3
"""How far a rank must lag behind to be named, relative to the others' time."""
_COSTS = 2 / 3
"""The part of that which it must be of the whole step: a fifth."""
_GOES = 0.15
"""Below this it is no longer named."""
PERSISTS_S = 4.0
_TIMES = 4
"""Reports that say so, at least."""
_FULL = 0.97
_LINK = 0.5
"""The part of a step that moving data must take for a link to be the reason."""
_LEAST_STEP_S = 1e-3
"""Shorter steps are all overhead."""
_FIRST = 3
"""The steps before are for compiling, and for finding the batch that fits into memory."""
_ALIKE = 0.9
"""A rank that takes this part of the longest time is slow with the slowest."""


class StragglerCause(StrEnum):
    """Why a rank is slow."""

    COMPUTE = "compute"
    LOADER = "loader"
    MEMORY = "memory"
    LINK = "link"


_ADVICE = {
    StragglerCause.LOADER: "it waits for its loader; give it more loader workers or a faster disk",
    StragglerCause.MEMORY: "its memory is full; a smaller micro-batch may be faster",
    StragglerCause.LINK: "data come and go slowly on its link",
}


@dataclass(frozen=True, slots=True)
class Straggler:
    """One rank, and what it costs in each step."""

    rank: int
    device: str
    lost_s: float
    part: float
    """Of the step."""
    cause: StragglerCause
    follows: bool
    """Whether its batch follows its speed."""
    also: tuple[int, ...] = ()
    """Ranks that take nearly as long."""

    def describe(self) -> str:
        """Return one sentence for people."""
        follow = "its batch will shrink" if self.follows else 'plan="profile" or "online" would give it less'
        what = _ADVICE.get(self.cause, f"its compute takes longer; {follow}")
        who = f"rank {self.rank} on {self.device}" + (f" and {_counted(self.also)}" if self.also else "")
        lost = f"{format_seconds(self.lost_s)} ({self.part:.0%}) of every step"
        return f"the others are idle because of {who}: {lost}; {what}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "rank": self.rank,
            "device": self.device,
            "lost_s": self.lost_s,
            "part": self.part,
            "cause": self.cause.value,
            "also": list(self.also[:_SHOWN]),
        }


_SHOWN = 16


def find_straggler(ranks: Sequence[RankFigures], least: float = LEAST, followed: int | None = None) -> Straggler | None:
    """Return the rank that the others wait for, if one stands out; the one `followed` if it is nearly so."""
    working = [each for each in ranks if each.busy_s > 0 and each.step_s >= _LEAST_STEP_S and each.step >= _FIRST]
    if len(working) < 2:
        return None
    worst = max(working, key=lambda each: each.busy_s)
    alike = [each for each in working if each.busy_s >= _ALIKE * worst.busy_s]
    worst = next((each for each in alike if each.rank == followed), worst)
    others = [each for each in working if each is not worst]
    # Those that wait are the fast ones: where half of all ranks are slow, the middle one is.
    usual_s = sorted(each.busy_s for each in others)[(len(others) - 1) // 4]
    lost_s = worst.busy_s - usual_s
    if lost_s > least * usual_s and lost_s > _COSTS * least * worst.step_s:
        also = tuple(each.rank for each in alike if each is not worst)
        cause = _cause(worst, [each for each in others if each.rank not in also], lost_s)
        return Straggler(worst.rank, worst.device, lost_s, lost_s / worst.step_s, cause, worst.follows, also)
    return _by_link(working)


def _counted(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} more"


def _cause(worst: RankFigures, others: Sequence[RankFigures], lost_s: float) -> StragglerCause:
    if worst.data_s - statistics.median(each.data_s for each in others) > lost_s / 2:
        return StragglerCause.LOADER
    return StragglerCause.MEMORY if worst.memory_full >= _FULL else StragglerCause.COMPUTE


def _by_link(working: Sequence[RankFigures]) -> Straggler | None:
    """Return the rank that waits least, where computing is short and moving data takes long on it."""
    last = min(working, key=lambda each: each.waiting_s)
    others = [each for each in working if each is not last]
    lost_s = statistics.median(each.waiting_s for each in others) - last.waiting_s
    moves = last.communication_s / last.step_s
    if moves > _LINK and lost_s > LEAST * last.step_s:
        return Straggler(last.rank, last.device, lost_s, lost_s / last.step_s, StragglerCause.LINK, last.follows)
    return None


class StragglerTracker:
    """Follows ranks that wait for each other: names one that stays behind, until it has caught up."""

    def __init__(self) -> None:
        self.named: Straggler | None = None
        self._rank = -1
        self._since_s = 0.0
        self._said: set[float] = set()
        """Times of the reports that said so."""

    def observe(self, now_s: float, ranks: Sequence[RankFigures]) -> Straggler | None:
        """Take in current figures; return the rank if they name it for the first time."""
        found = find_straggler(ranks, _GOES if self.named else LEAST, self._rank)
        if found is None or found.rank != self._rank:
            self._rank, self._since_s, self._said = (found.rank if found else -1), now_s, set()
        self._said |= {each.at_s for each in ranks if each.rank == self._rank}
        if found is None or (self.named and found.rank != self.named.rank):
            self.named = None
        stays = found is not None and len(self._said) >= _TIMES and now_s - self._since_s >= PERSISTS_S
        is_new = stays and self.named is None
        if stays:
            self.named = found
        return found if is_new else None
