"""What happens to jobs, as values: one function per kind of event, and the only place of their sentences.

Code compares kinds and data, never sentences.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mimatrix.api.models import EventKind, JobState
from mimatrix.core.units import format_duration, format_seconds
from mimatrix.launch import ExitCause
from mimatrix.scheduler.reasons import StartReason, StopKind, StopReason, WaitReason, to_json


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One event: its kind, the sentence for people, and the same as numbers and short strings."""

    kind: EventKind
    sentence: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The rank that made a job, or one of its groups, end: where it ran, how it ended, what it printed last."""

    rank: int
    device: str
    cause: ExitCause
    last_line: str = ""

    def describe(self) -> str:
        """Return `rank 0 on n/0 ended with exit code 1; its last line: "ValueError: no"`."""
        line = f'; its last line: "{self.last_line}"' if self.last_line else ""
        return f"rank {self.rank} on {self.device} {self.cause.describe()}{line}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"rank": self.rank, "device": self.device, "cause": self.cause.to_json(), "last_line": self.last_line}


_PHASES = {
    JobState.STARTING: "starting",
    JobState.PROFILING: "measuring its devices",
    JobState.TRAINING: "training",
    JobState.SAVING: "saving a checkpoint",
}
_UNSTARTED = {
    StopKind.PREEMPT: "another job needed its devices",
    StopKind.CANCEL: "it was cancelled",
    StopKind.TIME_LIMIT: "its time limit was over",
}


def submitted(user: str) -> JobEvent:
    """Return the event: a user submitted it."""
    return JobEvent(EventKind.SUBMITTED, f"submitted by {user}", {"user": user})


def priority_changed(user: str, priority: int) -> JobEvent:
    """Return the event: a user changed its priority."""
    data = {"user": user, "priority": priority}
    return JobEvent(EventKind.PRIORITY_CHANGED, f"priority {priority}, by {user}", data)


def waiting(reason: WaitReason) -> JobEvent:
    """Return the event: it waits, for this reason."""
    return JobEvent(EventKind.WAITING, reason.describe(), {"wait": to_json(reason)})


def starting(reason: StartReason) -> JobEvent:
    """Return the event: it was given devices."""
    return JobEvent(EventKind.STARTING, reason.describe(), {"start": to_json(reason)})


def phase_changed(state: JobState) -> JobEvent:
    """Return the event: its first rank reported another state."""
    return JobEvent(EventKind.PHASE_CHANGED, _PHASES[state], {"state": state.value})


def stop_requested(reason: StopReason) -> JobEvent:
    """Return the event: it was told to stop."""
    how = "told to save and stop" if reason.kind.saves else "told to end"
    return JobEvent(EventKind.STOP_REQUESTED, f"{how}: {reason.describe()}", {"stop": to_json(reason)})


def preempted(*, saved: bool) -> JobEvent:
    """Return the event: it stopped to make room."""
    how = "checkpoint saved; requeued" if saved else "stopped without a checkpoint; it starts from the last one"
    return JobEvent(EventKind.PREEMPTED, how, {"saved": saved})


def not_started(kind: StopKind) -> JobEvent:
    """Return the event: it was told to stop before it was started."""
    why = _UNSTARTED.get(kind, "it was told to stop")
    event = EventKind.CANCELLED if kind is StopKind.CANCEL else EventKind.FAILED
    event = EventKind.PREEMPTED if kind.saves else event
    return JobEvent(event, f"it was not started: {why}", {"stop_kind": kind.value})


def cancelled(user: str = "") -> JobEvent:
    """Return the event: a user cancelled it."""
    return JobEvent(EventKind.CANCELLED, f"cancelled by {user}" if user else "cancelled", {"user": user})


def limit_reached(limit_s: float) -> JobEvent:
    """Return the event: its time limit ended it."""
    sentence = f"its time limit of {format_seconds(limit_s)} was over"
    return JobEvent(EventKind.FAILED, sentence, {"limit_s": limit_s})


def done(lost_ranks: int) -> JobEvent:
    """Return the event: all ranks ended well, or all that were not lost with their groups."""
    but = f" but {lost_ranks}, whose groups were lost" if lost_ranks else ""
    return JobEvent(EventKind.DONE, f"all ranks ended well{but}", {"lost_ranks": lost_ranks})


def failed(failure: RankFailure, *, was_preempted: bool = False) -> JobEvent:
    """Return the event: a rank failed, and the job with it."""
    told = "; it had been told to save and stop" if was_preempted else ""
    return JobEvent(EventKind.FAILED, failure.describe() + told, failure.to_json())


def restarted(failure: RankFailure, number: int, limit: int) -> JobEvent:
    """Return the event: a rank failed, and the job is queued again."""
    sentence = f"{failure.describe()}; restart {number} of {limit}"
    return JobEvent(EventKind.RESTARTED, sentence, {**failure.to_json(), "restart": number, "max_restarts": limit})


def start_failed(error: str, attempt: int, pause_s: float) -> JobEvent:
    """Return the event: it could not be started for a reason that may pass."""
    sentence = f"could not be started ({error}); tried again in {format_seconds(pause_s)}"
    return JobEvent(EventKind.START_FAILED, sentence, {"error": error, "attempt": attempt, "pause_s": pause_s})


def unstartable(error: str) -> JobEvent:
    """Return the event: it cannot be started, now or later."""
    return JobEvent(EventKind.FAILED, f"it cannot be started: {error}", {"error": error})


def requeued(user: str) -> JobEvent:
    """Return the event: a user queued it again."""
    return JobEvent(EventKind.REQUEUED, f"requeued by {user}", {"user": user})


def group_lost(group: int, failure: RankFailure, restarts: int) -> JobEvent:
    """Return the event: a group was lost while others keep training."""
    after = f" after restart {restarts}" if restarts else ""
    sentence = f"group {group} was lost{after}, the others keep training: {failure.describe()}"
    return JobEvent(EventKind.GROUP_LOST, sentence, {"group": group, "restarts": restarts, **failure.to_json()})


def group_restarted(group: int, failure: RankFailure | None, restarts: int) -> JobEvent:
    """Return the event: a group that was lost is started again."""
    why = f": {failure.describe()}" if failure else ""
    data = {"group": group, "restarts": restarts, **(failure.to_json() if failure else {})}
    return JobEvent(EventKind.GROUP_RESTARTED, f"group {group} is started again (restart {restarts}){why}", data)


def plan_changed(why: str) -> JobEvent:
    """Return the event: its first rank stored another plan."""
    return JobEvent(EventKind.PLAN_CHANGED, f"plan changed: {why}", {"why": why})


def checkpoints_deleted(kept_s: float) -> JobEvent:
    """Return the event: its checkpoints were deleted, this long after it ended."""
    sentence = f"its checkpoints were deleted, as they are {format_duration(kept_s)} after a job has ended"
    return JobEvent(EventKind.CHECKPOINTS_DELETED, sentence, {"kept_s": kept_s})


def straggler(sentence: str, data: Mapping[str, Any]) -> JobEvent:
    """Return the event: a rank holds the others up."""
    return JobEvent(EventKind.STRAGGLER, sentence, dict(data))


def hang(sentence: str, data: Mapping[str, Any]) -> JobEvent:
    """Return the event: a rank does not enter a collective that the others wait in."""
    return JobEvent(EventKind.HANG, sentence, dict(data))


def server_error(stage: str, error: str, *, has_ended: bool) -> JobEvent:
    """Return the event: the server could not handle it."""
    kind = EventKind.FAILED if has_ended else EventKind.SERVER_ERROR
    sentence = f"the server cannot handle this job ({stage}: {error}); its log says more"
    return JobEvent(kind, sentence, {"stage": stage, "error": error})
