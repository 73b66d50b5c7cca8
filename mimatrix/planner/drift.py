"""Following how long ranks really take: when another split pays, it is found here.

Everything in here is what rank 0 decides by; what it hears are the seconds that each rank computed in a step, waiting
excluded. Speeds that drift, a neighbour on the same machine, a hot device: the batches follow.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mimatrix.collectives.shares import Shares
from mimatrix.planner.curve import Curve
from mimatrix.planner.plan import Plan
from mimatrix.planner.planning import Problem, make_plan, predicted
from mimatrix.planner.profile import Communication, ModelSize, Profile
from mimatrix.planner.split import Split

_SEEN, _MOST_SEEN = 3, 9
"""Steps whose median counts: one that was slow by chance changes nothing. More where speeds jump to and fro."""
_JUMP = 0.12
"""A change in speed beyond this is followed at once, a smaller one slowly."""
_SLOWLY = 0.3
_FORGIVES = 0.99
_OVERHEAD = 0.05
"""Of a micro-batch's time, what does not grow with it, where nothing was measured: few large ones are better."""
_LEAST_GAIN = 0.03
_CHANGE_STEPS = 0.5
"""What a change costs, in steps: memory of other sizes, kernels chosen anew."""
_FEW, _MANY = 3, 40
"""Steps for which a plan stays at least: at first, and where one change follows upon another, or none pays."""
_CALM = 20
"""Who changes again before so many steps, or twice as many as it had to wait, has followed what did not last."""
_SURELY, _SOON = 0.5, 8
"""A change in speed beyond the one is not kept waiting for more steps than the other."""


_COME_BY = 1.0
"""The part of a step that it may cost that ranks which came by in the loop go on doing so."""


@dataclass(frozen=True, slots=True)
class Keep:
    """The plan stays."""

    reason: str


@dataclass(frozen=True, slots=True)
class Change:
    """Another split, and why."""

    plan: Plan
    reason: str


class Drift:
    """What is known of the ranks' speeds beside what was measured before, as factors on that."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        # States stay where they are: another stage or other shares would move them.
        for_everyone = _COME_BY if all(plan.split.batches) else problem.for_everyone
        self._problem = replace(
            problem, stages=(plan.stage,), shares=plan.shares, may_leave_out=False, for_everyone=for_everyone
        )
        self.plan = plan
        self._recent = [deque[float](maxlen=_MOST_SEEN) for _ in plan.parts]
        self.factors = [1.0] * len(plan.parts)
        """How many times as long each rank takes as it was measured to."""
        self._known = list(self.factors)
        """The same, as the plan has it."""
        self._looked = list(self.factors)
        """The same, when another split was last looked for."""
        self._steps, self._patience = 0, _FEW
        """Since another split was last looked for, and how many there must be: more where that was in vain."""
        self._since, self._rest = _CALM, _FEW
        """The same since the last change, more where one followed upon another."""

    def observe(self, split: Split, busy_s: Sequence[float]) -> None:
        """A step has gone by: how long each rank computed its part of `split`."""
        if split != self.plan.split:
            return  # a partial batch, or one from before the last change
        self._steps += 1
        self._since += 1
        for rank, (sizes, took) in enumerate(zip(split.micro, busy_s, strict=True)):
            should = self._should(rank, sizes)
            if should > 0 and took > 0:
                self._recent[rank].append(took / should)
                seen = list(self._recent[rank])[-max(_SEEN, self._rest) :]
                self.factors[rank] = self._followed(self.factors[rank], statistics.median(seen))
            elif not sizes:
                # Who has nothing to do shows nothing: let it be tried again after a while.
                self.factors[rank] **= _FORGIVES

    def decide(self, steps_left: int | None = None) -> Keep | Change:
        """Whether another split pays, for as many steps as are left."""
        if self._moved(_JUMP):
            self._patience = _FEW
        rest = min(self._rest, _SOON) if self._moved(_SURELY) else self._rest
        if self._steps < max(_SEEN, self._patience) or self._since < rest:
            return Keep(f"the plan holds for {self._steps} steps only")
        if self._possible() < _LEAST_GAIN:
            return Keep("all ranks finish at nearly the same moment")
        now = self._problem_now()
        found = make_plan(now)
        before_s = predicted(now, self.plan.stage, self.plan.split, self.plan.shares)
        gain = 1 - found.step_s / before_s
        if gain < _LEAST_GAIN or (steps_left is not None and gain * steps_left < _CHANGE_STEPS):
            # What seems possible from afar is not: look again after longer and longer times.
            self._steps, self._patience, self._looked = 0, min(_MANY, 2 * self._patience), list(self.factors)
            return Keep(f"another split would gain {gain:.1%} of a step")
        return Change(found.following(self.plan.version + 1), self._because(before_s, found.step_s))

    def changed(self, plan: Plan) -> None:
        """Another plan holds from some step on."""
        calm = self._since >= max(_CALM, 2 * self._rest)
        self._rest = _FEW if calm else min(_MANY, 2 * self._rest)
        self.plan, self._steps, self._since, self._patience = plan, 0, 0, _FEW
        self._known = list(self.factors)
        self._looked = list(self.factors)
        for recent in self._recent:
            recent.clear()

    def _moved(self, much: float) -> bool:
        """Whether a rank's speed has changed so much since another split was last looked for."""
        return any(abs(math.log(now / then)) > much for now, then in zip(self.factors, self._looked, strict=True))

    def _should(self, rank: int, sizes: Sequence[int]) -> float:
        profile = self._problem.profiles[rank]
        return math.fsum(profile.seconds.at(size) + profile.handling_s[self.plan.stage] for size in sizes)

    def _followed(self, factor: float, seen: float) -> float:
        apart = math.log(seen / factor)
        return seen if abs(apart) > _JUMP else factor * math.exp(_SLOWLY * apart)

    def _possible(self) -> float:
        """The part of a step that would go if everybody finished at the same moment: the most there is to gain."""
        busy = [
            factor * self._should(rank, sizes)
            for rank, (factor, sizes) in enumerate(zip(self.factors, self.plan.split.micro, strict=True))
        ]
        rates = [self._best_rate(rank) / factor for rank, factor in enumerate(self.factors)]
        return 1 - self.plan.split.total / sum(rates) / max(busy)

    def _best_rate(self, rank: int) -> float:
        """Samples in a second, with the micro-batches that suit the rank best."""
        times = self._problem.profiles[rank].seconds.table[1:]
        handling = self._problem.profiles[rank].handling_s[self.plan.stage]
        return float(np.max(np.arange(1, len(times) + 1) / (times + handling)))

    def _problem_now(self) -> Problem:
        profiles = zip(self._problem.profiles, self.factors, strict=True)
        return replace(self._problem, profiles=tuple(profile.slowed(factor) for profile, factor in profiles))

    def _because(self, before_s: float, after_s: float) -> str:
        changed = [now / known for now, known in zip(self.factors, self._known, strict=True)]
        rank = max(range(len(changed)), key=lambda each: abs(math.log(changed[each])))
        why = f"rank {rank} takes {changed[rank]:.2f} times as long as the plan says, so a"
        if abs(math.log(changed[rank])) < _LEAST_GAIN:
            why = "by what ranks have taken so far a"  # nothing was measured before
        return f"{why} step would take {before_s * 1e3:.0f} ms and takes {after_s * 1e3:.0f} ms with another split"


def learned(busy_s: Sequence[float], split: Split, most: Sequence[int], stage: int, shares: Shares) -> Drift:
    """A beginning without measurements: from the seconds that each rank computed on its part of one split.

    Time is taken to grow with samples, nearly; what is wrong with that, the factors correct. No rank gets larger
    micro-batches than `most`, since nothing is known of memory.
    """
    rates = [took / sum(sizes) if sizes else 0.0 for took, sizes in zip(busy_s, split.micro, strict=True)]
    usual = statistics.median(rate for rate in rates if rate)
    profiles = tuple(_straight(rate or usual, limit) for rate, limit in zip(rates, most, strict=True))
    size = ModelSize("", "", 0, 0, 0, 0, 0)
    names = ("as seen",) * split.ranks
    free = Communication((0.0,) * 4)
    problem = Problem(split.total, size, profiles, names, lambda _: free, stages=(stage,), shares=shares)
    parts = make_plan(problem)
    return Drift(problem, replace(parts, split=split))


def _straight(rate_s: float, most: int) -> Profile:
    points = {size: rate_s * most * (_OVERHEAD + (1 - _OVERHEAD) * size / most) for size in (1, most)}
    nothing = Curve.of((size, 0.0) for size in points)
    return Profile("", "", Curve.of(points.items()), nothing, 1, 0.0)
