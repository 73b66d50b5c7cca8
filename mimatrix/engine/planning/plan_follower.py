"""The plans of a run: the first one, and those that follow when the speeds of ranks change.

Rank 0 decides at the end of a global batch, and offers its decision to the other ranks in the report of the next one.
With that report all ranks also know how far every loader has drawn: the new split holds from the first global batch
that none of them has requested.
"""

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.engine.data.position import DataPosition
from mimatrix.engine.data.source import MicroBatchSource
from mimatrix.engine.planning import profile_only
from mimatrix.engine.planning.measure import (
    PrepareContext,
    agree_on_plan,
    build_problem,
    decide_plan,
    load_plan,
    measure_ranks,
)
from mimatrix.engine.planning.wait_monitor import WaitMonitor, advise_plan, describe_imbalance
from mimatrix.planner.drift import Change, Drift, estimate_drift
from mimatrix.planner.model.plan import Plan
from mimatrix.planner.model.profile import Measurements
from mimatrix.planner.model.split import Split

_START = DataPosition(0, 0)
_WARM_UP_STEPS = 3
"""Steps observed before the first plan of a run that did not measure; the step before them is not counted."""
_LOG_EVERY_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceReport:
    """What one rank reports for the plan: how long it was busy, and how far its loader has drawn."""

    busy_s: float
    head: Sequence[int]
    """Epoch and global batch that the loader draws next."""
    offer: Mapping[str, Any] | None = None
    """The plan that rank 0 offers, with its reason."""


class PlanFollower:
    """The current plan, those before it, and on rank 0 what may come next."""

    def __init__(self, rank: int, source: MicroBatchSource, *, quiet: bool) -> None:
        self._rank, self._source, self._quiet = rank, source, quiet
        self.current: Plan | None = None
        self.measured: Measurements | None = None
        """What the first plan was made from, if devices were measured for it."""
        self.changes: list[tuple[int, Plan, str]] = []
        """(step in which it was agreed, plan, reason), in order."""
        self._drift: Drift | None = None
        self._warm_up: _WarmUp | None = None
        self._waits: WaitMonitor | None = None
        """Observes a run without a plan, during its first steps."""
        self._advice = ""
        self._offer: dict[str, Any] | None = None
        self._logged_s, self._unlogged = float("-inf"), 0

    def begin(self, context: PrepareContext) -> Plan | None:
        """Return the first plan, or None if the settings give the split themselves. A collective.

        If the run only measures (`mimatrix profile`), the process exits here.
        """
        settings = context.settings
        if profile_only.requested():
            profile_only.run_and_exit(context)
        asked = decide_plan(context)
        follows = settings.follows and context.world_size > 1
        observes = follows and not self._must_keep_batches(context, asked)
        if asked == "profile":
            self.measured = measure_ranks(context)
            problem = build_problem(context, self.measured)
            plan = agree_on_plan(context, problem)
            self._drift = Drift(problem, plan) if follows else None
            return self._use(plan)
        if asked == "online" or asked is None:
            start = (self._source.split_at(_START), settings.stage_for(), settings.shares_for(context.world_size))
            self._warm_up = _WarmUp(*start) if observes else None
            if asked is None and context.world_size > 1 and (self._rank > 0 or self._logs):
                self._waits, self._advice = WaitMonitor(*start), advise_plan(context)
            return None
        plan = load_plan(context)
        self._warm_up = _WarmUp(plan.split, plan.stage, plan.shares) if observes else None
        return self._use(plan)

    def _must_keep_batches(self, context: PrepareContext, asked: Plan | Path | str | None) -> bool:
        """Return whether batch norm forbids changes: without measured memory, a fast rank gets more micro-steps."""
        must_keep = context.num_sync_batchnorms > 0 and asked not in (None, "profile")
        if must_keep and context.settings.follows and self._logs:
            logger.info(
                'the model has batch norm, so the batches stay as they are; use plan="profile" and give run.prepare '
                "loss=loss_fn: that measures how large they may be"
            )
        return must_keep

    def _use(self, plan: Plan) -> Plan:
        self._source.change_split(plan.split, _START)
        self.current = plan
        return plan

    @property
    def _logs(self) -> bool:
        return self._rank == 0 and not self._quiet

    @property
    def needs_pace(self) -> bool:
        """Whether this rank reports how long it is busy, which a GPU has to be waited for."""
        return self._drift is not None or self._warm_up is not None or self._waits is not None

    def report(self, busy_s: float) -> PaceReport:
        """Return what this rank reports at the end of a global batch."""
        head, offer = self._source.head(), self._offer
        self._offer = None
        return PaceReport(busy_s=busy_s, head=[head.epoch, head.batch], offer=offer)

    def update(self, reports: Sequence[PaceReport], split: Split, step: int, steps_left: int | None) -> None:
        """Act on the reports of all ranks at the end of step number `step`, which used `split`."""
        if self._waits:
            self._waits = self._observe_waits(self._waits, reports, split)
            return
        heads = [DataPosition(*report.head) for report in reports]
        offer = reports[0].offer
        if offer:
            self._adopt(offer, max(heads), step)
        elif self._rank == 0:
            self._decide(split, [report.busy_s for report in reports], steps_left)

    def _observe_waits(self, waits: WaitMonitor, reports: Sequence[PaceReport], split: Split) -> WaitMonitor | None:
        """Add a step, and after the last one log what was found; all ranks end with the same step."""
        if len(reports) < split.ranks:
            return None  # rank 0 is quiet
        waits.observe(split, [report.busy_s for report in reports])
        if not waits.is_done:
            return waits
        if self._logs and (imbalance := waits.find_imbalance()):
            logger.info(describe_imbalance(imbalance, self._advice))
        return None

    def _adopt(self, offer: Mapping[str, Any], at: DataPosition, step: int) -> None:
        plan = Plan.from_json(offer["plan"])
        self._source.change_split(plan.split, at)
        self.current = plan
        self.changes.append((step, plan, offer["why"]))
        if self._drift:
            self._drift.changed(plan)
        if self._logs:
            self._log_change(plan, at, offer["why"])

    def _log_change(self, plan: Plan, at: DataPosition, reason: str) -> None:
        """Log a change, but not every one: when speeds jump, batches change every few steps."""
        if time.monotonic() - self._logged_s < _LOG_EVERY_S:
            self._unlogged += 1
            return
        batches = " + ".join(map(str, plan.split.batches))
        skipped = f" ({self._unlogged} earlier changes were not logged)" if self._unlogged else ""
        logger.info(f"from batch {at.batch} of epoch {at.epoch} on, the batches are {batches}: {reason}{skipped}")
        self._logged_s, self._unlogged = time.monotonic(), 0

    def _decide(self, split: Split, busy_s: Sequence[float], steps_left: int | None) -> None:
        if self._drift:
            self._drift.observe(split, busy_s)
        elif self._warm_up:
            self._drift = self._warm_up.observe(split, busy_s)
        if self._drift is None:
            return
        try:
            decision = self._drift.decide(steps_left)
        except UserError:
            return  # no plan is better than the current one
        if isinstance(decision, Change):
            self._offer = {"plan": decision.plan.to_json(), "why": decision.reason}


class _WarmUp:
    """The first steps of a run that measured nothing."""

    def __init__(self, split: Split, stage: int, shares: Shares) -> None:
        self._split, self._stage, self._shares = split, stage, shares
        self._busy_s: list[Sequence[float]] = []

    def observe(self, split: Split, busy_s: Sequence[float]) -> Drift | None:
        """Add a step; return what follows the speeds once there are enough steps."""
        if split == self._split:
            self._busy_s.append(busy_s)
        if len(self._busy_s) <= _WARM_UP_STEPS:
            return None
        medians = [statistics.median(column) for column in zip(*self._busy_s[1:], strict=True)]
        # Memory was not measured, so no rank gets a larger micro-batch than it had.
        most = [max(sizes, default=1) for sizes in split.micro]
        drift = estimate_drift(medians, split, most, self._stage, self._shares)
        for busy in self._busy_s[1:]:
            drift.observe(split, busy)
        return drift
