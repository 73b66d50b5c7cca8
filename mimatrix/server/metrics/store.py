"""The history of metrics: points of every running job and of the cluster, thinned as they grow old."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from sqlalchemy import func, insert, select
from sqlalchemy.orm import Session

from mimatrix.api.models import Report
from mimatrix.monitor.downsampling import TIERS, mean, short, tier_for
from mimatrix.server.db.engine import Sessions
from mimatrix.server.db.models import SampleRow
from mimatrix.server.metrics.live_state import LiveJob

Contain = Callable[[int], AbstractContextManager[None]]
"""Contains exceptions of one job."""
CLUSTER = 0
"""The number under which the metrics of the cluster are kept; no job has it."""
_MOST_RANKS = 128
"""Of larger jobs only what the leader reports is kept."""
_APART_S = 1e-3
"""Between points of what was logged, which come before that of the job at the same time."""
_BY_RANK = ("compute_s", "data_s", "waiting_s", "communication_s")
_BY_GROUP = ("pushes", "samples", "staleness", "moved_s", "waited_s")
"""Reported by the first rank of each group, where there are groups."""
_BY_DEVICE = ("busy", "memory_bytes", "power_w", "temperature_c")


class StoredPoint(NamedTuple):
    """Metrics at a time."""

    at: float
    figures: dict[str, Any]


class HistoryStore:
    """Writes points, one for each job in the time of the finest tier."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._kept_at = [0.0] * len(TIERS)

    def is_due(self, now_s: float) -> bool:
        """Whether it is time for a point. A clock that was set back begins again."""
        return not 0 <= now_s - self._kept_at[0] < TIERS[0].every_s

    def keep(self, now_s: float, jobs: Mapping[int, LiveJob], cluster: Mapping[str, Any], contain: Contain) -> None:
        """Write a point of the cluster and of each job; `contain` keeps a job that raises from the others."""
        with self._sessions.begin(durable=False) as session:
            _write(session, 0, now_s, [(CLUSTER, dict(cluster))])
            for number, live in jobs.items():
                with contain(number), session.begin_nested():
                    _write_logged(session, now_s, number, live)
                    if live.leader_report:
                        _write(session, 0, now_s, [(number, point_of(live))])
            self._kept_at[0] = now_s
            for number in range(1, len(TIERS)):
                self._thin(session, number, now_s, contain)

    def keep_last(self, session: Session, now_s: float, number: int, live: LiveJob | None) -> None:
        """Write the last point of a job that has ended."""
        if live:
            _write_logged(session, now_s, number, live)
        if live and live.leader_report and live.leader_report.step:
            _write(session, 0, now_s, [(number, point_of(live))])

    def _thin(self, session: Session, number: int, now_s: float, contain: Contain) -> None:
        """Write means of the tier below, once its period is over."""
        tier = TIERS[number]
        if not self._kept_at[number] or self._kept_at[number] > now_s:
            self._kept_at[number] = now_s
        if now_s - self._kept_at[number] < tier.every_s:
            return
        since_s, self._kept_at[number] = self._kept_at[number], now_s
        asked = select(SampleRow).where(SampleRow.tier == number - 1, SampleRow.at > since_s, SampleRow.at <= now_s)
        by_job: dict[int, list[dict[str, Any]]] = {}
        for row in session.scalars(asked.order_by(SampleRow.at)):
            by_job.setdefault(row.job, []).append(row.figures)
        for job, points in by_job.items():
            with contain(job), session.begin_nested():
                _write(session, number, now_s, [(job, mean(points))])


def read(
    session: Session, job: int, since_s: float, now_s: float, points: int, *, only_last_ranks: bool = False
) -> tuple[float, list[StoredPoint]]:
    """Return the distance of points, and at most this number of them since a time, the oldest first.

    What a tier does not have yet, because its period is not over, comes from the finer ones. `only_last_ranks`: metrics
    of ranks, which are most of it, are left out of all points but the last.
    """
    known = select(func.min(SampleRow.at), func.max(SampleRow.at)).where(SampleRow.job == job, SampleRow.at >= since_s)
    first_s, last_s = session.execute(known).one()
    number = tier_for(first_s or since_s, last_s or now_s, now_s, points)
    found: list[StoredPoint] = []
    for tier in range(number, -1, -1):
        after = SampleRow.at > found[-1].at if found else SampleRow.at >= since_s
        asked = select(SampleRow.at, SampleRow.figures).where(SampleRow.job == job, SampleRow.tier == tier, after)
        found += (StoredPoint(at, figures) for at, figures in session.execute(asked.order_by(SampleRow.at)))
    step = max(1, -(-len(found) // points))
    joined = [
        _one(found[start : start + step], with_ranks=not only_last_ranks or start + step >= len(found))
        for start in range(0, len(found), step)
    ]
    return TIERS[number].every_s * step, joined


def point_of(live: LiveJob) -> dict[str, Any]:
    """Return what the ranks of a job reported last, as one point."""
    first, reports = live.leader_report, live.reports
    assert first, "the leader has reported"
    known: dict[str, Any] = {
        "step": first.step,
        "samples_per_s": short(live.samples_per_s),
        "step_s": short(first.step_s),
        "predicted_step_s": short(first.predicted_step_s),
        "metrics": {name: short(value) for name, value in live.metrics.items()},
    }
    if live.ranks <= _MOST_RANKS:
        known["ranks"] = _by_rank([reports.get(rank) for rank in range(live.ranks)])
    return known


def _write_logged(session: Session, now_s: float, number: int, live: LiveJob) -> None:
    """Write what was logged now and then: each at its step, without the metrics of that time."""
    logged = live.drain_logged()
    for place, entry in enumerate(logged):
        metrics = {name: short(value) for name, value in entry.metrics.items()}
        at_s = now_s - _APART_S * (len(logged) - place)
        _write(session, 0, at_s, [(number, {"step": entry.step, "metrics": metrics})])


def _by_rank(reports: Sequence[Report | None]) -> dict[str, list[float | None]]:
    found = {name: [short(getattr(each, name)) if each else None for each in reports] for name in _BY_RANK}
    uses = [each.use if each else None for each in reports]
    found |= _known(uses, {name: name for name in _BY_DEVICE})
    if any(each.group for each in reports if each):
        found["group"] = [each.group if each else None for each in reports]
    pushed = [each.pushed if each else None for each in reports]
    return found | _known(pushed, {name: f"group_{name}" for name in _BY_GROUP})


def _known(said: Sequence[object | None], names: Mapping[str, str]) -> dict[str, list[float | None]]:
    """Return a list with a value for each rank, under another name, of each metric that any rank has."""
    found = {new: [short(getattr(each, old)) if each else None for each in said] for old, new in names.items()}
    return {name: values for name, values in found.items() if any(value is not None for value in values)}


def _one(points: Sequence[StoredPoint], *, with_ranks: bool) -> StoredPoint:
    figures = [point.figures for point in points]
    if not with_ranks:
        figures = [{name: value for name, value in each.items() if name != "ranks"} for each in figures]
    return StoredPoint(points[-1].at, mean(figures) if len(figures) > 1 else figures[0])


def _write(session: Session, tier: int, at_s: float, points: Iterable[tuple[int, dict[str, Any]]]) -> None:
    rows = [{"job": job, "tier": tier, "at": at_s, "figures": figures} for job, figures in points]
    if rows:
        session.execute(insert(SampleRow), rows)
