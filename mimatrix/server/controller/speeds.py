"""How fast earlier runs of a job were on each kind of device: users submit the same job again and again."""

from collections.abc import Mapping

from sqlalchemy import func, or_, select

from mimatrix.scheduler.device_speeds import speeds_measured, speeds_planned
from mimatrix.server.context import Context
from mimatrix.server.controller.faults import Faults
from mimatrix.server.db.models import JobRow

_REFRESH_S = 10.0
"""How old what is known of earlier runs may be."""
Speeds = Mapping[tuple[str, str], Mapping[str, float]]
"""Samples per second by kind of device, by user and name of jobs."""


class SpeedTable:
    """Speeds of the last run of each user's jobs. `speeds` is replaced as a whole: other threads may read it."""

    def __init__(self, context: Context, faults: Faults) -> None:
        self._context, self._faults = context, faults
        self.speeds: Speeds = {}
        self._read_s = float("-inf")
        self._since_s = float("-inf")

    def refresh(self) -> None:
        """Read the plans and profiles that may be new, if it is time to."""
        now_s = self._context.monotonic()
        if now_s - self._read_s <= _REFRESH_S:
            return
        wall_s = self._context.clock()
        self.speeds = {**self.speeds, **self._read(self._since_s)}
        self._read_s, self._since_s = now_s, wall_s

    def _read(self, since_s: float) -> Speeds:
        """Return the speeds by the last plan and profile of each job; of those that ended before nothing is new."""
        last = select(func.max(JobRow.id)).where(JobRow.plan.is_not(None)).group_by(JobRow.user, JobRow.name)
        is_new = or_(JobRow.ended_at.is_(None), JobRow.ended_at >= since_s)
        wanted = select(JobRow.id).where(JobRow.id.in_(last), is_new)
        found: dict[tuple[str, str], Mapping[str, float]] = {}
        with self._context.sessions() as session:
            for job in session.scalars(wanted).all():
                with self._faults.contain("speeds", job):
                    columns = select(JobRow.user, JobRow.name, JobRow.plan, JobRow.profile).where(JobRow.id == job)
                    user, name, plan, profile = session.execute(columns).one()
                    found[user, name] = speeds_planned(plan or {}) | speeds_measured(profile or {})
        return found
