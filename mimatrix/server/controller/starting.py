"""Start the team of a job that was given devices.

The launcher is called by another thread, since a start may take half a minute. All else is done by the controller's
thread: it prepares a start, looks in its next turns whether it is over, and writes down how it ended.
"""

import json
import logging
import shutil
from collections.abc import Sequence
from concurrent.futures import Executor, Future, wait
from pathlib import Path

from sqlalchemy.orm import Session

from mimatrix.api.models import JobState, Role
from mimatrix.core import environment as env
from mimatrix.core.errors import UserError, WorldError
from mimatrix.hybrid.groups import Groups, check_groups
from mimatrix.launch import Member, StartError, Team
from mimatrix.server.auth.tokens import issue, revoke_of_job
from mimatrix.server.context import Context, JobTeam, team_name
from mimatrix.server.controller.endings import JobEnder
from mimatrix.server.controller.job_environment import JobEnvironment
from mimatrix.server.db.models import JobRow
from mimatrix.server.jobs import events
from mimatrix.server.jobs.lifecycle import state_of, transition

logger = logging.getLogger(__name__)
_CHECKPOINT_EVERY = "15m"
"""How often a job saves by itself, unless its environment says something else."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 600.0


def start_pause_s(failures: int) -> float:
    """Return how long to wait after this number of failed starts."""
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(failures - 1, 20)) if failures else 0.0


class JobStarter:
    """Starts teams. What is to be done is written before, so that it is done again if it was cut off.

    A start that is pending is known to this object alone: after a crash of the server its job is `starting`, with a
    team or without one.
    """

    def __init__(self, context: Context, environment: JobEnvironment, ender: JobEnder, executor: Executor) -> None:
        self._context, self._environment, self._ender = context, environment, ender
        self._executor = executor
        self._pending: dict[JobTeam, Future[None]] = {}

    @property
    def pending(self) -> frozenset[JobTeam]:
        """Jobs whose teams are being started now; what the launcher says of these teams may not last."""
        return frozenset(self._pending)

    @property
    def finished(self) -> tuple[JobTeam, ...]:
        """Those of the pending starts that are over, and can be settled."""
        return tuple(team for team, start in self._pending.items() if start.done() and not start.cancelled())

    def start(self, job: int, generation: int) -> None:
        """Begin to start a job that has devices and no team, unless that is pending already."""
        if (job, generation) in self._pending:
            return
        try:
            team = self._prepare(job, generation)
        except UserError as error:
            self._refuse(job, generation, str(error))
            return
        except (WorldError, OSError) as error:
            self._put_back(job, generation, str(error))
            return
        if team:
            start = self._executor.submit(self._context.launcher.start, team)
            self._pending[job, generation] = start
            start.add_done_callback(lambda _: self._context.wake.set())
            if start.done():
                self.settle(job, generation)

    def settle(self, job: int, generation: int) -> None:
        """Write down how a start ended that is over.

        A failure that may pass (no descriptors, no memory, a full disk, a node that is silent) puts the job back into
        the queue, with a pause that grows; that is not a restart, since the job did not run.
        """
        try:
            self._pending.pop((job, generation)).result()
        except UserError as error:
            self._refuse(job, generation, str(error))
        except StartError as error:
            end = self._put_back if error.is_transient else self._refuse
            end(job, generation, str(error))
        except (WorldError, OSError) as error:
            self._put_back(job, generation, str(error))

    def withdraw(self, job: int, generation: int) -> None:
        """Forget a start that no thread has begun, of a job that is to stop; one that has begun is ended as a team."""
        if self._pending[job, generation].cancel():
            del self._pending[job, generation]

    def stop(self, within_s: float) -> None:
        """Begin no start any more, and wait for a while for those that have begun."""
        starts = list(self._pending.values())
        wait([start for start in starts if not start.cancel()], timeout=max(0.0, within_s))

    def forget_rendezvous(self, job: int, generation: int) -> None:
        """Let no group of this generation restart any more."""
        self._ender.forget_rendezvous(job, generation)

    def _prepare(self, job: int, generation: int) -> Team | None:
        context = self._context
        with context.sessions.begin() as session:
            row = session.get_one(JobRow, job, with_for_update=True)
            if row.generation != generation or not state_of(row).is_active:
                return None
            if row.stop_kind:
                self._ender.end_unstarted(session, row)
                return None
            archive = context.code_archives.path(row.code_archive)
            if archive is None:
                raise UserError("its code archive is gone; submit it again")
            team = self._team(session, row, archive)
            devices = tuple(row.allocation)
        context.live.begin(job, generation, devices)
        return team

    def _refuse(self, job: int, generation: int, error: str) -> None:
        with self._context.sessions.begin() as session:
            row = session.get_one(JobRow, job, with_for_update=True)
            if row.generation != generation or not state_of(row).is_active:
                return
            if row.stop_kind:
                self._ender.end_unstarted(session, row)
            else:
                transition(session, row, JobState.FAILED, events.unstartable(error), self._context.clock())
                self._ender.clean_up(session, row, generation)

    def _put_back(self, job: int, generation: int, error: str) -> None:
        with self._context.sessions.begin() as session:
            row = session.get_one(JobRow, job, with_for_update=True)
            if row.generation != generation or not state_of(row).is_active:
                return
            if row.stop_kind:
                self._ender.end_unstarted(session, row)
                return
            row.start_failures += 1
            event = events.start_failed(error, row.start_failures, start_pause_s(row.start_failures))
            transition(session, row, JobState.QUEUED, event, self._context.clock())
            self._ender.clean_up(session, row, generation)
        logger.warning("job %d: %s", job, event.sentence)

    def _team(self, session: Session, row: JobRow, archive: Path) -> Team:
        groups = check_groups(row.groups, len(row.allocation)) if row.groups else ()
        folder = self._environment.checkpoints_of(row.id)
        if folder:
            _make_folder(folder, self._environment.run_as)
        self._ender.forget_rendezvous(row.id, row.generation)
        revoke_of_job(session, row.id, self._context.clock())
        _, secret = issue(session, row.user, Role.WORKER, self._context.clock(), row.id)
        rendezvous = self._environment.rendezvous_of(row.id, row.generation) if groups else None
        return Team(
            name=team_name(row.id, row.generation),
            command=(*self._environment.command, row.script, *row.arguments),
            members=_members(row.allocation),
            archive=archive,
            environment=self._variables(row, secret, groups, rendezvous),
            run_as=self._environment.run_as,
            groups=groups,
            restarts=row.max_restarts,
            restart_after=str(rendezvous or ""),
        )

    def _variables(self, row: JobRow, secret: str, groups: Groups, rendezvous: Path | None) -> dict[str, str]:
        """Return the environment of its processes: what the server sets wins."""
        folder = self._environment.checkpoints_of(row.id)
        shared = {
            **({env.CHECKPOINT_EVERY.name: _CHECKPOINT_EVERY} if folder else {}),
            **self._environment.variables,
            **{name: value for name, value in row.environment.items() if name != env.GROUPS.name},
            env.SERVER.name: self._environment.address,
            env.TOKEN.name: secret,
            env.JOB.name: str(row.id),
            env.GENERATION.name: str(row.generation),
            env.CHECKPOINTS.name: str(folder or ""),
        }
        if groups:
            shared[env.GROUPS.name] = json.dumps(groups)
            if rendezvous:
                shared[env.RENDEZVOUS.name] = str(rendezvous)
        return shared


def _members(devices: Sequence[str]) -> tuple[Member, ...]:
    members = []
    for rank, name in enumerate(devices):
        node, _, number = name.rpartition("/")
        members.append(Member(node, int(number), {env.RANK.name: str(rank)}))
    return tuple(members)


def _make_folder(folder: Path, user: str) -> None:
    """Make the directory for a job's checkpoints, owned by the user whose processes write it."""
    folder.mkdir(parents=True, exist_ok=True)
    if user:
        shutil.chown(folder, user)
