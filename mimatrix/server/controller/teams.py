"""Compare the teams that the launcher knows with the jobs that have devices: start, follow, conclude, end."""

import logging
from collections.abc import Collection, Mapping

from sqlalchemy import select

from mimatrix.core.errors import MiMatrixError
from mimatrix.launch import TeamState
from mimatrix.server.context import Context, JobTeam, parse_team_name, team_name
from mimatrix.server.controller.endings import JobEnder
from mimatrix.server.controller.faults import Faults, Remedy, RepeatedLog
from mimatrix.server.controller.group_failures import record_group_failures
from mimatrix.server.controller.starting import JobStarter
from mimatrix.server.db.models import AllocationRow, JobRow
from mimatrix.server.jobs.lifecycle import ACTIVE_STATES

logger = logging.getLogger(__name__)
_HOLD_S = 30.0
"""How long no job starts because a team runs of which the server does not know the devices."""


class TeamFollower:
    """Starts teams that should run, concludes those that have ended, ends those that should not run."""

    def __init__(
        self, context: Context, faults: Faults, log: RepeatedLog, starter: JobStarter, ender: JobEnder
    ) -> None:
        self._context, self._faults, self._log = context, faults, log
        self._starter, self._ender = starter, ender
        self._orphans: dict[str, float] = {}
        """Teams that the database does not know, and since when."""
        self.running: frozenset[JobTeam] = frozenset()
        self.generations: Mapping[int, int] = {}
        """The newest generation of each job that the launcher knows, whatever the database says."""
        self.orphan_devices: Mapping[int, tuple[str, ...]] = {}
        """Devices of teams that are being ended, by job."""

    def follow(self) -> None:
        """Look at all teams and all active jobs.

        The launcher is asked before the database: a job is written down before its team starts, so a team that the
        launcher listed and the database does not know was not started a moment ago. Starts are settled before that:
        one that was over then is in what the launcher lists, or has failed.
        """
        for job, generation in self._starter.finished:
            with self._faults.contain("start", job, Remedy.FAIL):
                self._starter.settle(job, generation)
        try:
            states = self._context.launcher.states()
        except MiMatrixError as error:
            self._log.warn(f"teams cannot be listed: {error}")
            return
        with self._context.sessions() as session:
            columns = (JobRow.id, JobRow.generation, JobRow.stop_kind)
            wanted = select(*columns).where(JobRow.state.in_(ACTIVE_STATES)).order_by(JobRow.id)
            active = {(job, generation): bool(stop) for job, generation, stop in session.execute(wanted)}
        self._end_unknown(states, active)
        running = set[JobTeam]()
        pending = self._starter.pending
        for (job, generation), is_stopping in active.items():
            state = states.get(team_name(job, generation))
            if (job, generation) in pending and (state is None or state.has_ended):
                # The thread that starts it tells how that ended.
                if is_stopping:
                    self._starter.withdraw(job, generation)
            elif state is None:
                with self._faults.contain("start", job, Remedy.FAIL):
                    self._starter.start(job, generation)
            elif state.has_ended:
                with self._faults.contain("end", job, Remedy.FAIL):
                    self._ender.conclude(job, generation, state)
            else:
                running.add((job, generation))
                with self._faults.contain("groups", job):
                    record_group_failures(self._context, job, generation, state)
        self.running = frozenset(running)

    @property
    def is_holding(self) -> bool:
        """Whether no job may start, since a team runs on devices that are unknown."""
        now_s = self._context.monotonic()
        unknown = (
            name for name in self._orphans if (found := parse_team_name(name)) and found[0] not in self.orphan_devices
        )
        return any(now_s - self._orphans[name] < _HOLD_S for name in unknown)

    def _end_unknown(self, states: Mapping[str, TeamState], active: Collection[JobTeam]) -> None:
        """End teams that run without an active job: of a database that was restored, or lost its last commit.

        One that is still being started has its devices, too, and is ended once the launcher lists it.
        """
        teams = {found: name for name in states if (found := parse_team_name(name))}
        newest: dict[int, int] = {}
        for job, generation in teams:
            newest[job] = max(generation, newest.get(job, 0))
        self.generations = newest
        unknown = {team: name for team, name in teams.items() if team not in active and not states[name].has_ended}
        for name in unknown.values():
            if name not in self._orphans:
                logger.warning("team %s runs, and the database knows no such job that does; it is ended", name)
            self.end(name)
        now_s = self._context.monotonic()
        self._orphans = {name: self._orphans.get(name, now_s) for name in unknown.values()}
        lost = [*unknown, *(team for team in self._starter.pending if team not in active and team not in unknown)]
        self.orphan_devices = self._devices_of(lost) if lost else {}

    def end(self, name: str) -> None:
        """Tell a team to end; a launcher that cannot do so now is asked again in the next turn."""
        try:
            self._context.launcher.end(name)
        except (MiMatrixError, OSError) as error:
            self._log.warn(f"{name} cannot be ended: {error}")

    def _devices_of(self, teams: list[JobTeam]) -> dict[int, tuple[str, ...]]:
        found: dict[int, tuple[str, ...]] = {}
        with self._context.sessions() as session:
            for job, generation in teams:
                held = (AllocationRow.job == job, AllocationRow.generation == generation)
                devices = tuple(session.scalars(select(AllocationRow.device).where(*held).order_by(AllocationRow.id)))
                if devices:
                    found[job] = (*found.get(job, ()), *devices)
        return found
