"""The best batches, micro-steps and shares of one stage, jointly."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Protocol

import numpy as np

from mimatrix.planner.search.cost_tables import SLACK, Floats, Integers, Tables
from mimatrix.planner.search.exhaustive import all_caps
from mimatrix.planner.search.independent import Alone, Found, Micro
from mimatrix.planner.search.lockstep import Together
from mimatrix.planner.search.relaxations import AloneAttempts, Attempt, TogetherAttempts
from mimatrix.planner.search.water_filling import least_stepping, share_out

# Near enough to what is possible at all: small problems, where trying everything is quick, and large ones.
_CLOSE = 1e-4
_NEAR = 5e-3
_SURELY = 1e-9
# How often the search may try, and what that is worth in entries of tables: large problems try less often.
_TRIES = 24
_ENTRIES = 400_000
# Up to so many entries single steps are tried where the bound is not reached.
_SMALL = 1_000


@dataclass(frozen=True)
class Choice:
    """How a stage would best be run."""

    micro: Micro
    shares: tuple[float, ...]
    seconds: float
    """Of computing and rounds; what is paid once a step is not in it."""
    bound_s: float
    """No other choice takes less."""


class Work(Protocol):
    """A way to compute a global batch, together or alone."""

    def best(self, caps: Integers) -> Found:
        """With micro-batches of at most `caps`."""


def with_shares(work: Work, tables: Tables, shares: Floats, stepping_s: float) -> Choice:
    """Shares are given, and the optimizer's step takes `stepping_s` with them. There must be room."""
    found = work.best(tables.caps_beside(shares))
    return Choice(found.micro, tuple(shares.tolist()), found.seconds + stepping_s, found.bound_s + stepping_s)


def choose(work: Alone | Together, tables: Tables, below_s: float = np.inf, beaten_s: float = np.inf) -> Choice | None:
    """The best batches, micro-steps and shares; None where it is soon seen that they take `below_s` or longer.

    Nor are they looked for to the end once it is sure that they take `beaten_s` or longer: what was found until then
    is good enough to say so. There must be room for the states and for one sample.
    """
    free = work.best(tables.caps)
    search = _Search(work, tables, free.bound_s)
    least_s = search.stepping(np.zeros(tables.ranks, np.int64))
    choice = replace(search.tried(free, used(free.micro)), bound_s=free.bound_s + least_s)
    if choice.bound_s >= below_s:
        return None
    # Without memory in the way computing and stepping are shortest at once, and there is nothing to trade.
    if _is_near(choice, _CLOSE) or choice.seconds <= free.seconds + least_s * (1 + _SURELY):
        return choice
    tried = all_caps(work, tables)
    if tried is not None:
        found = search.tried(work.best(tried.caps), tried.caps)
        choice = replace(min(choice, found, key=_seconds), bound_s=max(choice.bound_s, tried.bound_s))
    if _is_near(choice, _NEAR if tried is None else _CLOSE):
        return choice
    return search.trading(choice, least_s, min(below_s, beaten_s))


def _seconds(choice: Choice) -> float:
    return choice.seconds


def used(micro: Micro) -> Integers:
    """The largest micro-batch of each rank."""
    return np.array([max(sizes, default=0) for sizes in micro])


def _is_near(choice: Choice, close: float) -> bool:
    return choice.seconds <= choice.bound_s * (1 + close)


class _Search:
    """Trades room for activations against room for states.

    The longer the optimizer's step may take, the more a rank may own, and the more the others may compute at once. So
    computing takes the less, the more time tau there is for stepping; between two values of tau no choice can be
    better than the lower one with the computing of the upper one. Intervals are cut until that is near enough.
    """

    def __init__(self, work: Alone | Together, tables: Tables, free_s: float) -> None:
        self.work = work
        self.tables = tables
        self.optimizer_s = tables.optimizer_s[tables.kind_of]
        self.hold = tables.hold[tables.kind_of]
        self._known: dict[bytes, Choice] = {}
        self._tries = int(np.clip(_ENTRIES // self.hold.size, 3, _TRIES))
        self._free_s = free_s

    @cached_property
    def _attempts(self) -> Callable[[Floats], Attempt]:
        if isinstance(self.work, Alone):
            return AloneAttempts(self.work, self.tables, self._free_s)
        return TogetherAttempts(self.work, self.tables)

    def stepping(self, caps: Integers) -> float:
        """The shortest step of the optimizer beside micro-batches of `caps`; infinite where there is no room."""
        return float(least_stepping(self.tables.held(caps)[None], self.optimizer_s)[0])

    def tried(self, found: Found, caps: Integers) -> Choice:
        """With the best shares that there is room for beside `caps`; infinitely long where there is none."""
        stepping_s = self.stepping(np.minimum(caps, used(found.micro)))
        if not np.isfinite(stepping_s):
            return Choice(found.micro, (), np.inf, 0.0)
        shares = share_out(self.tables.held(used(found.micro)), self.optimizer_s)
        return Choice(found.micro, tuple(shares.tolist()), found.seconds + stepping_s, 0.0)

    def trading(self, best: Choice, least_s: float, beaten_s: float) -> Choice:
        """The best that is found, with the bound that is proven; no longer than until that is `beaten_s`."""
        order, proven = count(), best.bound_s
        unbound = self._attempt_at(np.inf)
        best = self._better(best, unbound.caps)
        best = self._better(best, self._attempt_at(least_s).caps)
        if not np.isfinite(best.seconds):
            best = self._better(best, self._single())
        computing = max(self._free_s, unbound.bound_s)
        spans = [(least_s + computing, next(order), least_s, max(least_s, best.seconds - computing), computing)]
        for _ in range(self._tries):
            bound, _, low, high, computing = spans[0]
            if best.seconds <= bound * (1 + _NEAR) or high - low <= 1e-6 * bound or bound >= beaten_s:
                break
            heapq.heappop(spans)
            middle = (low + high) / 2 if high < 4 * low else float(np.sqrt(low * high))
            attempt = self._attempt_at(middle)
            best = self._better(best, attempt.caps)
            heapq.heappush(spans, (low + max(computing, attempt.bound_s), next(order), low, middle, attempt.bound_s))
            heapq.heappush(spans, (middle + computing, next(order), middle, high, computing))
        bound = max(proven, spans[0][0])
        if bound * (1 + _NEAR) < min(best.seconds, beaten_s) and self.hold.size < _SMALL:
            best = self._improved(best)
        return replace(best, bound_s=min(best.seconds, bound))

    def _improved(self, best: Choice) -> Choice:
        """With single steps up and down, and steps up of one rank and down of another, while they help."""
        steps = np.eye(self.tables.ranks, dtype=np.int64)
        moves = [*steps, *-steps, *(up - down for up in steps for down in steps if up is not down)]
        for _ in range(_TRIES):
            caps = used(best.micro)
            near = [np.clip(caps + move, 0, self.tables.caps) for move in moves]
            better = self._better(best, tuple(each for each in near if np.isfinite(self.stepping(each))))
            if better is best:
                break
            best = better
        return best

    def _attempt_at(self, tau: float) -> Attempt:
        return self._attempts(np.minimum(self.tables.hold, tau / self.tables.optimizer_s[:, None]))

    def _single(self) -> tuple[Integers, ...]:
        """One rank does everything and the others hold what they can: where room is short that may be all there is."""
        beside = np.maximum(self.hold[:, 0], 0.0)
        tries = []
        for rank in np.argsort(-self.tables.caps, kind="stable")[: self._tries]:
            fits = self.hold[rank] + beside.sum() - beside[rank] >= 1.0 - SLACK
            caps = np.zeros(self.tables.ranks, np.int64)
            caps[rank] = int((fits & (self.hold[rank] >= 0)).sum()) - 1
            if caps[rank] > 0:
                tries.append(caps)
        return tuple(tries)

    def _better(self, best: Choice, tries: tuple[Integers, ...]) -> Choice:
        for caps in tries:
            if caps.tobytes() not in self._known and caps.any():
                self._known[caps.tobytes()] = self.tried(self.work.best(caps), caps)
                best = min(best, self._known[caps.tobytes()], key=_seconds)
        return best
