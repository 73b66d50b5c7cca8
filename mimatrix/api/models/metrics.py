"""Metrics of running jobs, by rank and over time."""

from datetime import datetime

from mimatrix.api.models.base import Message
from mimatrix.api.models.nodes import Use
from mimatrix.api.models.workers import Pushed


class Rank(Message):
    """One rank of a job that runs, as it said last."""

    rank: int
    seat: str
    at: datetime
    step: int
    step_s: float
    compute_s: float
    data_s: float
    waiting_s: float
    communication_s: float
    samples: int
    planned_s: float | None
    use: Use | None
    group: int = 0
    """Ranks of one group wait for each other, and for nobody else."""
    samples_per_s: float = 0.0
    """Of its group."""
    pushed: Pushed | None = None
    """Of its group, as the first rank of it says."""


class Trouble(Message):
    """A rank that holds the others up."""

    kind: str
    """`slow` or `hang`."""
    rank: int
    seat: str
    cause: str
    """Of a slow one: compute, loader, link or memory."""
    lost_s: float
    """In every step, or since it is waited for."""
    sentence: str


class Ranks(Message):
    """All ranks of a job that runs, and who holds them up."""

    ranks: tuple[Rank, ...]
    troubles: tuple[Trouble, ...]


class Point(Message):
    """A job over a while: means. Lists have an entry for each rank; None: it said nothing."""

    at: datetime
    step: int
    samples_per_s: float | None
    """None, as `step_s`: the point is of what was logged for a step alone, such as an evaluation."""
    step_s: float | None
    predicted_step_s: float | None
    metrics: dict[str, float | None]
    """None: not finite. What has no value here was not logged then."""
    ranks: dict[str, tuple[float | None, ...]]
    """compute_s, data_s, waiting_s, communication_s, busy, memory_bytes, power_w, temperature_c; of the first rank of
    each group, where there are groups, also group_pushes, group_samples, group_staleness, group_moved_s,
    group_waited_s."""


class History(Message):
    """How a job went. The further back, the coarser."""

    every_s: float
    """Between points at least."""
    points: tuple[Point, ...]
