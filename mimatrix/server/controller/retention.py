"""Delete what is older than the settings say, a batch at a time. Nothing is deleted after the clock has jumped."""

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import delete, func, select

from mimatrix.monitor.downsampling import DAY_S, TIERS
from mimatrix.server.context import Context, parse_team_name
from mimatrix.server.controller.clocks import ClockGuard
from mimatrix.server.controller.faults import RepeatedLog
from mimatrix.server.controller.job_environment import JobEnvironment
from mimatrix.server.db.models import (
    AllocationRow,
    AuditRow,
    CodeArchiveRow,
    EventRow,
    JobRow,
    NodeRow,
    SampleRow,
    TokenRow,
)
from mimatrix.server.jobs import events
from mimatrix.server.jobs.lifecycle import ACTIVE_STATES, WAITING_STATES, record_event, state_of

logger = logging.getLogger(__name__)
_SAMPLES_S, _REST_S = 60.0, 3600.0
"""How often to look for old metrics, and for everything else."""
_UNFINISHED = (*ACTIVE_STATES, *WAITING_STATES)
_BATCH = 5000
"""Rows that one transaction deletes at most; the next turn continues."""
_SET_ASIDE, _FOLDERS = ".deleted-", 20
"""Directories of checkpoints that are being deleted, and how many of them at once: it takes a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionSettings:
    """How long things are kept, in seconds. Jobs themselves are kept for good; metrics by `monitor.downsampling`."""

    output_s: float = 14 * DAY_S
    """Output of jobs, after they ended."""
    events_s: float = 365 * DAY_S
    """Events of jobs that have ended."""
    audit_s: float = 365 * DAY_S
    allocations_s: float = 365 * DAY_S
    """Which job had which device, after it was given back."""
    tokens_s: float = 30 * DAY_S
    """Tokens, after they were revoked or their job ended."""
    code_archives_s: float = 30 * DAY_S
    """Code archives, after they were uploaded and the last job that uses them ended."""
    checkpoints_s: float | None = None
    """Checkpoints of jobs, after they ended; None: for good."""
    partial_s: float = DAY_S
    """Uploads that were cut off."""


class Retention:
    """Deletes old rows, files and output."""

    def __init__(
        self,
        context: Context,
        environment: JobEnvironment,
        settings: RetentionSettings,
        guard: ClockGuard,
        log: RepeatedLog,
    ) -> None:
        self._context, self._environment, self._settings = context, environment, settings
        self._guard, self._log = guard, log
        self._samples_s = self._rest_s = float("-inf")

    def run(self) -> None:
        """Delete what is old, if it is time to, and if the clock can be believed. Each kind is done by itself."""
        now_s = self._context.monotonic()
        if not self._guard.check():
            return
        if now_s - self._samples_s >= _SAMPLES_S:
            self._samples_s = now_s
            self._each(self._sample_deletions())
        if now_s - self._rest_s >= _REST_S:
            self._rest_s = now_s
            files = (self._forget_output, self._delete_archives, self._delete_checkpoints)
            self._each((*((act, ()) for act in files), *self._row_deletions()))

    def _each(self, deletions: Any) -> None:
        for act, arguments in deletions:
            try:
                act(*arguments)
            except Exception as error:
                logger.warning("old data cannot be deleted; it is tried again", exc_info=error)

    def _sample_deletions(self) -> Iterator[tuple[Callable[..., None], tuple[Any, ...]]]:
        now_s = self._context.clock()
        for number, tier in enumerate(TIERS):
            old = (SampleRow.tier == number, SampleRow.at < now_s - tier.kept_s)
            yield self._delete_samples, old

    def _delete_samples(self, *old: Any) -> None:
        with self._context.sessions.begin(durable=False) as session:
            session.execute(delete(SampleRow).where(*old))

    def _row_deletions(self) -> Iterator[tuple[Callable[..., None], tuple[Any, ...]]]:
        now_s, settings = self._context.clock(), self._settings
        ended = select(JobRow.id).where(JobRow.ended_at < now_s - settings.events_s)
        yield self._delete, (EventRow, EventRow.at < now_s - settings.events_s, EventRow.job.in_(ended))
        yield self._delete, (AuditRow, AuditRow.at < now_s - settings.audit_s)
        yield self._delete, (AllocationRow, AllocationRow.ended_at < now_s - settings.allocations_s)
        yield self._delete, (TokenRow, TokenRow.ended_at < now_s - settings.tokens_s)

    def _delete(self, table: Any, *old: Any) -> None:
        with self._context.sessions.begin(durable=False) as session:
            batch = list(session.scalars(select(table.id).where(*old).order_by(table.id).limit(_BATCH)))
            if batch:
                session.execute(delete(table).where(table.id.in_(batch)))

    def _forget_output(self) -> None:
        """Have the launcher forget teams of jobs that ended long ago."""
        old_s = self._context.clock() - self._settings.output_s
        known = self._context.launcher.states()
        for name, state in known.items():
            team = parse_team_name(name)
            if team and state.has_ended and self._has_ended_before(team[0], old_s):
                try:
                    self._context.launcher.forget(name)
                except Exception as error:  # noqa: BLE001 (output of other teams is deleted all the same)
                    self._log.warn(f"output of {name} cannot be deleted: {error}")

    def _has_ended_before(self, job: int, old_s: float) -> bool:
        """Whether its job ended long ago. A team without a job is kept: the database may be a restored one."""
        with self._context.sessions() as session:
            ended_at = session.scalar(select(JobRow.ended_at).where(JobRow.id == job))
        return ended_at is not None and ended_at < old_s

    def _delete_archives(self) -> None:
        """Delete code archives that no job needs, and uploads that were cut off."""
        old_s = self._context.clock() - self._settings.code_archives_s
        recent = select(JobRow.code_archive).where(JobRow.state.in_(_UNFINISHED) | (JobRow.ended_at >= old_s))
        old = (CodeArchiveRow.uploaded_at < old_s, CodeArchiveRow.digest.not_in(recent))
        with self._context.sessions() as session:
            digests = list(session.scalars(select(CodeArchiveRow.digest).where(*old).limit(_BATCH)))
        for digest in digests:
            try:
                self._delete_archive(digest)
            except OSError as error:
                self._log.warn(f"code archive {digest} cannot be deleted: {error}")
        # File times are those of the file system, not of the clock that is handed in.
        self._context.code_archives.delete_partial(time.time() - self._settings.partial_s)

    def _delete_archive(self, digest: str) -> None:
        """Delete one archive, unless a job that needs it was submitted meanwhile; submitting locks its row."""
        needed = select(func.count(JobRow.id)).where(JobRow.code_archive == digest, JobRow.state.in_(_UNFINISHED))
        with self._context.sessions.begin() as session:
            row = session.get(CodeArchiveRow, digest, with_for_update=True)
            if row and not session.scalar(needed):
                self._context.code_archives.delete(digest)
                session.delete(row)

    def _delete_checkpoints(self) -> None:
        """Delete checkpoints of jobs that ended long ago; the job and its events stay."""
        kept_s, root = self._settings.checkpoints_s, self._environment.checkpoints
        if kept_s is None or not root:
            return
        old = (JobRow.ended_at < self._context.clock() - kept_s, JobRow.state.not_in(_UNFINISHED))
        with self._context.sessions() as session:
            ended = list(session.scalars(select(JobRow.id).where(*old).order_by(JobRow.id)))
        for job in ended:
            try:
                self._set_aside(job, kept_s)
            except OSError as error:
                self._log.warn(f"checkpoints of job {job} cannot be deleted: {error}")
        # Also what was set aside before the server was killed.
        for folder in sorted(Path(root).glob(f"{_SET_ASIDE}*"))[:_FOLDERS]:
            try:
                shutil.rmtree(folder)
            except OSError as error:
                self._log.warn(f"{folder} cannot be deleted: {error}")

    def _set_aside(self, job: int, kept_s: float) -> None:
        """Rename the directory of a job's checkpoints, unless the job was queued again meanwhile.

        Renaming is quick, so the job's row is locked for a moment only.
        """
        folder = self._environment.checkpoints_of(job)
        if folder is None or not folder.is_dir():
            return
        aside = folder.with_name(f"{_SET_ASIDE}{folder.name}")
        is_renamed = False
        try:
            with self._context.sessions.begin() as session:
                row = session.get_one(JobRow, job, with_for_update=True)
                if not state_of(row).is_final:
                    return
                row.checkpoints = []
                record_event(session, row, events.checkpoints_deleted(kept_s), self._context.clock())
                session.flush()
                folder.rename(aside)
                is_renamed = True
        except Exception:
            # The transaction was not committed, so the job still has them.
            if is_renamed:
                aside.rename(folder)
            raise


def newest_time(context: Context) -> float | None:
    """Return the newest stored wall time, by which a jump of the clock since the last start is noticed."""
    with context.sessions() as session:
        columns = (EventRow.at, NodeRow.seen_at, SampleRow.at, AuditRow.at)
        times = [session.scalar(select(func.max(column))) for column in columns]
    return max((at_s for at_s in times if at_s is not None), default=None)
