"""The loop of the server: see what the launcher knows, decide, act. Every turn starts from what is written down.

A turn may be cut off anywhere. What is to be done is written before it is done, and doing it twice is doing it once: a
team is started by its name, and a job that is `starting` without a team is started again.
"""

import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from mimatrix.api.models import ACTIVE, JobState, Progress, Report, Role
from mimatrix.core import environment as env
from mimatrix.core.errors import MiMatrixError
from mimatrix.core.exit_codes import BAD_INPUT, PREEMPTED
from mimatrix.core.units import format_seconds
from mimatrix.launch import Member, MemberState, NodeFacts, Phase, Team, TeamState
from mimatrix.scheduler import Decision, End, Policy, Preempt, Queued, Running, Seat, Start, State, Wait, Wish, decide
from mimatrix.scheduler.device_speeds import speed_of_kind, speeds_measured, speeds_seen
from mimatrix.scheduler.fairshare import later
from mimatrix.server.auth.tokens import issue, revoke_of_job
from mimatrix.server.context import Context, team_name
from mimatrix.server.controller.exit_causes import failed_rank, groups_of, last_words, told
from mimatrix.server.controller.group_failures import note_losses
from mimatrix.server.controller.stragglers import Watching
from mimatrix.server.db.models import JobRow, NodeRow, UsageRow
from mimatrix.server.jobs.lifecycle import WAITING, is_active, may_move, move, note
from mimatrix.server.metrics.live_state import LiveJob
from mimatrix.server.metrics.store import History

_LEAVING_S = 120.0
"""Who has not begun to save by then is ended; who has gets as long again."""
_AGAIN_S = 600.0
_TIDY_S, _KEPT_S = 3600.0, 14 * 86_400.0
_SEEN_S = 10.0
"""How old what is known of earlier runs may be."""
_NODES_S = 2.0
"""How often it is written down that nodes are as they were."""
_DECIDED_S = 2.0
"""How often to decide where nothing but the time has changed."""
_MOST_DEVICES = 4096
_CHANGES = re.compile(r", at the latest in \S+|\d+")


@dataclass(frozen=True)
class Serving:
    """What jobs are told, and how they are run."""

    address: str
    """Of this server."""
    words: tuple[str, ...]
    """What runs a script; the script and its arguments follow."""
    environment: Mapping[str, str]
    run_as: str = ""
    checkpoints: str = ""
    """The folder in which every job has one for its checkpoints; all nodes must see it."""
    policy: Policy = field(default_factory=Policy)


class Loop:
    """One server's."""

    def __init__(self, context: Context, serving: Serving, say: Callable[[str], None]) -> None:
        self._context, self._serving, self._say = context, serving, say
        self._nodes: dict[str, NodeFacts] = {}
        self._seats: dict[str, Seat] = {}
        self._nodes_kept_at = float("-inf")
        self._decided_on: object = None
        self._decided_at = float("-inf")
        self._counted_at: float | None = None
        self._seen: dict[tuple[str, str], dict[str, float]] = {}
        self._seen_at = self._tidied_at = float("-inf")
        self._troubles: dict[str, float] = {}
        self._watching = Watching(context, say)
        self._history = History(context.sessions)

    def recover(self) -> None:
        """After a start of the server: running jobs are expected to report."""
        with self._context.sessions() as session:
            for job in _jobs(session, ACTIVE):
                self._context.live.begin(job.id, job.generation, job.seats, leave=bool(job.leaving))

    def turn(self) -> None:
        """One time around."""
        self._see_nodes()
        self._follow_teams()
        self._decide()
        self._watching.look()
        self._keep()
        self._tidy()

    # Nodes

    def _see_nodes(self) -> None:
        now_s = self._context.clock()
        try:
            found = {node.name: node for node in self._context.launcher.nodes()}
        except MiMatrixError as error:
            self._complain(f"nodes cannot be listed: {error}")
            return
        if found == self._nodes and now_s - self._nodes_kept_at < _NODES_S:
            return
        self._nodes, self._seats, self._nodes_kept_at = found, _seats(found.values()), now_s
        with self._context.sessions.begin() as session:
            for node in self._nodes.values():
                devices = [{"kind": each.kind, "memory_bytes": each.memory_bytes} for each in node.devices]
                row = session.get(NodeRow, node.name) or NodeRow(name=node.name)
                row.address, row.near, row.seen_at = node.address, node.near, now_s
                row.devices = {"devices": devices}
                session.add(row)

    # Teams

    def _follow_teams(self) -> None:
        try:
            states = self._context.launcher.states()
        except MiMatrixError as error:
            self._complain(f"teams cannot be listed: {error}")
            return
        with self._context.sessions() as session:
            asked = select(JobRow.id, JobRow.generation).where(JobRow.state.in_(ACTIVE)).order_by(JobRow.id)
            active = [(number, generation) for number, generation in session.execute(asked)]
        running = set()
        for number, generation in active:
            state = states.get(team_name(number, generation))
            if state is None:
                self._start_team(number, generation)
            elif state.has_ended:
                self._conclude(number, generation, state)
            else:
                running.add((number, generation))
                note_losses(self._context, number, generation, state, self._say)
        if running:
            self._follow(running)

    def _start_team(self, number: int, generation: int) -> None:
        """A job was given devices, and nobody has started it yet."""
        context = self._context
        with context.sessions.begin() as session:
            job = session.get_one(JobRow, number, with_for_update=True)
            if job.generation != generation or not is_active(job):
                return
            if job.leaving:
                self._ended(session, job, 0, f"it was not started: {_LEAVING[job.leaving]}")
                return
            revoke_of_job(session, number, context.clock())
            _, secret = issue(session, job.user, Role.WORKER, context.clock(), number)
            archive = context.snapshots.path(job.snapshot)
            if archive is None:
                move(session, job, JobState.FAILED, "its snapshot is gone; submit it again", context.clock())
                return
            self._make_checkpoints(number)
            self._forget_word(job)
            team, seats = self._team(job, secret, archive), tuple(job.seats)
        context.live.begin(number, generation, seats)
        try:
            context.launcher.start(team)
        except MiMatrixError as error:
            with context.sessions.begin() as session:
                job = session.get_one(JobRow, number, with_for_update=True)
                self._fail(session, job, None, f"it could not be started: {error}", is_lost=True)

    def _make_checkpoints(self, number: int) -> None:
        """The folder for a job's checkpoints, owned by whom it runs as."""
        if not self._serving.checkpoints:
            return
        folder = Path(self._serving.checkpoints) / f"job-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        if self._serving.run_as:
            shutil.chown(folder, self._serving.run_as)

    def _team(self, job: JobRow, secret: str, archive: Path) -> Team:
        serving = self._serving
        shared = {
            **serving.environment,
            **job.environment,
            env.SERVER.name: serving.address,
            env.TOKEN.name: secret,
            env.JOB.name: str(job.id),
            env.GENERATION.name: str(job.generation),
            env.CHECKPOINTS.name: f"{serving.checkpoints}/job-{job.id}",
        }
        groups = groups_of(job.environment, len(job.seats))
        if groups and serving.checkpoints:
            shared[env.RENDEZVOUS.name] = str(self._meeting(job))
        members = []
        for rank, seat in enumerate(job.seats):
            node, _, device = seat.rpartition("/")
            members.append(Member(node, int(device), {env.RANK.name: str(rank)}))
        name = team_name(job.id, job.generation)
        words = (*serving.words, job.script, *job.arguments)
        return Team(
            name,
            words,
            tuple(members),
            archive,
            shared,
            run_as=serving.run_as,
            groups=groups,
            restarts=job.retries,
        )

    def _forget_word(self, job: JobRow) -> None:
        """From here on no group of it returns; before it starts, what another job of its number has left is removed."""
        if env.GROUPS.get(job.environment) and self._serving.checkpoints:
            meeting = self._meeting(job)
            with suppress(OSError):
                for word in meeting.parent.glob(f"{meeting.name}*"):
                    word.unlink()

    def _meeting(self, job: JobRow) -> Path:
        """Where groups leave word for those of them that are started again; on all nodes, as checkpoints are."""
        return Path(self._serving.checkpoints) / f"job-{job.id}" / f".meeting-{job.generation}"

    def _follow(self, running: set[tuple[int, int]]) -> None:
        """What rank 0 says becomes the job's state; who was told to go has so long for it."""
        with self._context.sessions.begin() as session:
            asked = select(JobRow).where(JobRow.state.in_(ACTIVE)).order_by(JobRow.id).with_for_update()
            late = [
                team_name(job.id, job.generation)
                for job in session.scalars(asked)
                if (job.id, job.generation) in running and self._is_late(session, job)
            ]
        for name in late:
            try:
                self._context.launcher.end(name)
            except MiMatrixError as error:
                self._complain(f"{name} cannot be ended: {error}")

    def _is_late(self, session: Session, job: JobRow) -> bool:
        """Whether it was told to go and must be made to; what it said last is written down on the way."""
        now_s, live = self._context.clock(), self._context.live.of(job.id, job.generation)
        if live and live.first:
            _take_report(session, job, live, live.first, now_s)
        if live and job.leaving == "preempt":
            live.leave = True
        if job.leaving != "preempt":
            return bool(job.leaving)
        patience_s = _LEAVING_S * (2 if job.state == JobState.SAVING else 1)
        return now_s - (job.leaving_at or now_s) > patience_s

    def _conclude(self, number: int, generation: int, state: TeamState) -> None:
        """No process of it is left."""
        context = self._context
        with context.sessions() as session:
            groups = groups_of(session.get_one(JobRow, number).environment, len(state.members))
        live = context.live.of(number, generation)
        gone = live.gone if live else frozenset()
        rank = failed_rank(state, groups, gone)
        # Before the job is locked, since another machine may have to be asked.
        words = "" if rank is None else last_words(context.launcher, team_name(number, generation), rank)
        with context.sessions.begin() as session:
            job = session.get_one(JobRow, number, with_for_update=True)
            if job.generation != generation or not is_active(job):
                return
            if rank is None:
                self._ended(session, job, 0, _ended_well(state))
                return
            member = state.members[rank]
            reason = told(rank, job.seats[rank] if rank < len(job.seats) else "?", member, words)
            if not job.leaving:
                self._fail(session, job, member.code, reason, is_lost=member.phase is Phase.LOST)
            elif job.leaving == "preempt" and state.first_failure not in gone and _crashed(state, member):
                self._fail(session, job, member.code, f"{reason}; it had been told to save and go", is_lost=False)
            else:
                self._ended(session, job, member.code, reason)

    def _ended(self, session: Session, job: JobRow, code: int | None, reason: str) -> None:
        """As it should, or as it was told."""
        now_s, why = self._context.clock(), job.leaving
        job.exit_code = code
        if why == "preempt" and code != 0:
            saved = "saved, and is in line again" if code == PREEMPTED else "ended without saving; it will begin anew"
            move(session, job, JobState.PREEMPTED, saved, now_s)
        elif why == "cancel":
            move(session, job, JobState.CANCELLED, "cancelled", now_s)
        elif why == "limit":
            limit = format_seconds(job.max_time_s or 0.0)
            move(session, job, JobState.FAILED, f"its time limit of {limit} was over", now_s)
        else:
            move(session, job, JobState.DONE, reason, now_s)
        self._gone(session, job)

    def _fail(self, session: Session, job: JobRow, code: int | None, reason: str, *, is_lost: bool) -> None:
        """Once more, if that may help and was asked for."""
        now_s = self._context.clock()
        job.exit_code = code
        if job.retried < job.retries and (is_lost or code != BAD_INPUT):
            job.retried += 1
            move(session, job, JobState.QUEUED, f"{reason}; retry {job.retried} of {job.retries}", now_s)
        else:
            move(session, job, JobState.FAILED, reason, now_s)
        self._gone(session, job)

    def _gone(self, session: Session, job: JobRow) -> None:
        revoke_of_job(session, job.id, self._context.clock())
        self._context.doorkeeper.forget()
        live = self._context.live.of(job.id, job.generation)
        if live and live.first:
            job.progress = _progress(live, live.first)
        self._history.keep_last(session, self._context.clock(), job.id, live)
        self._context.live.forget(job.id)
        self._forget_word(job)

    def _tidy(self) -> None:
        """Now and then: what jobs that ended long ago printed is forgotten; their events stay."""
        now_s = self._context.clock()
        if now_s - self._tidied_at < _TIDY_S:
            return
        self._tidied_at = now_s
        with self._context.sessions() as session:
            asked = select(JobRow.id, JobRow.generation).where(JobRow.ended_at < now_s - _KEPT_S)
            old = [team_name(number, each) for number, last in session.execute(asked) for each in range(1, last + 1)]
        known = self._context.launcher.states()
        for name in old:
            if name in known and known[name].has_ended:
                self._context.launcher.forget(name)

    # History

    def _keep(self) -> None:
        now_s = self._context.clock()
        if not self._history.is_due(now_s):
            return
        with self._context.sessions() as session:
            used = sum(len(seats) for seats in session.scalars(select(JobRow.seats).where(JobRow.state.in_(ACTIVE))))
            queued = session.scalar(select(func.count(JobRow.id)).where(JobRow.state.in_(WAITING))) or 0
        cluster = {"devices": len(self._seats), "used": used, "queued": queued}
        self._history.keep(now_s, self._context.live.all(), cluster)

    # Usage

    def _count_usage(self) -> None:
        now_s = self._context.clock()
        since_s = self._counted_at if self._counted_at is not None else now_s
        self._counted_at = now_s
        with self._context.sessions.begin() as session:
            rows = {row.user: row for row in session.scalars(select(UsageRow))}
            before = {user: row.amount for user, row in rows.items()}
            running = self._running(session)
            for user, amount in later(before, running, now_s - since_s).items():
                row = rows.get(user) or UsageRow(user=user)
                row.amount, row.at = amount, now_s
                session.add(row)

    # Decisions

    def _decide(self) -> None:
        """A turn in which all is as it was has nothing to decide, and most are such."""
        now_s, live = self._context.clock(), (*ACTIVE, *WAITING)
        columns = (JobRow.id, JobRow.state, JobRow.generation, JobRow.leaving, JobRow.priority)
        with self._context.sessions() as session:
            jobs = session.execute(select(*columns).where(JobRow.state.in_(live)).order_by(JobRow.id)).all()
        found = (self._nodes_kept_at, jobs)
        if found != self._decided_on or not 0 <= now_s - self._decided_at < _DECIDED_S:
            self._decided_on, self._decided_at = found, now_s
            self._count_usage()
            self._schedule()

    def _schedule(self) -> None:
        with self._context.sessions() as session:
            state = self._state(session)
        decisions = decide(state, self._context.clock(), self._serving.policy)
        for decision in decisions:
            if not isinstance(decision, Wait):
                self._apply(decision)
        waits = {_number(each.job): each.reason for each in decisions if isinstance(each, Wait)}
        self._context.live.places = {number: place for place, number in enumerate(waits, start=1)}
        self._note_waits(waits)

    def _state(self, session: Session) -> State:
        now_s = self._context.clock()
        if now_s - self._seen_at > _SEEN_S:
            self._seen |= _seen_speeds(session, self._seen_at)
            self._seen_at = now_s
        return State(
            tuple(self._seats.values()),
            tuple(_queued(job, self._seen) for job in _jobs(session, WAITING)),
            tuple(self._running(session)),
            {row.user: row.amount for row in session.scalars(select(UsageRow))},
        )

    def would(self, job: JobRow) -> Decision:
        """What would be decided about a job that is not written down."""
        with self._context.sessions() as session:
            state = self._state(session)
        asked = State(state.seats, (*state.queued, _queued(job, self._seen)), state.running, state.used)
        decisions = decide(asked, self._context.clock(), self._serving.policy)
        return next(each for each in decisions if isinstance(each, Start | Wait) and each.job == _called(job.id))

    def _running(self, session: Session) -> list[Running]:
        known = self._seats
        return [
            Running(
                _called(job.id),
                tuple(known.get(name) or _unseen(name) for name in job.seats),
                job.user,
                job.priority,
                job.started_at or 0.0,
                job.max_time_s,
                job.preemptible,
                bool(job.leaving),
                job.leaving in ("", "preempt"),
            )
            for job in _jobs(session, ACTIVE)
        ]

    def _note_waits(self, reasons: Mapping[int, str]) -> None:
        """Why jobs wait, all at once; most turns have nothing new to say."""
        with self._context.sessions() as session:
            asked = select(JobRow.id, JobRow.reason).where(JobRow.state.in_(WAITING))
            new = [number for number, reason in session.execute(asked) if reasons.get(number, reason) != reason]
        if not new:
            return
        with self._context.sessions.begin() as session:
            for number in new:
                job = session.get_one(JobRow, number, with_for_update=True)
                if job.state in WAITING:
                    _take_reason(session, job, reasons[number], self._context.clock())

    def _apply(self, decision: Decision) -> None:
        now_s = self._context.clock()
        number = _number(decision.job)
        with self._context.sessions.begin() as session:
            job = session.get_one(JobRow, number, with_for_update=True)
            match decision:
                case Start(_, seats, reason) if job.state in WAITING:
                    job.seats = [seat.name for seat in seats]
                    job.leaving = ""
                    move(session, job, JobState.STARTING, reason, now_s)
                    generation = job.generation
                case Preempt(_, _, reason) if is_active(job) and not job.leaving:
                    job.leaving, job.leaving_at = "preempt", now_s
                    note(session, job, f"told to save and go: {reason}", now_s)
                    self._context.live.tell_to_leave(number)
                    self._forget_word(job)
                    return
                case End(_, reason) if is_active(job) and not job.leaving:
                    job.leaving, job.leaving_at = "limit", now_s
                    note(session, job, f"told to end: {reason}", now_s)
                    return
                case _:
                    return
        self._start_team(number, generation)

    def _complain(self, sentence: str) -> None:
        """Once, and again when it has lasted for a while."""
        now_s = self._context.clock()
        if now_s - self._troubles.get(sentence, float("-inf")) > _AGAIN_S:
            self._troubles = {said: at for said, at in self._troubles.items() if now_s - at <= _AGAIN_S}
            self._troubles[sentence] = now_s
            self._say(sentence)


_LEAVING = {"preempt": "another job needed its devices", "cancel": "it was cancelled", "limit": "its time was over"}


def _jobs(session: Session, states: tuple[JobState, ...]) -> list[JobRow]:
    return list(session.scalars(select(JobRow).where(JobRow.state.in_(states)).order_by(JobRow.id)))


def _seats(nodes: Iterable[NodeFacts]) -> dict[str, Seat]:
    """All devices, by name."""
    seats = [
        Seat(node.name, number, device.kind, speed_of_kind(device.kind), node.near)
        for node in nodes
        for number, device in enumerate(node.devices[:_MOST_DEVICES])
    ]
    return {seat.name: seat for seat in seats}


def _ended_well(state: TeamState) -> str:
    """Of a job whose groups go on without each other, some may have been lost."""
    lost = sum(member.code != 0 for member in state.members)
    return f"all ranks ended well but {lost}, whose groups were lost" if lost else "all ranks ended well"


def _crashed(state: TeamState, member: MemberState) -> bool:
    """Whether it failed by itself: one that was made to go has no first failure, and one that has saved says so."""
    return state.first_failure is not None and member.phase is Phase.EXITED and member.code != PREEMPTED


def _called(number: int) -> str:
    """As the scheduler's reasons name it."""
    return f"job {number}"


def _number(called: str) -> int:
    return int(called.removeprefix("job "))


def _queued(job: JobRow, seen: Mapping[tuple[str, str], Mapping[str, float]]) -> Queued:
    speeds = seen.get((job.user, job.name), {})
    wish = Wish.parse(job.devices)
    return Queued(_called(job.id), wish, job.user, job.priority, job.waiting_since, job.max_time_s, speeds)


def _seen_speeds(session: Session, since_s: float) -> dict[tuple[str, str], dict[str, float]]:
    """By user and name of jobs, from the last plan and curves of each: people hand in the same again and again.

    Of those that ended before `since_s` nothing is new.
    """
    last = select(func.max(JobRow.id)).where(JobRow.plan.is_not(None)).group_by(JobRow.user, JobRow.name)
    is_new = or_(JobRow.ended_at.is_(None), JobRow.ended_at >= since_s)
    asked = select(JobRow.user, JobRow.name, JobRow.plan, JobRow.profile).where(JobRow.id.in_(last), is_new)
    return {
        (user, name): speeds_seen(plan or {}) | speeds_measured(profile or {})
        for user, name, plan, profile in session.execute(asked)
    }


def _unseen(name: str) -> Seat:
    """A device whose node does not answer now; the job has it all the same."""
    node, _, number = name.rpartition("/")
    return Seat(node, int(number))


def _progress(live: LiveJob, report: Report) -> dict[str, Any]:
    return Progress(
        step=report.step,
        epoch=report.epoch,
        samples_per_s=live.samples_per_s,
        step_s=report.step_s,
        predicted_step_s=report.predicted_step_s,
        metrics=live.newest_metrics,
    ).model_dump(mode="json")


def _take_report(session: Session, job: JobRow, live: LiveJob, report: Report, now_s: float) -> None:
    job.progress = _progress(live, report)
    old = JobState(job.state)
    if report.state != old and report.state in ACTIVE and may_move(old, report.state):
        move(session, job, report.state, _SAID[report.state], now_s)


_SAID = {
    JobState.STARTING: "starting",
    JobState.PROFILING: "measuring its devices",
    JobState.TRAINING: "training",
    JobState.SAVING: "saving a checkpoint",
}


def _take_reason(session: Session, job: JobRow, reason: str, now_s: float) -> None:
    """Why it waits. Times, counts and who is first change all the time; an event is worth a change of another kind."""
    if _CHANGES.sub("", job.reason) != _CHANGES.sub("", reason):
        note(session, job, reason, now_s)
    if job.reason != reason:
        job.reason = reason
