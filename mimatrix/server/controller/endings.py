"""Conclude jobs whose processes have ended: done, failed, restarted, preempted or cancelled."""

from contextlib import suppress

from sqlalchemy.orm import Session

from mimatrix.api.models import JobState
from mimatrix.core.exit_codes import BAD_INPUT, PREEMPTED
from mimatrix.launch import MemberState, Phase, TeamState
from mimatrix.scheduler import StopKind
from mimatrix.server.auth.tokens import revoke_of_job
from mimatrix.server.context import Context, team_name
from mimatrix.server.controller.exit_causes import Groups, failed_rank, failure_of
from mimatrix.server.controller.faults import Faults
from mimatrix.server.controller.job_environment import JobEnvironment
from mimatrix.server.controller.reports import progress_of
from mimatrix.server.db.models import JobRow
from mimatrix.server.jobs import events
from mimatrix.server.jobs.events import RankFailure
from mimatrix.server.jobs.lifecycle import state_of, transition
from mimatrix.server.metrics.store import HistoryStore


class JobEnder:
    """Writes down how jobs ended, and cleans up after them."""

    def __init__(self, context: Context, faults: Faults, environment: JobEnvironment, history: HistoryStore) -> None:
        self._context, self._faults = context, faults
        self._environment, self._history = environment, history

    def conclude(self, job: int, generation: int, state: TeamState) -> None:
        """Conclude a job of whose team no process is left."""
        context = self._context
        with context.sessions() as session:
            known = session.get_one(JobRow, job)
            groups: Groups = tuple(tuple(group) for group in known.groups)
            devices = tuple(known.allocation)
        live = context.live.get(job, generation)
        lost = live.lost_ranks if live else frozenset()
        rank = failed_rank(state, groups, lost)
        # Before the job is locked, since another machine may have to be asked.
        failure = (
            None if rank is None else failure_of(context.launcher, team_name(job, generation), rank, state, devices)
        )
        with context.sessions.begin() as session:
            row = session.get_one(JobRow, job, with_for_update=True)
            if row.generation != generation or not state_of(row).is_active:
                return
            if failure is None:
                self._end(session, row, None, lost=sum(member.code != 0 for member in state.members))
            elif not row.stop_kind:
                self._fail(session, row, failure, state.members[failure.rank])
            elif (
                row.stop_kind == StopKind.PREEMPT and state.first_failure not in lost and _crashed(state, failure.rank)
            ):
                self._fail(session, row, failure, state.members[failure.rank], was_preempted=True)
            else:
                self._end(session, row, failure)
            self.clean_up(session, row, generation)

    def end_unstarted(self, session: Session, row: JobRow) -> None:
        """End a job that was told to stop before it was started."""
        event = events.not_started(StopKind(row.stop_kind))
        transition(session, row, JobState(event.kind.value), event, self._context.clock())
        self.clean_up(session, row, row.generation)

    def clean_up(self, session: Session, row: JobRow, generation: int) -> None:
        """Take away what its processes had: tokens, live state, the rendezvous file."""
        revoke_of_job(session, row.id, self._context.clock())
        self._context.authenticator.clear()
        live = self._context.live.get(row.id, generation)
        if live:
            with self._faults.contain("history", row.id), session.begin_nested():
                self._history.keep_last(session, self._context.clock(), row.id, live)
                row.progress = progress_of(live) if live.leader_report else row.progress
        self._context.live.forget(row.id)
        self.forget_rendezvous(row.id, generation)

    def forget_rendezvous(self, job: int, generation: int) -> None:
        """Remove the file by which restarted groups find the others: no group of this generation restarts any more."""
        rendezvous = self._environment.rendezvous_of(job, generation)
        if rendezvous:
            with suppress(OSError):
                for file in rendezvous.parent.glob(f"{rendezvous.name}*"):
                    file.unlink()

    def _end(self, session: Session, row: JobRow, failure: RankFailure | None, *, lost: int = 0) -> None:
        """End it as it should, or as it was told."""
        code = failure.cause.returncode if failure else 0
        self._write_cause(row, failure)
        state, event = JobState.DONE, events.done(lost)
        if failure and row.stop_kind and StopKind(row.stop_kind).saves:
            state, event = JobState.PREEMPTED, events.preempted(saved=code == PREEMPTED)
        elif row.stop_kind == StopKind.CANCEL:
            state, event = JobState.CANCELLED, events.cancelled()
        elif row.stop_kind == StopKind.TIME_LIMIT:
            state, event = JobState.FAILED, events.limit_reached(row.max_time_s or 0.0)
        elif failure:
            state, event = JobState.FAILED, events.failed(failure)
        transition(session, row, state, event, self._context.clock())

    def _fail(
        self, session: Session, row: JobRow, failure: RankFailure, member: MemberState, *, was_preempted: bool = False
    ) -> None:
        """Restart it if that may help and was asked for."""
        self._write_cause(row, failure)
        may_help = member.phase is Phase.LOST or member.code != BAD_INPUT
        if row.restarts < row.max_restarts and may_help:
            row.restarts += 1
            event = events.restarted(failure, row.restarts, row.max_restarts)
            transition(session, row, JobState.QUEUED, event, self._context.clock())
        else:
            event = events.failed(failure, was_preempted=was_preempted)
            transition(session, row, JobState.FAILED, event, self._context.clock())

    def _write_cause(self, row: JobRow, failure: RankFailure | None) -> None:
        row.exit_code = failure.cause.returncode if failure else 0
        row.exit_cause = failure.cause.to_json() if failure else None
        row.failed_rank = failure.rank if failure else None
        row.start_failures = 0


def _crashed(state: TeamState, rank: int) -> bool:
    """Whether it failed by itself: a rank that saved and stopped says so by its exit code."""
    member = state.members[rank]
    return state.first_failure is not None and member.phase is Phase.EXITED and member.code != PREEMPTED
