"""Report progress to the job server from time to time, and receive its orders. Training never waits for it."""

import json
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mimatrix.api.client import Client
from mimatrix.api.models import (
    MAX_DOCUMENT_BYTES,
    MAX_LOGGED,
    PROTOCOL,
    Checkpoint,
    CheckpointList,
    DocumentUpload,
    JobState,
    LinkUsage,
    Logged,
    PushReport,
    Report,
    ReportReply,
    Waiting,
)
from mimatrix.core.errors import WorldError
from mimatrix.worker.bounds import as_count, as_measured, as_metric
from mimatrix.worker.device_metrics import device_sampler
from mimatrix.worker.metric_feed import Entry, MetricFeed
from mimatrix.worker.rendezvous import WorkerIdentity
from mimatrix.worker.tensorboard import TensorBoardWriter

logger = logging.getLogger(__name__)
T = TypeVar("T")
_READING = "reading what was logged"
_RETRY_S = 1.0
_MAX_RETRY_S = 10.0
_MAX_METRICS = 32
_IMPORTS_S = 5.0
"""About how long a script takes to import its modules."""
_MIN_STEPS, _MAX_STEPS, _RECENT_S = 3, 100, 3.0
"""A report has means over the steps of the last seconds."""
_TRIMMED = 10
"""One in this many steps, the slowest, is not counted."""
_GOLDEN = 0.618034
"""Its multiples are spread evenly between whole numbers."""
_PARTS = ("compute", "waiting", "communication", "data")
_SPEEDS = ("samples_per_s", "step_s")
_MAX_RUNS = 4
"""Runs of one process whose logs are followed, such as those of two models that are trained together."""


class _FollowedRun:
    """A run, and how much of its log was read."""

    def __init__(self, run: Any) -> None:
        self._run, self._read = run, 0

    def read_log(self) -> list[Entry]:
        """Return what was logged since the last call."""
        new: list[Entry] = self._run.history_from(self._read)
        self._read += len(new)
        return new

    def flush(self) -> None:
        """Have the run record what it was given last."""
        with suppress(RuntimeError):  # a device may have failed, which the script has told
            self._run.flush_log()


class Reporter:
    """The thread that reports for one worker."""

    def __init__(
        self,
        client: Client,
        identity: WorkerIdentity,
        checkpoints: Path,
        sample_link: Callable[[], LinkUsage | None] = lambda: None,
    ) -> None:
        self._client, self._identity, self._checkpoints = client, identity, checkpoints
        self._sample_link, self._tensorboard = sample_link, TensorBoardWriter(checkpoints)
        self._run: Any = None
        self._runs: deque[_FollowedRun] = deque(maxlen=_MAX_RUNS)
        self._feed = MetricFeed()
        self._log_lock = threading.Lock()
        self._is_speaker = identity.rank == 0
        self._is_asked = False
        self._sent_plan_version = -1
        self._sent_profiles = False
        self._sent_checkpoints: tuple[Any, ...] = ()
        self._since_s = time.monotonic()
        self._sample_device = device_sampler()
        self._stopped = threading.Event()
        self._told: set[str] = set()
        """Problems that were logged."""
        self._thread = threading.Thread(target=self._report_until_stopped, name="mimatrix-reports", daemon=True)

    def start(self) -> None:
        """Start to report."""
        self._thread.start()

    def stop(self) -> None:
        """Send a last report with what the script logged last, and end the thread."""
        for followed in self._runs:
            self._attempt("recording what was logged last", followed.flush)
        self._stopped.set()
        self._thread.join(timeout=5.0)
        # The server may not answer: what was logged is in files all the same.
        self._attempt(_READING, self._take_log)
        with self._log_lock:
            self._tensorboard.close()

    def observe(self, run: Any) -> None:
        """Follow a run that starts in this process."""
        self._attempt(_READING, self._take_log)
        self._run = run
        self._runs.append(_FollowedRun(run))
        run.enable_preemption(lambda: self._is_asked, self._checkpoints)

    def _report_until_stopped(self) -> None:
        pause = wait = 0.0
        while not self._stopped.wait(wait):
            pause = self._send_report(pause)
            wait = seconds_until_report(self._identity.job, pause, time.time())
        self._send_report(0.0)
        left = len(self._feed)
        while left:  # more than one report carries, unless the server does not answer
            self._send_report(0.0)
            before, left = left, len(self._feed)
            if left == before:
                break

    def _send_report(self, pause: float) -> float:
        """Report once, and return the seconds until the next report; back off while that fails, whatever the reason."""
        self._attempt(_READING, self._take_log)
        report = self._attempt("describing the run", self._report) or self._minimal_report()
        self._attempt("writing the speed", partial(self._write_speeds, report))
        orders = self._attempt("reporting", partial(self._client.report, self._identity.job, report))
        if orders is not None:
            self._follow(orders, report)
            if self._attempt("sending plan and checkpoints", self._send_documents):
                return orders.report_interval_s
        return min(_MAX_RETRY_S, max(_RETRY_S, 2 * pause))

    def _follow(self, orders: ReportReply, report: Report) -> None:
        """Do what the server has answered."""
        self._is_asked = self._is_asked or orders.leave
        self._feed.drop(len(report.logged))
        if orders.notice:
            logger.warning("%s", orders.notice)
        self._is_speaker = orders.speaks

    def _send_documents(self) -> bool:
        """Send what the server keeps of a job, where it is new."""
        if self._run is not None and self._is_speaker:
            self._attempt("sending the profiles", self._send_profiles)
            self._attempt("sending the plan", self._send_plan)
            self._attempt("sending the checkpoints", self._send_checkpoints)
        return True

    def _attempt(self, what: str, function: Callable[[], T]) -> T | None:
        """Call a function; if it fails, log that once and return None: nothing that fails here may end the thread."""
        try:
            return function()
        except WorldError:
            return None  # the server does not answer, which is told by what waits for it
        except Exception as error:  # noqa: BLE001 (a job that no longer reports is killed without saving)
            reason = " ".join(str(error).split())
            problem = f"{what} failed ({type(error).__name__}: {reason[:200]})"
            if what not in self._told:
                logger.warning("%s; training continues, and it is tried again with the next report", problem)
            self._told.add(what)
            return None

    def _report(self) -> Report:
        identity, run = self._identity, self._run
        values: dict[str, Any] = {"protocol": PROTOCOL, "generation": identity.generation, "rank": identity.rank}
        values |= {"use": self._sample_device(), "traffic": self._sample_link()}
        if run is None:
            return Report(**values, state=JobState.STARTING if self._begins() else JobState.TRAINING)
        stats, plan, status = _recent(run.stats()), run.plan, run.status
        values |= {"state": JobState(status.phase), "step": as_count(run.step)}
        values["epoch"] = as_count(run.position.epoch)
        if stats:
            seconds = sum(step.seconds for step in stats) / len(stats)
            values |= {f"{name}_s": _trimmed_mean(stats, f"{name}_s") for name in _PARTS} | {
                "step_s": _trimmed_mean(stats, "seconds"),
                "samples_per_s": as_measured(sum(run.split.batches) / seconds) if seconds else 0.0,
                "samples": as_count(stats[-1].samples),
                "moved_bytes": as_count(sum(stats[-1].moved_bytes.values())),
            }
        if plan:
            values["predicted_step_s"] = as_measured(plan.step_s)
            values["planned_s"] = as_measured(plan.parts[run.rank].busy_s)
        values |= {"follows": run.settings.follows, "waiting": _waiting(status.waiting), "aside": status.is_excluded}
        values |= {"group": status.group, "pushed": _pushed(status.pushes)}
        waiting = self._feed.waiting(MAX_LOGGED)
        logged = tuple(Logged(step=step, metrics=_bounded(metrics)) for step, metrics in waiting)
        return Report(**values, metrics=_bounded(self._feed.newest), logged=logged)

    def _minimal_report(self) -> Report:
        """Return a report that only says that the rank is there, so that the server's orders still arrive."""
        identity, run = self._identity, self._run
        step = None if run is None else self._attempt("reading the step", lambda: as_count(run.step))
        return Report(
            protocol=PROTOCOL,
            generation=identity.generation,
            rank=identity.rank,
            state=JobState.TRAINING,
            step=step or 0,
        )

    def _take_log(self) -> None:
        """Read what the script has logged, for the next report and for TensorBoard."""
        with self._log_lock:
            for followed in self._runs:
                new = followed.read_log()
                self._feed.add(new, keeps=self._is_speaker)
                if self._is_speaker:
                    self._tensorboard.write(new)

    def _write_speeds(self, report: Report) -> None:
        with self._log_lock:
            if self._run is not None and self._is_speaker:
                self._tensorboard.write_speeds(report.step, {name: getattr(report, name) for name in _SPEEDS})

    def _begins(self) -> bool:
        """Tell whether the script is still starting; one that does not use MiMatrix is taken to train after a while."""
        return time.monotonic() - self._since_s < _IMPORTS_S or "mimatrix.engine.run" in sys.modules

    def _send_profiles(self) -> None:
        """Send the measured profiles once, so that the server knows on which devices jobs like this one run well."""
        measurements = self._run.measurements
        if measurements and not self._sent_profiles:
            self._sent_profiles = True  # also if they are too large to send; plans are sent anyway
            text = measurements.to_text()
            if len(text) < MAX_DOCUMENT_BYTES // 2:
                self._store("profile", json.loads(text))

    def _send_plan(self) -> None:
        plan = self._run.plan
        if plan and plan.version > self._sent_plan_version:
            why = next((why for _, changed, why in self._run.plan_changes if changed.version == plan.version), "")
            self._sent_plan_version, before = plan.version, self._sent_plan_version
            try:
                self._store("plan", plan.to_json() | {"why": why})
            except WorldError:
                self._sent_plan_version = before  # the server does not answer; what it refuses is not sent again
                raise

    def _send_checkpoints(self) -> None:
        checkpoints = self._run.checkpoints
        if checkpoints != self._sent_checkpoints:
            listed = tuple(
                Checkpoint(
                    path=saved.path,
                    step=saved.step,
                    saved_at=datetime.fromtimestamp(saved.at_s, UTC),
                    bytes=saved.bytes,
                )
                for saved in checkpoints
            )
            message = CheckpointList(protocol=PROTOCOL, generation=self._identity.generation, checkpoints=listed)
            self._client.store(self._identity.job, "checkpoints", message)
            self._sent_checkpoints = checkpoints

    def _store(self, what: str, content: dict[str, Any]) -> None:
        message = DocumentUpload(protocol=PROTOCOL, generation=self._identity.generation, content=content)
        self._client.store(self._identity.job, what, message)


def seconds_until_report(job: int, every_s: float, now_s: float) -> float:
    """Return the seconds until the ranks of a job report next: all at once, since a report delays waiting peers.

    Each job has its own time within the interval. A time that is very near is skipped.
    """
    left_s = (job * _GOLDEN * every_s - now_s) % every_s if every_s else 0.0
    return left_s if left_s >= every_s / 4 else left_s + every_s


def _trimmed_mean(stats: list[Any], name: str) -> float:
    """Return the mean without the largest tenth, at least one: a pause in one step does not describe the others."""
    values = sorted(getattr(step, name) for step in stats)
    counted = values[: len(values) - -(-len(values) // _TRIMMED)] or values
    return as_measured(sum(counted) / len(counted))


def _recent(stats: list[Any]) -> list[Any]:
    recent: list[Any] = []
    seconds = 0.0
    for step in reversed(stats[-_MAX_STEPS:]):
        if len(recent) >= _MIN_STEPS and seconds >= _RECENT_S:
            break
        recent.append(step)
        seconds += step.seconds
    return recent[::-1]


def _pushed(stats: Any) -> PushReport | None:
    if stats is None:
        return None
    seconds = {name: as_measured(getattr(stats, name)) for name in ("staleness", "moved_s", "waited_s")}
    return PushReport(pushes=as_count(stats.pushes), samples=as_count(stats.samples), **seconds)


def _waiting(wait: Any) -> Waiting | None:
    if wait is None:
        return None
    seconds = as_measured(time.monotonic() - wait.since_s)
    return Waiting(call=str(wait.call)[:200], round=wait.round, peer=wait.rank, seconds=seconds)


def _bounded(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return what JSON can carry, and not too much of it."""
    return {name[:100]: as_metric(value) for name, value in list(metrics.items())[:_MAX_METRICS]}
