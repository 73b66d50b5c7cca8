"""Runs without a plan: observe the first steps, and say in one line how long ranks wait and what a plan would gain."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.engine.planning.measure import PrepareContext
from mimatrix.planner.drift import estimate_drift
from mimatrix.planner.model.split import Split

_WARM_UP_STEPS = 3
"""Steps that are not counted: memory is allocated, kernels are chosen."""
_MIN_STEPS, _MIN_BUSY_S = 20, 2.0
"""What is observed at least; if steps are short, there are more of them."""
_MAX_STEPS = 5000
_MIN_SPEEDUP = 1.1
"""Below it nothing is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """What the ranks of a run lose because the split does not fit their speeds."""

    waiting_rank: int
    """The rank that waits most."""
    slow_rank: int
    """The rank that it waits for."""
    waiting: float
    """The part of a step that it waits."""
    speedup: float
    """How many times as short a step would be with the split that the planner finds."""


class WaitMonitor:
    """How long each rank is busy in the first steps; the same on every rank, since all see the reports of all."""

    def __init__(
        self, split: Split, stage: int, shares: Shares, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._split, self._stage, self._shares, self._clock = split, stage, shares, clock
        self._steps = 0
        self._busy_s: list[Sequence[float]] = []
        self._step_s: list[float] = []
        self._observed_s = 0.0
        self._last_s: float | None = None

    @property
    def is_done(self) -> bool:
        """Whether enough steps were observed."""
        count = len(self._busy_s)
        return count >= _MAX_STEPS or (count >= _MIN_STEPS and self._observed_s >= _MIN_BUSY_S)

    def observe(self, split: Split, busy_s: Sequence[float]) -> None:
        """Add a step, unless it is the smaller one at the end of an epoch."""
        last_s, self._last_s = self._last_s, self._clock()
        self._steps += 1
        if self._steps <= _WARM_UP_STEPS or split != self._split or last_s is None:
            return
        self._busy_s.append(busy_s)
        self._step_s.append(self._last_s - last_s)
        self._observed_s += max(busy_s)

    def find_imbalance(self) -> Imbalance | None:
        """Return what ranks lose; None if another split would gain little."""
        busy_s = [statistics.median(column) for column in zip(*self._busy_s, strict=True)]
        if not all(self._split.batches) or min(busy_s) <= 0:
            return None  # the speed of a rank without samples is unknown
        # A run that does not measure takes no larger micro-batches than it has.
        max_micro = [max(sizes) for sizes in self._split.micro]
        try:
            before_s, after_s = estimate_drift(busy_s, self._split, max_micro, self._stage, self._shares).predict_best()
        except UserError:
            return None  # beyond planning
        slow_rank = max(range(len(busy_s)), key=busy_s.__getitem__)
        waiting_rank = min(range(len(busy_s)), key=busy_s.__getitem__)
        # Communication and the optimizer's step take as long with any split.
        step_s = max(statistics.median(self._step_s), before_s, busy_s[slow_rank])
        speedup = step_s / (step_s - before_s + after_s)
        if speedup <= _MIN_SPEEDUP:
            return None
        return Imbalance(
            waiting_rank=waiting_rank,
            slow_rank=slow_rank,
            waiting=(busy_s[slow_rank] - busy_s[waiting_rank]) / step_s,
            speedup=speedup,
        )


def describe_imbalance(imbalance: Imbalance, advice: str) -> str:
    """Return the line that says how long ranks wait; `advice` are the arguments that end it."""
    return (
        f"rank {imbalance.waiting_rank} waits {100 * imbalance.waiting:.0f} % of each step for rank "
        f"{imbalance.slow_rank}; {advice} would make a step about {imbalance.speedup:.1f} times as short"
    )


def advise_plan(context: PrepareContext) -> str:
    """Return the arguments by which this run would get a plan."""
    # Without measured memory the batches of a model with batch norm stay as they are.
    name = "profile" if context.loss is not None or context.num_sync_batchnorms else "online"
    advice = f'plan="{name}"'
    if context.settings.batch != "auto":
        advice = f"global_batch={context.global_batch}, {advice} in place of batch"
    if name == "profile" and context.loss is None:
        advice += " (with loss=loss_fn for run.prepare)"
    return advice
