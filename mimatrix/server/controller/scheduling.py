"""Let the scheduler decide, and carry out what it decides, job by job."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from sqlalchemy import select
from sqlalchemy.orm import Session

from mimatrix.api.models import JobState
from mimatrix.core.resources import ResourceRequest
from mimatrix.launch import is_transient
from mimatrix.scheduler import (
    Decision,
    Preempt,
    Queued,
    Running,
    SchedulingPolicy,
    Start,
    State,
    Stop,
    StopReason,
    Wait,
    WaitKind,
    WaitReason,
    decide,
)
from mimatrix.scheduler.reasons import to_json
from mimatrix.server.context import Context
from mimatrix.server.controller.clocks import JobClock
from mimatrix.server.controller.faults import Faults, Remedy
from mimatrix.server.controller.nodes import NodeTracker
from mimatrix.server.controller.queue_state import load_jobs, queued_of, running_of, stopping, unreadable_running
from mimatrix.server.controller.speeds import SpeedTable
from mimatrix.server.controller.starting import JobStarter, start_pause_s
from mimatrix.server.controller.teams import TeamFollower
from mimatrix.server.controller.usage import UsageCounter, read_usage
from mimatrix.server.db.models import JobRow
from mimatrix.server.jobs import events
from mimatrix.server.jobs.lifecycle import (
    ACTIVE_STATES,
    WAITING_STATES,
    record_event,
    request_stop,
    state_of,
    transition,
)

_DECIDE_S = 2.0
"""How often to decide when nothing but the time has changed."""
_PROBES = (Queued(-1, ResourceRequest(), priority=1 << 30), Queued(-2, ResourceRequest(), priority=-1))
"""Ordinary jobs that want all devices, so that a decision looks at all that running jobs say.

The first may preempt every other job, the second none.
"""


class Scheduling:
    """Builds the scheduler's state from the database, and applies its decisions."""

    def __init__(
        self,
        context: Context,
        faults: Faults,
        clock: JobClock,
        policy: SchedulingPolicy,
        nodes: NodeTracker,
        teams: TeamFollower,
        starter: JobStarter,
    ) -> None:
        self._context, self._faults, self._clock, self._policy = context, faults, clock, policy
        self._nodes, self._teams, self._starter = nodes, teams, starter
        self._usage = UsageCounter(context)
        self.speeds = SpeedTable(context, faults)
        self._decided_on: object = None
        self._decided_s = float("-inf")

    def run(self) -> None:
        """Decide if something has changed. In most turns nothing has, and then only the time is looked at."""
        columns = (JobRow.id, JobRow.state, JobRow.generation, JobRow.stop_kind, JobRow.priority)
        with self._context.sessions() as session:
            wanted = select(*columns).where(JobRow.state.in_((*ACTIVE_STATES, *WAITING_STATES))).order_by(JobRow.id)
            seen = (self._nodes.version, self._teams.is_holding, session.execute(wanted).all())
        now_s = self._context.monotonic()
        if seen != self._decided_on or now_s - self._decided_s >= _DECIDE_S:
            self.schedule()
            self._decided_on, self._decided_s = seen, now_s

    def schedule(self) -> None:
        """Decide now, and carry it out."""
        self.speeds.refresh()
        state, paused = self._state()
        waits: list[Wait] = []
        for decision in self._decide(state):
            if isinstance(decision, Wait):
                waits.append(decision)
            elif not (isinstance(decision, Start) and self._teams.is_holding):
                with self._faults.contain("schedule", decision.job):
                    self._apply(decision)
        waits += [Wait(job.job, reason) for job, reason in paused]
        self._context.live.set_queue(wait.job for wait in waits)
        self._explain({wait.job: wait.reason for wait in waits})
        self._clock.forget_unused()
        self._usage.count(state.running)

    def _state(self) -> tuple[State, list[tuple[Queued, WaitReason]]]:
        """Return what the scheduler sees, and jobs that wait for another attempt to start them."""
        queued: list[Queued] = []
        paused: list[tuple[Queued, WaitReason]] = []
        contain = partial(self._faults.contain, "schedule", remedy=Remedy.FAIL)
        with self._context.sessions() as session:
            for row in load_jobs(session, WAITING_STATES, contain):
                with contain(row.id):
                    job = queued_of(row, self.speeds.speeds, self._clock.instant)
                    reason = self._pause_of(row)
                    paused.append((job, reason)) if reason else queued.append(job)
            running = self._running(session)
            running += [stopping(job, names, self._nodes.slots) for job, names in self._teams.orphan_devices.items()]
            used = read_usage(session)
        return State(tuple(self._nodes.slots.values()), tuple(queued), tuple(running), used), paused

    def _running(self, session: Session) -> list[Running]:
        """Return active jobs. One that cannot be read is stopped, and keeps its devices until it has ended."""
        contain = partial(self._faults.contain, "schedule", remedy=Remedy.STOP)
        found: dict[int, Running] = {}
        for row in load_jobs(session, ACTIVE_STATES, contain):
            with contain(row.id):
                found[row.id] = running_of(row, self._nodes.slots, self._clock.instant)
        active = session.scalars(select(JobRow.id).where(JobRow.state.in_(ACTIVE_STATES)).order_by(JobRow.id)).all()
        return [found.get(job) or unreadable_running(session, job, self._nodes.slots) for job in active]

    def _pause_of(self, row: JobRow) -> WaitReason | None:
        pause_s = start_pause_s(row.start_failures)
        if not pause_s:
            return None
        left_s = pause_s - (self._clock.now_s() - self._clock.instant("paused", row.id, row.waiting_since))
        return WaitReason(kind=WaitKind.START_PAUSED, at_latest_s=left_s) if left_s > 0 else None

    def _decide(self, state: State) -> Sequence[Decision]:
        """Decide for all; if that raises, without the jobs that make it raise."""
        now_s = self._clock.now_s()
        try:
            return decide(state, now_s, self._policy)
        except Exception as error:
            if is_transient(error):
                raise
        # Running jobs first: for one of them no queued job is to blame.
        state = replace(state, running=self._usable_running(state, now_s))
        usable = []
        for job in state.queued:
            with self._faults.contain("schedule", job.job, Remedy.FAIL):
                decide(replace(state, queued=(job,)), now_s, self._policy)
                usable.append(job)
        return decide(replace(state, queued=tuple(usable)), now_s, self._policy)

    def _usable_running(self, state: State, now_s: float) -> tuple[Running, ...]:
        """Return the running jobs; of those that make a decision raise, only which devices they have.

        Such a job is flagged, and keeps running. What raises without any job is raised: no job is to blame for it.
        """
        probe = replace(state, queued=_PROBES, running=())
        decide(probe, now_s, self._policy)
        usable: list[Running] = []
        for job in state.running:
            try:
                decide(replace(probe, running=(*usable, job)), now_s, self._policy)
                usable.append(job)
            except Exception as error:
                if is_transient(error):
                    raise
                self._faults.add("schedule", job.job, error)
                usable.append(Running(job.job, job.devices))
        return tuple(usable)

    def _apply(self, decision: Start | Preempt | Stop) -> None:
        now_s = self._context.clock()
        with self._context.sessions.begin() as session:
            row = session.get_one(JobRow, decision.job, with_for_update=True)
            if isinstance(decision, Start):
                if not state_of(row).is_waiting:
                    return
                row.allocation, row.stop_kind = [slot.name for slot in decision.devices], ""
                # A restored database may know fewer generations than were started: names of teams are used once.
                row.generation = max(row.generation, self._teams.generations.get(row.id, 0))
                transition(session, row, JobState.STARTING, events.starting(decision.reason), now_s)
                self._clock.instant("started", row.id, now_s)
                generation = row.generation
            else:
                self._stop(session, row, decision.reason)
                return
        with self._faults.contain("start", decision.job, Remedy.FAIL):
            self._starter.start(decision.job, generation)

    def _stop(self, session: Session, row: JobRow, reason: StopReason) -> None:
        now_s = self._context.clock()
        if request_stop(session, row, reason, now_s) and reason.kind.saves:
            self._clock.instant("stop", row.id, now_s)
            live = self._context.live.get(row.id, row.generation)
            if live:
                live.tell_to_leave()
            # From here on no group of it restarts.
            self._starter.forget_rendezvous(row.id, row.generation)

    def _explain(self, reasons: dict[int, WaitReason]) -> None:
        """Write why jobs wait, all at once; most turns have nothing new to say."""
        with self._context.sessions() as session:
            wanted = select(JobRow.id, JobRow.reason_data).where(JobRow.state.in_(WAITING_STATES))
            known = {job: data for job, data in session.execute(wanted) if job in reasons}
        new = [job for job, data in known.items() if _stored_wait(data) != to_json(reasons[job])]
        if not new:
            return
        with self._context.sessions.begin(durable=False) as session:
            for job in new:
                with self._faults.contain("schedule", job), session.begin_nested():
                    row = session.get_one(JobRow, job, with_for_update=True)
                    if state_of(row).is_waiting:
                        explain_wait(session, row, reasons[job], self._context.clock())


def _stored_wait(reason_data: object) -> object:
    """Return the wait that was written before, if what is stored has one."""
    return reason_data.get("wait") if isinstance(reason_data, dict) else None


def explain_wait(session: Session, row: JobRow, reason: WaitReason, now_s: float) -> None:
    """Write why a job waits. Times, counts and the job ahead change all the time; another kind is worth an event."""
    event = events.waiting(reason)
    known = _stored_wait(row.reason_data)
    if not isinstance(known, dict) or known.get("kind") != reason.kind:
        record_event(session, row, event, now_s)
    row.reason, row.reason_data = event.sentence, {"kind": event.kind.value, "wait": to_json(reason)}
