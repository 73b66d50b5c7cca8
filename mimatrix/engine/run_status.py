"""What a run is doing at the moment, for monitoring."""

from dataclasses import dataclass

from mimatrix.comm.control.waits import WaitStatus
from mimatrix.engine.outer_optimizer import PushStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """What a rank is doing at this moment, for monitoring."""

    phase: str
    """`starting`, `profiling`, `training` or `saving`."""
    mode: str
    """`sync`, or `hybrid` where groups do not wait for each other; `mode="auto"` is one of them once prepared."""
    group: int
    """The number of this rank's group in hybrid mode; otherwise 0."""
    pushes: PushStats | None
    """The pushes of this group; known to its first rank in hybrid mode."""
    is_excluded: bool
    """Whether it does something that is not part of a step: evaluates, loads, waits for a checkpoint."""
    waiting: WaitStatus | None
    """The collective in which this rank waits now, and for which ranks; None while it does not wait."""
