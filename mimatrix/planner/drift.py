"""Follow how long ranks really take, and find another split when that pays.

Rank 0 decides with it, from the seconds that each rank was busy in a step, waiting excluded. Speeds drift, a neighbour
on the same machine starts or ends, a device gets hot: the batches follow. They do not follow noise. A change needs
seconds of evidence, more if it gains little, and twice as much after each change that took back the one before.
No clock is read: time is what the slowest rank was busy.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mimatrix.collectives.shares import Shares
from mimatrix.planner.model.curve import Curve, Floats
from mimatrix.planner.model.plan import Plan
from mimatrix.planner.model.problem import FixedCommunication, Problem
from mimatrix.planner.model.profile import Communication, ModelSize, Profile
from mimatrix.planner.model.split import Split
from mimatrix.planner.planner import make_plan
from mimatrix.planner.pricing import predict_step_s

_INTERVAL_S = 0.1
"""Short steps are summarised by their median until they have lasted this long; a longer step counts by itself."""
_LEVELS = ((4.0, 8, 0.03), (2.0, 5, 0.1), (1.0, 3, 0.3))
"""Evidence for a change in seconds and intervals, and the least part of a step that it must gain: less needs more."""
_SUPPORT = 0.85
"""The part of the intervals in which other batches must have been faster: what gains less than the noise is left."""
_MAX_REVERSALS = 4
_CALM_S, _CALM_INTERVALS = 20.0, 40
"""After this without a change one reversal is forgotten; after twice as much where there were two, and so on."""
_MAX_INTERVALS = round(_LEVELS[0][0] / _INTERVAL_S) << _MAX_REVERSALS
_JUMP = 0.12
"""A change in speed beyond this makes it worth searching again."""
_SEARCH_S, _VAIN_S, _MAX_VAIN_S = 0.3, 1.0, 20.0
"""Least time between two searches; after one in vain, more and more of it unless speeds change."""
_FORGIVES = 0.99
_OVERHEAD = 0.05
"""The part of a micro-batch's time that does not grow with it, if nothing was measured: few large ones are better."""
_LEAST_GAIN = _LEVELS[0][2]
_CHANGE_STEPS = 0.5
"""What a change costs, in steps: memory of other sizes, kernels chosen again."""
_EVERY_RANK = 1.0
"""The part of a step that it may cost that every rank keeps some samples."""


@dataclass(frozen=True, slots=True)
class Keep:
    """The plan stays."""

    reason: str


@dataclass(frozen=True, slots=True)
class Change:
    """Another split, and why."""

    plan: Plan
    reason: str


class _Evidence:
    """How many times as long as it should each rank took, by intervals of at least `_INTERVAL_S`, the newest last."""

    def __init__(self) -> None:
        self._intervals = deque[tuple[float, Floats]](maxlen=_MAX_INTERVALS)
        self._steps: list[Sequence[float]] = []
        self._steps_s = 0.0

    def add(self, factors: Sequence[float], step_s: float) -> float:
        """Add a step; return the seconds of the interval that ends with it, or 0."""
        self._steps.append(factors)
        self._steps_s += step_s
        if self._steps_s < _INTERVAL_S:
            return 0.0
        interval_s = self._steps_s
        self._intervals.append((interval_s, np.median(self._steps, axis=0)))
        self._steps, self._steps_s = [], 0.0
        return interval_s

    def newest(self, seconds: float, count: int) -> Floats | None:
        """Return the newest intervals, a row each, that make up both; None if there are too few."""
        rows: list[Floats] = []
        for interval_s, factors in reversed(self._intervals):
            rows.append(factors)
            seconds -= interval_s
            if seconds <= 0 and len(rows) >= count:
                return np.array(rows)
        return None

    def clear(self) -> None:
        """Forget everything: another split holds."""
        self._intervals.clear()
        self._steps, self._steps_s = [], 0.0


class Drift:
    """The ranks' speeds while training, as factors on what was measured before.

    Args:
        problem: What the plan was made from.
        plan: The plan in force.
        is_measured: Whether speeds were measured before training, so that a change can be explained by them.
    """

    def __init__(self, problem: Problem, plan: Plan, *, is_measured: bool = True) -> None:
        # States stay where they are: another stage or other shares would move them.
        min_one_sample_slack = _EVERY_RANK if all(plan.split.batches) else problem.min_one_sample_slack
        self._problem = replace(
            problem,
            stages=(plan.stage,),
            shares=plan.shares,
            may_leave_out=False,
            min_one_sample_slack=min_one_sample_slack,
        )
        self.plan = plan
        self.factors = [1.0] * len(plan.parts)
        """How many times as long each rank takes as it was measured to."""
        self._planned_factors = list(self.factors) if is_measured else None
        """The same, as the plan has it."""
        self._searched_factors = list(self.factors)
        """The same, when another split was last searched."""
        self._evidence, self._is_due = _Evidence(), False
        self._should_s = self._busy_of(plan.split)
        self._best_rates = np.array([self._best_rate(rank) for rank in range(len(plan.parts))])
        self._since_search_s, self._patience_s = math.inf, 0.0
        self._last_move: Floats | None = None
        """By how many samples the last change moved the batches."""
        self._reversals = 0
        """Changes that took back the one before, less those that were forgotten."""
        self._calm_s, self._calm_intervals = 0.0, 0

    def observe(self, split: Split, busy_s: Sequence[float]) -> None:
        """Add a step: how long each rank was busy with its part of `split`."""
        if split != self.plan.split:
            return  # a partial batch, or one from before the last change
        step_s = max(busy_s)
        factors = [
            took / should if should > 0 and took > 0 else factor
            for took, should, factor in zip(busy_s, self._should_s, self.factors, strict=True)
        ]
        interval_s = self._evidence.add(factors, step_s)
        self._forgive_idle_ranks(step_s)
        if interval_s:
            self._is_due = True
            self._since_search_s += interval_s
            self._calm_s += interval_s
            self._calm_intervals += 1
            self._forget_reversals()

    def decide(self, steps_left: int | None = None) -> Keep | Change:
        """Decide whether another split pays for the steps that are left."""
        if not self._is_due:
            return Keep("nothing was added to the evidence")
        self._is_due = False
        times = 2**self._reversals
        reason = "there is too little evidence, or all ranks finish at nearly the same moment"
        for seconds, count, least_gain in _LEVELS:
            rows = self._evidence.newest(times * seconds, times * count)
            if rows is None:
                continue
            self._estimate(rows)
            if self._possible_gain() < least_gain:
                continue
            support = self._support(rows)
            if support < _SUPPORT:
                reason = f"other batches would have been faster in {support:.0%} of the time only"
            elif self._may_search():
                decision = self._search(least_gain, steps_left)
                if isinstance(decision, Change):
                    return decision
                reason = decision.reason
        return Keep(reason)

    def predict_best(self) -> tuple[float, float]:
        """Return the seconds of a step with the plan, and with the best split, by the speeds that ranks have shown."""
        now = self._problem_now()
        return predict_step_s(now, self.plan.stage, self.plan.split, self.plan.shares), make_plan(now).step_s

    def changed(self, plan: Plan) -> None:
        """Note that another plan holds from now on."""
        move = np.array(plan.split.batches) - np.array(self.plan.split.batches)
        if self._last_move is not None and float(move @ self._last_move) < 0:
            self._reversals = min(_MAX_REVERSALS, self._reversals + 1)
        self._last_move = move
        self._calm_s, self._calm_intervals = 0.0, 0
        self.plan, self._should_s = plan, self._busy_of(plan.split)
        self._planned_factors, self._searched_factors = list(self.factors), list(self.factors)
        self._patience_s = 0.0
        self._evidence.clear()

    def _search(self, least_gain: float, steps_left: int | None) -> Keep | Change:
        now = self._problem_now()
        best = make_plan(now)
        before_s = predict_step_s(now, self.plan.stage, self.plan.split, self.plan.shares)
        gain = 1 - best.step_s / before_s
        self._since_search_s, self._searched_factors = 0.0, list(self.factors)
        pays = steps_left is None or gain * steps_left >= _CHANGE_STEPS
        if gain < least_gain or not pays:
            # Samples and micro-batches are whole: what seems possible may not be.
            in_vain = gain < _LEAST_GAIN or not pays
            self._patience_s = min(_MAX_VAIN_S, max(_VAIN_S, 2 * self._patience_s)) if in_vain else _SEARCH_S
            return Keep(f"another split would gain {gain:.1%} of a step")
        return Change(best.with_version(self.plan.version + 1), self._because(before_s, best.step_s))

    def _may_search(self) -> bool:
        has_jumped = any(
            abs(math.log(now / then)) > _JUMP for now, then in zip(self.factors, self._searched_factors, strict=True)
        )
        return self._since_search_s >= (min(_SEARCH_S, self._patience_s) if has_jumped else self._patience_s)

    def _estimate(self, rows: Floats) -> None:
        """Set the factors to the medians over some intervals; those of ranks without samples stay."""
        medians = np.median(rows, axis=0)
        for rank, sizes in enumerate(self.plan.split.micro):
            if sizes:
                self.factors[rank] = float(medians[rank])

    def _possible_gain(self) -> float:
        """Return the part of a step that would go if all ranks finished at the same moment: the most to be gained."""
        return 1 - self._balanced_s() / float(np.max(np.array(self.factors) * self._should_s))

    def _support(self, rows: Floats) -> float:
        """Return the part of the intervals in which batches that fit the factors would have been faster."""
        before_s = np.max(rows * self._should_s, axis=1)
        busy = np.array([bool(sizes) for sizes in self.plan.split.micro])
        after_s = self._balanced_s() * np.max((rows / np.array(self.factors))[:, busy], axis=1)
        return float(np.mean(after_s < before_s))

    def _balanced_s(self) -> float:
        """Return how long a step would take if all ranks finished at the same moment."""
        return self.plan.split.total / float(np.sum(self._best_rates / np.array(self.factors)))

    def _forgive_idle_ranks(self, step_s: float) -> None:
        """Let ranks without samples, which show nothing, be tried again after a while: later if that was in vain."""
        power = _FORGIVES ** (min(1.0, step_s / _INTERVAL_S) / 2**self._reversals)
        for rank, sizes in enumerate(self.plan.split.micro):
            if not sizes:
                self.factors[rank] **= power

    def _forget_reversals(self) -> None:
        times = 2**self._reversals
        if self._reversals and self._calm_s >= times * _CALM_S and self._calm_intervals >= times * _CALM_INTERVALS:
            self._reversals -= 1
            self._calm_s, self._calm_intervals = 0.0, 0

    def _busy_of(self, split: Split) -> Floats:
        """Return how long each rank should be busy with its part, as it was measured."""
        handling = [profile.handling_s[self.plan.stage] for profile in self._problem.profiles]
        return np.array(
            [
                math.fsum(profile.seconds.at(size) + each_s for size in sizes)
                for profile, each_s, sizes in zip(self._problem.profiles, handling, split.micro, strict=True)
            ]
        )

    def _best_rate(self, rank: int) -> float:
        """Return samples per second, with the micro-batches that suit the rank best."""
        times = self._problem.profiles[rank].seconds.table[1:]
        handling = self._problem.profiles[rank].handling_s[self.plan.stage]
        return float(np.max(np.arange(1, len(times) + 1) / (times + handling)))

    def _problem_now(self) -> Problem:
        profiles = zip(self._problem.profiles, self.factors, strict=True)
        return replace(self._problem, profiles=tuple(profile.slowed(factor) for profile, factor in profiles))

    def _because(self, before_s: float, after_s: float) -> str:
        why = "by what ranks have taken so far a"
        if self._planned_factors:
            changed = [now / planned for now, planned in zip(self.factors, self._planned_factors, strict=True)]
            rank = max(range(len(changed)), key=lambda each: abs(math.log(changed[each])))
            why = f"rank {rank} takes {changed[rank]:.2f} times as long as the plan says, so a"
        return f"{why} step would take {before_s * 1e3:.0f} ms and takes {after_s * 1e3:.0f} ms with another split"


def estimate_drift(busy_s: Sequence[float], split: Split, most: Sequence[int], stage: int, shares: Shares) -> Drift:
    """Start without measurements, from the seconds that each rank was busy with its part of one split.

    Time is taken to grow almost in proportion to samples; the factors correct what is wrong with that. No rank gets
    larger micro-batches than `most`, since nothing is known of memory.
    """
    rates = [took / sum(sizes) if sizes else 0.0 for took, sizes in zip(busy_s, split.micro, strict=True)]
    usual = statistics.median(rate for rate in rates if rate)
    profiles = tuple(_straight(rate or usual, limit) for rate, limit in zip(rates, most, strict=True))
    size = ModelSize("", "", 0, 0, 0, 0, 0)
    names = ("as seen",) * split.ranks
    free = Communication((0.0,) * 4)
    problem = Problem(
        global_batch=split.total,
        model=size,
        profiles=profiles,
        names=names,
        communication=FixedCommunication(free),
        stages=(stage,),
        shares=shares,
    )
    plan = make_plan(problem)
    return Drift(problem, replace(plan, split=split), is_measured=False)


def _straight(rate_s: float, most: int) -> Profile:
    points = {size: rate_s * most * (_OVERHEAD + (1 - _OVERHEAD) * size / most) for size in (1, most)}
    nothing = Curve.of((size, 0.0) for size in points)
    return Profile("", "", Curve.of(points.items()), nothing, 1, 0.0)
