"""What the first rank of each job reported becomes its state and progress; jobs that do not stop in time are ended."""

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from mimatrix.api.models import JobProgress, JobState, Report
from mimatrix.scheduler import StopKind
from mimatrix.server.context import Context, JobTeam
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
        self._written: dict[JobTeam, tuple[object, ...]] = {}
        """What was written last of each team: a report is written once, and not in every turn."""

    def apply(self, running: frozenset[tuple[int, int]]) -> list[tuple[int, int]]:
        """Take over the reports of these teams; return those that were told to stop and are overdue."""
        overdue = []
        written = {team: known for team, known in self._written.items() if team in running}
        with self._context.sessions.begin(durable=False) as session:
            # Plain columns: a job whose row cannot be read as a whole must be ended all the same.
            columns = (JobRow.id, JobRow.generation, JobRow.state, JobRow.stop_kind, JobRow.stop_requested_at)
            wanted = select(*columns).where(JobRow.state.in_(ACTIVE_STATES)).order_by(JobRow.id)
            for job, generation, state, stop_kind, requested_at in session.execute(wanted).all() if running else ():
                if (job, generation) not in running:
                    continue
                with self._faults.contain("reports", job):
                    if self._is_overdue(job, state, stop_kind, requested_at):
                        overdue.append((job, generation))
                    live = self._context.live.get(job, generation)
                    if live and stop_kind and _saves(stop_kind):
                        live.tell_to_leave()
                    if live and live.leader_report:
                        progress = progress_of(live)
                        if written.get((job, generation)) != (progress, live.leader_report.state, state):
                            with session.begin_nested():
                                state = self._apply(session, job, live, live.leader_report, progress)
                            written[job, generation] = progress, live.leader_report.state, state
        self._written = written
        return overdue

    def _is_overdue(self, job: int, state: str, stop_kind: str, requested_at: float | None) -> bool:
        """Whether it was told to stop and must be made to."""
        if not stop_kind:
            return False
        if not _saves(stop_kind) or not isinstance(requested_at, int | float):
            return True
        grace_s = _GRACE_S * (2 if state == JobState.SAVING else 1)
        return self._clock.now_s() - self._clock.instant("stop", job, requested_at) > grace_s

    def _apply(self, session: Session, job: int, live: LiveJob, report: Report, progress: dict[str, Any]) -> str:
        """Write a report, and return the state of its job."""
        row = session.get_one(JobRow, job, with_for_update=True)
        if row.generation != live.generation or not state_of(row).is_active:
            return row.state
        row.progress = progress
        old, new = state_of(row), report.state
        if new != old and new.is_active and is_allowed(old, new):
            transition(session, row, new, events.phase_changed(new), self._context.clock())
        return row.state


def _saves(stop_kind: str) -> bool:
    """Whether a job that was told to stop may save first; one that was told something unknown may not."""
    return stop_kind in set(StopKind) and StopKind(stop_kind).saves


def progress_of(live: LiveJob) -> dict[str, Any]:
    """Return how far a job has come, as of the last report of its leader."""
    report = live.leader_report
    assert report, "the leader has reported"
    return JobProgress(
        step=report.step,
        epoch=report.epoch,
        samples_per_s=live.samples_per_s,
        step_s=report.step_s,
        predicted_step_s=report.predicted_step_s,
        metrics=live.newest_metrics,
    ).model_dump(mode="json")
