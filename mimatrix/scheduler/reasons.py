"""Why the scheduler decided so: values. `describe` renders the sentence where a person reads it.

No code compares or parses a sentence. `to_json` gives what is stored and sent next to it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from mimatrix.core.units import format_seconds
from mimatrix.scheduler.needs import Counts, Need, Needs


class WaitKind(StrEnum):
    """Why a job waits."""

    TOO_FEW_DEVICES = "too_few_devices"
    """The whole cluster, if it were empty, does not have what the job needs."""
    IN_ORDER = "in_order"
    """Job `ahead` comes first, and the policy lets no job overtake."""
    STOPPING = "stopping"
    """Jobs that have its devices were told to stop."""
    FIRST_IN_LINE = "first_in_line"
    """It gets the next devices, at the latest when the jobs in `blocked_by` end."""
    BEHIND = "behind"
    """What is free is too little, or kept for job `ahead`."""
    START_PAUSED = "start_paused"
    """It could not be started a moment ago, and is tried again after a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitReason:
    """Why a job waits, with the numbers."""

    kind: WaitKind
    needed: Needs = ()
    present: Counts = ()
    """All devices of the cluster, where those are too few."""
    free: Counts = ()
    kept: int = 0
    """How many of the free devices are kept for job `ahead`."""
    ahead: int | None = None
    blocked_by: tuple[int, ...] = ()
    """Jobs whose devices it waits for."""
    saving: tuple[int, ...] = ()
    """Those of `blocked_by` that save a checkpoint before they stop."""
    at_latest_s: float | None = None
    """Seconds from now."""

    def describe(self) -> str:
        """Return the reason as one sentence."""
        needs = f"needs {_describe_needs(self.needed)}"
        free = f"{describe_counts(self.free) or 'none'} free"
        match self.kind:
            case WaitKind.TOO_FEW_DEVICES:
                return f"{needs}, and the cluster has {describe_counts(self.present) or 'none'}; waits for more devices"
            case WaitKind.IN_ORDER:
                return f"job {self.ahead} comes first, and the policy allows no overtaking"
            case WaitKind.STOPPING:
                return f"{needs}; waits for {self._describe_stopping()}"
            case WaitKind.FIRST_IN_LINE:
                when = f", at the latest in {format_seconds(self.at_latest_s)}" if self.at_latest_s is not None else ""
                after = f" when {_describe_jobs(self.blocked_by)} ends{when}" if self.blocked_by else ""
                return f"{needs}, {free}; first in line{after}"
            case WaitKind.BEHIND:
                kept = f", {self.kept} of them kept for job {self.ahead}" if self.kept else ""
                return f"{needs}, {free}{kept or f'; job {self.ahead} comes first'}"
            case WaitKind.START_PAUSED:
                return f"could not be started; tried again in {format_seconds(self.at_latest_s or 0.0)}"

    def _describe_stopping(self) -> str:
        ending = [job for job in self.blocked_by if job not in self.saving]
        saves = [f"{_describe_jobs(self.saving)} to save and stop"] * bool(self.saving)
        ends = [f"{_describe_jobs(ending)} to end"] * bool(ending)
        return ", and for ".join(saves + ends)


class StartKind(StrEnum):
    """How a job could start."""

    IN_TURN = "in_turn"
    ENDS_BEFORE = "ends_before"
    """It overtakes job `ahead` on devices kept for that, and ends before they are needed."""
    NOT_NEEDED = "not_needed"
    """It overtakes job `ahead`, which does not need these devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReason:
    """Why a job starts on these devices."""

    kind: StartKind
    devices: Counts
    nodes: tuple[str, ...]
    ahead: int | None = None

    def describe(self) -> str:
        """Return the reason as one sentence."""
        where = self.nodes[0] if len(self.nodes) == 1 else f"{len(self.nodes)} nodes"
        best = f"{describe_counts(self.devices)} on {where}: the best that is free"
        match self.kind:
            case StartKind.IN_TURN:
                return best
            case StartKind.ENDS_BEFORE:
                return f"{best}; it ends before job {self.ahead} can have them"
            case StartKind.NOT_NEEDED:
                return f"{best}; job {self.ahead} comes first, but does not need them"


class StopKind(StrEnum):
    """Why a running job is told to stop."""

    PREEMPT = "preempt"
    CANCEL = "cancel"
    TIME_LIMIT = "time_limit"
    DRAIN = "drain"
    """Its node is taken out of service."""
    UNUSABLE = "unusable"
    """What the server has stored about it cannot be read."""

    @property
    def saves(self) -> bool:
        """Whether the job saves a checkpoint before it stops."""
        return self in (StopKind.PREEMPT, StopKind.DRAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReason:
    """Why a running job is told to stop, with who and how much."""

    kind: StopKind
    priority: int | None = None
    for_job: int | None = None
    """The job that gets its devices."""
    for_priority: int | None = None
    limit_s: float | None = None
    user: str = ""
    """Who cancelled it."""

    def describe(self) -> str:
        """Return the reason as one sentence about the job."""
        match self.kind:
            case StopKind.PREEMPT if self.for_job is not None:
                return f"job {self.for_job} has priority {self.for_priority} and it has {self.priority}"
            case StopKind.PREEMPT:
                return "another job needs its devices"
            case StopKind.CANCEL:
                return f"cancelled by {self.user}" if self.user else "cancelled"
            case StopKind.TIME_LIMIT if self.limit_s is not None:
                return f"its time limit of {format_seconds(self.limit_s)} is over"
            case StopKind.TIME_LIMIT:
                return "its time limit is over"
            case StopKind.DRAIN:
                return "its node is taken out of service"
            case StopKind.UNUSABLE:
                return "what is stored about it cannot be read"


Reason = WaitReason | StartReason | StopReason


def to_json(reason: Reason) -> dict[str, Any]:
    """Return plain data: the kind, and the fields that say something."""
    values = {field.name: getattr(reason, field.name) for field in fields(reason)}
    return {name: _plain(value) for name, value in values.items() if value not in (None, "", (), 0) or name == "kind"}


def describe_counts(counts: Iterable[tuple[str, int]]) -> str:
    """Return `2 x a100 + 1 x v100`."""
    return " + ".join(f"{count} x {kind}" for kind, count in counts)


def _plain(value: Any) -> Any:
    if isinstance(value, Need):
        return {"kinds": list(value.kinds), "least": value.least, "most": value.most}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, StrEnum) else value


def _describe_jobs(jobs: Sequence[int]) -> str:
    return " and ".join(f"job {job}" for job in jobs)


def _describe_needs(needs: Needs) -> str:
    """Return `2 x a100 + 4..8 devices`."""
    return " + ".join(_describe_need(need) for need in needs)


def _describe_need(need: Need) -> str:
    count = str(need.least) if need.least == need.most else f"{need.least}..{need.most}"
    if len(need.kinds) == 1:
        return f"{count} x {need.kinds[0]}"
    return f"{count} device{'s' * (need.most > 1)}" + ("" if need.kinds else " of a kind that is not there")
