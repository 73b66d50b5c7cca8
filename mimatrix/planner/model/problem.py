"""What the planner is asked, and a priced answer."""

from collections.abc import Callable
from dataclasses import dataclass

from mimatrix.collectives.shares import Shares
from mimatrix.planner.model.cost import Cost
from mimatrix.planner.model.profile import STAGES, Communication, ModelSize, Profile
from mimatrix.planner.model.split import Split


@dataclass(frozen=True)
class Problem:
    """What the planner is asked."""

    global_batch: int
    model: ModelSize
    profiles: tuple[Profile, ...]
    """One for each rank."""
    names: tuple[str, ...]
    """Of the ranks, for people."""
    network: Callable[[tuple[int, ...]], Communication]
    """What a subset of the ranks pays."""
    stages: tuple[int, ...] = STAGES
    """Those that may be chosen."""
    shares: Shares | None = None
    """Given (states are in place already), not to be chosen."""
    equal_counts: bool = False
    """Batch norm: ranks meet in every micro-step, also in stages 0 and 1."""
    may_leave_out: bool = False
    """Whether devices that slow the job may be left out."""
    stage_gain: float = 1e-3
    """By which part a higher stage must shorten the step to be chosen over a lower one that fits."""
    one_micro_step: bool = False
    """Whether each rank runs all its samples at once where memory allows, though several micro-steps seem shorter."""
    for_everyone: float = 0.0
    """By which part a step may be longer so that each rank has a sample: one without does not come by in a loop."""


@dataclass(frozen=True)
class Priced:
    """The best that some ranks can do in one stage."""

    members: tuple[int, ...]
    stage: int
    split: Split
    shares: Shares
    cost: Cost
    bound_s: float
    """No choice in this stage takes less."""
