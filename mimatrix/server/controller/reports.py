"""What the first rank of each job reported becomes its state and progress; jobs that do not stop in time are ended."""

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from mimatrix.api.models import JobState, Progress
from mimatrix.scheduler import StopKind
from mimatrix.server.context import Context
from mimatrix.server.controller.clocks import JobClock
from mimatrix.server.controller.faults import Faults
from mimatrix.server.db.models import JobRow
from mimatrix.server.jobs import events
from mimatrix.server.jobs.lifecycle import ACTIVE_STATES, is_allowed, state_of, transition
from mimatrix.server.metrics.live_state import LiveJob

_GRACE_S = 120.0
"""A job that has not begun to save by then is ended; one that has gets as much again."""


class ReportReader:
    """Writes down what running jobs report."""

    def __init__(self, context: Context, faults: Faults, clock: JobClock) -> None:
        self._context, self._faults, self._clock = context, faults, clock

    def apply(self, running: frozenset[tuple[int, int]]) -> list[tuple[int, int]]:
        """Take over the reports of these teams; return those that were told to stop and are overdue."""
        overdue = []
        with self._context.sessions.begin(durable=False) as session:
            wanted = select(JobRow.id).where(JobRow.state.in_(ACTIVE_STATES)).order_by(JobRow.id)
            for job in session.scalars(wanted).all() if running else ():
                with self._faults.contain("reports", job), session.begin_nested():
                    row = session.get_one(JobRow, job, with_for_update=True)
                    team = (row.id, row.generation)
                    if team in running and self._is_overdue(row):
                        overdue.append(team)
                    live = self._context.live.get(*team)
                    if live and team in running:
                        self._apply(session, row, live)
        return overdue

    def _is_overdue(self, row: JobRow) -> bool:
        """Whether it was told to stop and must be made to."""
        if not row.stop_kind:
            return False
        if not StopKind(row.stop_kind).saves or row.stop_requested_at is None:
            return True
        grace_s = _GRACE_S * (2 if row.state == JobState.SAVING else 1)
        return self._clock.now_s() - self._clock.instant("stop", row.id, row.stop_requested_at) > grace_s

    def _apply(self, session: Session, row: JobRow, live: LiveJob) -> None:
        if row.stop_kind and StopKind(row.stop_kind).saves:
            live.tell_to_leave()
        report = live.leader_report
        if report is None:
            return
        row.progress = progress_of(live)
        old, new = state_of(row), report.state
        if new != old and new.is_active and is_allowed(old, new):
            transition(session, row, new, events.phase_changed(new), self._context.clock())


def progress_of(live: LiveJob) -> dict[str, Any]:
    """Return how far a job has come, as of the last report of its leader."""
    report = live.leader_report
    assert report, "the leader has reported"
    return Progress(
        step=report.step,
        epoch=report.epoch,
        samples_per_s=live.samples_per_s,
        step_s=report.step_s,
        predicted_step_s=report.predicted_step_s,
        metrics=live.newest_metrics,
    ).model_dump(mode="json")
