"""How a device was used over time: a rank of one job after another, by the history of each job."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from mimatrix.monitor.downsampling import mean
from mimatrix.server.db.models import AllocationRow
from mimatrix.server.metrics import store

_MOST_JOBS = 100
_FIGURES = ("busy", "memory_bytes", "power_w", "temperature_c")
# After this time no job has it: lines of one job do not go on into those of the next.
_FREE_AFTER_S = 1.0


class _Start(NamedTuple):
    """One generation of a job, on its devices in the order of ranks."""

    begin_s: float
    end_s: float
    devices: list[str]


def read(session: Session, device: str, since_s: float, now_s: float, points: int) -> list[store.StoredPoint]:
    """Return at most this number of points since a time, the oldest first; one without metrics after each job."""
    found: list[store.StoredPoint] = []
    for job, starts in _starts(session, device, since_s, now_s).items():
        begin_s = max(since_s, starts[0].begin_s)
        _every_s, rows = store.read(session, job, begin_s, now_s, points)
        found += _of_device(device, starts, rows)
        found += (store.StoredPoint(each.end_s + _FREE_AFTER_S, {}) for each in starts if each.end_s < now_s)
    found.sort(key=lambda point: point.at)
    found = [point for point in found if since_s <= point.at <= now_s]
    step = max(1, -(-len(found) // points))
    return [_one(found[start : start + step]) for start in range(0, len(found), step)]


def _starts(session: Session, device: str, since_s: float, now_s: float) -> dict[int, list[_Start]]:
    """Return the generations of the jobs that had it, with the devices of all their ranks."""
    recent = or_(AllocationRow.ended_at.is_(None), AllocationRow.ended_at > since_s)
    asked = (
        select(AllocationRow.job)
        .where(AllocationRow.device == device, recent)
        .order_by(AllocationRow.id.desc())
        .limit(_MOST_JOBS)
    )
    jobs = set(session.scalars(asked))
    found: dict[tuple[int, int], _Start] = {}
    # A job's devices were written down in the order of its ranks.
    for row in session.scalars(select(AllocationRow).where(AllocationRow.job.in_(jobs)).order_by(AllocationRow.id)):
        start = _Start(row.started_at, row.ended_at or now_s, [])
        found.setdefault((row.job, row.generation), start).devices.append(row.device)
    by_job: dict[int, list[_Start]] = {}
    for (job, _generation), start in found.items():
        by_job.setdefault(job, []).append(start)
    return by_job


def _of_device(device: str, starts: Sequence[_Start], rows: Iterable[store.StoredPoint]) -> Iterable[store.StoredPoint]:
    begins = [start.begin_s for start in starts]
    for row in rows:
        # A mean is written down at the end of its time, which may be after the end of the job.
        start = starts[max(0, bisect_right(begins, row.at) - 1)]
        if device in start.devices:
            yield store.StoredPoint(min(row.at, start.end_s), _of_rank(row.figures, start.devices.index(device)))


def _of_rank(figures: dict[str, Any], rank: int) -> dict[str, float | None]:
    lists = {name: (figures.get("ranks") or {}).get(name) or [] for name in _FIGURES}
    return {name: values[rank] if rank < len(values) else None for name, values in lists.items()}


def _one(points: Sequence[store.StoredPoint]) -> store.StoredPoint:
    return store.StoredPoint(
        points[-1].at, mean([point.figures for point in points]) if len(points) > 1 else points[0].figures
    )
