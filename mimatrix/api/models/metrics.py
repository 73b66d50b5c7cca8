"""Metrics of running jobs, by rank and over time."""

from datetime import datetime

from mimatrix.api.models.base import ApiModel
from mimatrix.api.models.nodes import DeviceUsage
from mimatrix.api.models.workers import PushReport


class Rank(ApiModel):
    """One rank of a running job, as of its last report."""

    rank: int
    device: str
    at: datetime
    step: int
    step_s: float
    compute_s: float
    data_s: float
    waiting_s: float
    communication_s: float
    samples: int
    planned_s: float | None
    use: DeviceUsage | None
    group: int = 0
    """Ranks of different groups never wait for each other."""
    samples_per_s: float = 0.0
    """Of its group."""
    pushed: PushReport | None = None
    """Of its group, sent by its first rank."""


class StragglerReport(ApiModel):
    """A rank that delays or blocks the others."""

    kind: str
    """`slow` or `hang`."""
    rank: int
    device: str
    cause: str
    """Of a slow rank: compute, loader, link or memory."""
    lost_s: float
    """Per step if it is slow; since the others are blocked if it hangs."""
    sentence: str


class Ranks(ApiModel):
    """All ranks of a running job, and the stragglers among them."""

    ranks: tuple[Rank, ...]
    stragglers: tuple[StragglerReport, ...]


class Point(ApiModel):
    """Means of a job's metrics over an interval. Lists have an entry for each rank; None: no report."""

    at: datetime
    step: int
    samples_per_s: float | None
    """None, as `step_s`, if the point holds only what was logged for a step, such as an evaluation."""
    step_s: float | None
    predicted_step_s: float | None
    metrics: dict[str, float | None]
    """None: not finite. A metric without an entry was not logged in this interval."""
    ranks: dict[str, tuple[float | None, ...]]
    """compute_s, data_s, waiting_s, communication_s, busy, memory_bytes, power_w, temperature_c; if there are several
    groups, group; for the first rank of each also group_pushes, group_samples, group_staleness, group_moved_s,
    group_waited_s."""


class History(ApiModel):
    """A job over time. Older points are coarser."""

    every_s: float
    """The shortest interval between points."""
    points: tuple[Point, ...]
