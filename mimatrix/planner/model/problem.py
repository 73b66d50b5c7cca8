"""What the planner is asked, and the priced answers of its search."""

from dataclasses import dataclass
from typing import Protocol

from mimatrix.collectives.shares import Shares
from mimatrix.planner.model.cost import Cost
from mimatrix.planner.model.profile import STAGES, Communication, ModelSize, Profile
from mimatrix.planner.model.split import Split


class CommunicationModel(Protocol):
    """What sets of ranks pay for moving a model's gradients and parameters."""

    def cost(self, members: tuple[int, ...]) -> Communication:
        """Return what these ranks pay if no others take part."""


@dataclass(frozen=True, slots=True)
class FixedCommunication:
    """A cost that is the same for every set of ranks, as all of them together were measured to pay."""

    paid: Communication

    def cost(self, members: tuple[int, ...]) -> Communication:  # noqa: ARG002 (the protocol's)
        """Return the cost."""
        return self.paid


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What the planner is asked."""

    global_batch: int
    model: ModelSize
    profiles: tuple[Profile, ...]
    """One for each rank."""
    names: tuple[str, ...]
    """Of the ranks, for people."""
    communication: CommunicationModel
    stages: tuple[int, ...] = STAGES
    """Those that may be chosen."""
    shares: Shares | None = None
    """Given, since states are in place already; None if they are to be chosen."""
    equal_counts: bool = False
    """Whether ranks meet in every micro-step also in stages 0 and 1, as batch norm needs it."""
    may_leave_out: bool = False
    """Whether ranks that slow the job down may be left out."""
    stage_gain: float = 1e-3
    """The part of a step that a higher stage must save to be chosen over a lower one that fits."""
    one_micro_step: bool = False
    """Whether each rank runs all its samples at once if memory allows, even if several micro-steps seem shorter."""
    min_one_sample_slack: float = 0.0
    """The part of a step that it may cost that each rank has a sample: one without is idle in a training loop."""


@dataclass(frozen=True, slots=True)
class Priced:
    """The best that a set of ranks can do in one stage."""

    members: tuple[int, ...]
    stage: int
    split: Split
    shares: Shares
    cost: Cost
    bound_s: float
    """No choice in this stage takes less."""
