"""The plans of a run: the first, and those that follow while speeds change. Rank 0 decides, at the end of a batch.

What it decided it says at the end of the next batch. All hear it together, and how far all loaders have drawn: it holds
from the first global batch that none of them has.
"""

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.engine.data.source import DataPosition, MicroBatchSource
from mimatrix.engine.planning import profile_only as storing
from mimatrix.engine.planning.measure import PrepareContext, planned, problem_of, stored, survey
from mimatrix.engine.rank_exchange import Message
from mimatrix.planner.drift import Change, Drift, learned
from mimatrix.planner.plan import Plan
from mimatrix.planner.profile import Measurements
from mimatrix.planner.split import Split

_START = DataPosition(0, 0)
_LEARNT_FROM = 3
"""Steps from which the first plan of a run that did not measure is made; the one before them is a warm-up."""
_SAID_S = 10.0
"""Between lines about changes."""


class PlanFollower:
    """The plan that holds, those before it, and on rank 0 what may come next."""

    def __init__(self, rank: int, feed: MicroBatchSource, *, quiet: bool) -> None:
        self._rank, self._feed, self._quiet = rank, feed, quiet
        self.now: Plan | None = None
        self.measured: Measurements | None = None
        """What the first plan was made from, where devices were measured for it."""
        self.changes: list[tuple[int, Plan, str]] = []
        """(step in which it was agreed, plan, why), in order."""
        self._drift: Drift | None = None
        self._said_s, self._unsaid = float("-inf"), 0
        self._learns: _WarmUp | None = None
        self._offer: dict[str, Any] | None = None

    def begin(self, ground: PrepareContext) -> Plan | None:
        """The first plan, if the settings ask for one; None: the split that they give. A collective.

        Where only measurements are wanted (`mimatrix profile`), the process ends here.
        """
        settings = ground.settings
        if storing.is_asked():
            storing.store_and_end(ground)
        learns = settings.follows and not self._refuses_to_learn(ground)
        if settings.plan == "profile":
            self.measured = survey(ground)
            problem = problem_of(ground, self.measured)
            plan = planned(ground, problem)
            self._drift = Drift(problem, plan) if settings.follows else None
            return self._begun(plan)
        if settings.plan == "online" or settings.plan is None:
            stage, shares = settings.stage_for(), settings.shares_for(ground.ranks)
            self._learns = _WarmUp(self._feed.split_at(_START), stage, shares) if learns else None
            return None
        plan = stored(ground)
        self._learns = _WarmUp(plan.split, plan.stage, plan.shares) if learns else None
        return self._begun(plan)

    def _refuses_to_learn(self, ground: PrepareContext) -> bool:
        """Where memory was not measured, a fast rank gets more micro-batches, not larger ones: batch norm minds."""
        refuses = ground.norms > 0 and ground.settings.plan not in (None, "profile")
        if refuses and ground.settings.follows and self._rank == 0 and not self._quiet:
            sys.stderr.write(
                'mimatrix: the model has batch norm, so batches stay as they are; use plan="profile", which knows how '
                "large they may be\n"
            )
        return refuses

    def _begun(self, plan: Plan) -> Plan:
        self._feed.change(plan.split, _START)
        self.now = plan
        return plan

    def tell(self, busy_s: float) -> Message:
        """What a rank says at the end of a global batch."""
        head, offer = self._feed.head(), self._offer
        self._offer = None
        return {"busy": busy_s, "head": [head.epoch, head.batch], "offer": offer}

    def hear(self, messages: Sequence[Message], split: Split, step: int, steps_left: int | None) -> None:
        """What all ranks said at the end of step number `step`, which was cut by `split`."""
        heads = [DataPosition(*message["head"]) for message in messages]
        offer = messages[0]["offer"]
        if offer:
            self._adopt(offer, max(heads), step)
        elif self._rank == 0:
            self._consider(split, [message["busy"] for message in messages], steps_left)

    def _adopt(self, offer: Mapping[str, Any], at: DataPosition, step: int) -> None:
        plan = Plan.from_json(offer["plan"])
        self._feed.change(plan.split, at)
        self.now = plan
        self.changes.append((step, plan, offer["why"]))
        if self._drift:
            self._drift.changed(plan)
        if self._rank == 0 and not self._quiet:
            self._say(plan, at, offer["why"])

    def _say(self, plan: Plan, at: DataPosition, why: str) -> None:
        """Not every time: where speeds jump, batches follow every few steps."""
        if time.monotonic() - self._said_s < _SAID_S:
            self._unsaid += 1
            return
        shown = " + ".join(map(str, plan.split.batches))
        more = f" ({self._unsaid} changes before it were not told)" if self._unsaid else ""
        sys.stderr.write(
            f"mimatrix: from batch {at.batch} of epoch {at.epoch} on the batches are {shown}: {why}{more}\n"
        )
        self._said_s, self._unsaid = time.monotonic(), 0

    def _consider(self, split: Split, busy_s: Sequence[float], steps_left: int | None) -> None:
        if self._drift:
            self._drift.observe(split, busy_s)
        elif self._learns:
            self._drift = self._learns.seen(split, busy_s)
        if self._drift is None:
            return
        try:
            found = self._drift.decide(steps_left)
        except UserError:
            return  # there is no better plan than the one that holds
        if isinstance(found, Change):
            self._offer = {"plan": found.plan.to_json(), "why": found.reason}


class _WarmUp:
    """The first steps of a run that measured nothing."""

    def __init__(self, split: Split, stage: int, shares: Shares) -> None:
        self._split, self._stage, self._shares = split, stage, shares
        self._seen: list[Sequence[float]] = []

    def seen(self, split: Split, busy_s: Sequence[float]) -> Drift | None:
        """One more step; enough of them make a beginning."""
        if split == self._split:
            self._seen.append(busy_s)
        if len(self._seen) <= _LEARNT_FROM:
            return None
        usual = [statistics.median(column) for column in zip(*self._seen[1:], strict=True)]
        # Nothing is known of memory, so no rank gets more at once than it had.
        most = [max(sizes, default=1) for sizes in split.micro]
        drift = learned(usual, split, most, self._stage, self._shares)
        for busy in self._seen[1:]:
            drift.observe(split, busy)
        return drift
