"""One turn of the controller: look at what is there, compare it with what is written down, act.

A turn may be cut off anywhere. What is to be done is written before it is done, and doing it twice is doing it once: a
team is started by its name, and a job that is `starting` without a team is started again.

One failure harms one thing: each stage is done by itself, and within it each job, node and team.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Executor

from sqlalchemy import func, select

from mimatrix.scheduler import Start, Wait
from mimatrix.server.context import Context, team_name
from mimatrix.server.controller.clocks import ClockGuard, JobClock
from mimatrix.server.controller.dry_run import dry_run
from mimatrix.server.controller.endings import JobEnder
from mimatrix.server.controller.faults import Faults, RepeatedLog
from mimatrix.server.controller.job_environment import JobEnvironment
from mimatrix.server.controller.nodes import NodeTracker, cluster_point
from mimatrix.server.controller.queue_state import load_jobs
from mimatrix.server.controller.reports import ReportReader
from mimatrix.server.controller.retention import Retention, RetentionSettings, newest_time
from mimatrix.server.controller.scheduling import Scheduling
from mimatrix.server.controller.starting import JobStarter
from mimatrix.server.controller.stragglers import StragglerWatch
from mimatrix.server.controller.teams import TeamFollower
from mimatrix.server.db.models import AllocationRow, JobRow
from mimatrix.server.jobs.lifecycle import ACTIVE_STATES, WAITING_STATES
from mimatrix.server.metrics.store import HistoryStore

logger = logging.getLogger(__name__)


class Controller:
    """The one thread of a server that decides. Teams are started by the threads of `executor`."""

    def __init__(
        self,
        context: Context,
        environment: JobEnvironment,
        executor: Executor,
        retention: RetentionSettings = RetentionSettings(),
    ) -> None:
        self._context, self.environment = context, environment
        self._faults, self._log = Faults(context), RepeatedLog(context.monotonic)
        self._clock = JobClock(context.clock, context.monotonic)
        self._guard = ClockGuard(context.clock, context.monotonic)
        self._history = HistoryStore(context.sessions)
        ender = JobEnder(context, self._faults, environment, self._history)
        starter = self._starter = JobStarter(context, environment, ender, executor)
        self._nodes = NodeTracker(context, self._log)
        self._teams = TeamFollower(context, self._faults, self._log, starter, ender)
        self._reports = ReportReader(context, self._faults, self._clock)
        self._scheduling = Scheduling(
            context, self._faults, self._clock, environment.policy, self._nodes, self._teams, starter
        )
        self._stragglers = StragglerWatch(context, self._faults)
        self._retention = Retention(context, environment, retention, self._guard, self._log)
        self._failing: dict[str, str] = {}
        """The stages that failed in the last turn, and how."""

    def recover(self) -> None:
        """After a start of the server: running jobs are expected to report, and the clock is looked at."""
        newest_s = newest_time(self._context)
        if self._guard.begin(newest_s) and newest_s is not None:
            self._clock.distrust_before(newest_s)
        with self._context.sessions() as session:
            for job in load_jobs(session, ACTIVE_STATES, lambda number: self._faults.contain("recover", number)):
                with self._faults.contain("recover", job.id):
                    self._context.live.begin(job.id, job.generation, job.allocation)
                    self._clock.instant("started", job.id, job.started_at or 0.0)
        self._clock.trust()
        self._faults.settle()

    def reconcile(self) -> None:
        """Do one turn. A stage that fails as a whole does not keep the others from being done."""
        stages: tuple[tuple[str, Callable[[], None]], ...] = (
            ("nodes", self.refresh_nodes),
            ("teams", self.follow_teams),
            ("reports", self.apply_reports),
            ("schedule", self._scheduling.run),
            ("stragglers", self.check_stragglers),
            ("history", self.keep_history),
            ("retention", self.delete_old),
        )
        failing = {name: error for name, stage in stages if (error := self._try(name, stage))}
        self._failing = failing
        if not failing:
            self._context.controller_turned_at_s = self._context.monotonic()

    def stop(self, within_s: float) -> None:
        """Begin no start any more, and wait for those that have begun. The next server does what is left."""
        self._starter.stop(within_s)

    def refresh_nodes(self) -> None:
        """Look which nodes answer."""
        self._nodes.refresh()

    def follow_teams(self) -> None:
        """Start, follow and conclude jobs by what the launcher knows of their teams."""
        self._teams.follow()

    def apply_reports(self) -> None:
        """Take over what jobs report, and end those that were told to stop and did not in time."""
        for job, generation in self._reports.apply(self._teams.running):
            self._teams.end(team_name(job, generation))

    def schedule(self) -> None:
        """Decide which jobs start, wait and stop, whether or not something has changed."""
        self._scheduling.schedule()

    def check_stragglers(self) -> None:
        """Look for ranks that hold others up."""
        self._stragglers.check()

    def keep_history(self) -> None:
        """Write a point of each job and of the cluster, if it is time to."""
        if not self._history.is_due(self._context.clock()):
            return
        with self._context.sessions() as session:
            used = session.scalar(select(func.count(AllocationRow.id)).where(AllocationRow.ended_at.is_(None))) or 0
            queued = session.scalar(select(func.count(JobRow.id)).where(JobRow.state.in_(WAITING_STATES))) or 0
        cluster = cluster_point(self._nodes.slots, used, queued)
        contain = lambda job: self._faults.contain("history", job)  # noqa: E731
        self._history.keep(self._context.clock(), self._context.live.all(), cluster, contain)

    def delete_old(self) -> None:
        """Delete what is older than the settings say, if it is time to."""
        self._retention.run()

    def dry_run(self, job: JobRow) -> Start | Wait:
        """Return what would be decided about a job that is not in the database. Any thread may call this."""
        return dry_run(self._context, self._scheduling.speeds.speeds, self.environment.policy, job)

    def _try(self, name: str, stage: Callable[[], None]) -> str:
        """Do a stage; return what went wrong with it as a whole, which is logged once until it changes."""
        try:
            stage()
            self._faults.settle()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if self._failing.get(name) != text:
                logger.error("the controller's stage %s failed; it is tried again", name, exc_info=error)
            self._faults.settle()
            return text
        return ""
