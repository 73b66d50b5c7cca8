"""One failure harms one thing: exceptions are contained per job, told once, and recorded on that job alone.

What is to be written about a job is written after its stage, in a transaction of its own: a stage may hold one open.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from mimatrix.launch import is_transient
from mimatrix.scheduler import StopKind
from mimatrix.server.auth.tokens import revoke_of_job
from mimatrix.server.context import Context
from mimatrix.server.db.engine import DATABASE_UNAVAILABLE
from mimatrix.server.db.models import EventRow, JobRow
from mimatrix.server.jobs.events import JobEvent, server_error
from mimatrix.server.jobs.lifecycle import ACTIVE_STATES, fail_by_id, record_event_by_id

logger = logging.getLogger(__name__)
_MAX_REMEMBERED = 10_000
_MAX_TEXT = 200
_REPEAT_S = 600.0


class Remedy(Enum):
    """What becomes of a job that raised an exception."""

    FLAG = "flag"
    """It continues; an event says what went wrong."""
    STOP = "stop"
    """Its processes are ended."""
    FAIL = "fail"
    """It has failed."""


@dataclass(frozen=True, slots=True)
class _Fault:
    stage: str
    job: int
    error: str
    remedy: Remedy


class Faults:
    """Contains exceptions of one job at a time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._log = RepeatedLog(context.monotonic)
        self._pending: list[_Fault] = []
        self._known: OrderedDict[_Fault, None] = OrderedDict()

    @contextmanager
    def contain(self, stage: str, job: int, remedy: Remedy = Remedy.FLAG) -> Iterator[None]:
        """Keep an exception from reaching other jobs.

        A database that does not answer is not the fault of a job: that is raised. Nor is a machine that is short of
        memory, descriptors or disk space: that is only logged, and the next turn tries again.
        """
        try:
            yield
        except DATABASE_UNAVAILABLE:
            raise
        except Exception as error:  # noqa: BLE001 (other jobs must not suffer)
            self.add(stage, job, error, remedy)

    def add(self, stage: str, job: int, error: Exception, remedy: Remedy = Remedy.FLAG) -> None:
        """Remember a fault until `settle`. The same one is logged and recorded once."""
        text = f"{type(error).__name__}: {error}".splitlines()[0][:_MAX_TEXT]
        if is_transient(error):
            self._log.warn(f"job {job}: {stage} failed for the moment ({text}); it is tried again")
            return
        fault = _Fault(stage, job, text, remedy)
        if fault not in self._known:
            logger.error("job %d: %s failed", job, stage, exc_info=error)
            self._known[fault] = None
            if len(self._known) > _MAX_REMEMBERED:
                self._known.popitem(last=False)
            self._pending.append(fault)
        elif remedy is not Remedy.FLAG:
            self._pending.append(fault)

    def settle(self) -> None:
        """Write what is pending, each fault by itself."""
        pending, self._pending = self._pending, []
        for fault in pending:
            try:
                with self._context.sessions.begin() as session:
                    self._settle(session, fault)
            except Exception:
                # If it is raised again, it is recorded then.
                self._known.pop(fault, None)
                logger.exception("job %d: what went wrong cannot be recorded", fault.job)

    def _settle(self, session: Session, fault: _Fault) -> None:
        now_s = self._context.clock()
        event = server_error(fault.stage, fault.error, has_ended=fault.remedy is Remedy.FAIL)
        if fault.remedy is Remedy.FAIL:
            if fail_by_id(session, fault.job, event, now_s):
                revoke_of_job(session, fault.job, now_s)
                self._context.authenticator.clear()
                self._context.live.forget(fault.job)
            return
        active = JobRow.state.in_(ACTIVE_STATES)
        if fault.remedy is Remedy.STOP:
            stopped = update(JobRow).where(JobRow.id == fault.job, active, JobRow.stop_kind == "")
            session.execute(stopped.values(stop_kind=StopKind.UNUSABLE.value, stop_requested_at=now_s))
        if not _is_recorded(session, fault.job, event):
            session.execute(update(JobRow).where(JobRow.id == fault.job).values(server_error=event.sentence))
            record_event_by_id(session, fault.job, event, now_s)


def _is_recorded(session: Session, job: int, event: JobEvent) -> bool:
    """Whether a job has this event since it was started last."""
    generation = select(JobRow.generation).where(JobRow.id == job).scalar_subquery()
    known = (EventRow.job == job, EventRow.generation == generation, EventRow.kind == event.kind)
    return any(data == event.data for data in session.scalars(select(EventRow.data).where(*known)))


class RepeatedLog:
    """Logs a sentence once, and again when it still holds after a while."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._said: dict[str, float] = {}

    def warn(self, sentence: str) -> None:
        """Log a warning, unless it was logged a moment ago."""
        now_s = self._monotonic()
        if now_s - self._said.get(sentence, float("-inf")) > _REPEAT_S:
            self._said = {said: at_s for said, at_s in self._said.items() if now_s - at_s <= _REPEAT_S}
            self._said[sentence] = now_s
            logger.warning("%s", sentence)
