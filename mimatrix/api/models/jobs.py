"""Jobs: submissions, states, events, logs and checkpoints."""

from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from mimatrix.api.models.base import ApiModel, Count, Digest, Name, Text, Variable
from mimatrix.api.text import one_line
from mimatrix.core.environment import GROUPS
from mimatrix.core.errors import UserError
from mimatrix.core.resources import DeviceRequest, ResourceRequest


class JobState(StrEnum):
    """The states of a job."""

    QUEUED = "queued"
    STARTING = "starting"
    PROFILING = "profiling"
    TRAINING = "training"
    SAVING = "saving"
    PREEMPTED = "preempted"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_active(self) -> bool:
        """Whether a job in this state holds devices."""
        return self in (JobState.STARTING, JobState.PROFILING, JobState.TRAINING, JobState.SAVING)

    @property
    def is_waiting(self) -> bool:
        """Whether a job in this state is in the queue."""
        return self in (JobState.QUEUED, JobState.PREEMPTED)

    @property
    def is_final(self) -> bool:
        """Whether a job in this state has ended."""
        return not self.is_active and not self.is_waiting


class EventKind(StrEnum):
    """What happened to a job. `data` of the event has the numbers."""

    SUBMITTED = "submitted"
    PRIORITY_CHANGED = "priority_changed"
    WAITING = "waiting"
    """It waits for another kind of reason than before."""
    STARTING = "starting"
    PHASE_CHANGED = "phase_changed"
    """Its first rank reported another state."""
    STOP_REQUESTED = "stop_requested"
    PREEMPTED = "preempted"
    RESTARTED = "restarted"
    """It failed, and is in the queue again."""
    START_FAILED = "start_failed"
    """It could not be started for the moment, and is tried again after a pause."""
    REQUEUED = "requeued"
    """A user queued it again after it had ended."""
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    GROUP_LOST = "group_lost"
    GROUP_RESTARTED = "group_restarted"
    STRAGGLER = "straggler"
    HANG = "hang"
    PLAN_CHANGED = "plan_changed"
    CHECKPOINTS_DELETED = "checkpoints_deleted"
    """It had ended long ago, and the server keeps checkpoints for a limited time."""
    SERVER_ERROR = "server_error"
    """The server could not handle this job in one of its stages."""


ENDED = tuple(state for state in JobState if state.is_final)
ACTIVE = tuple(state for state in JobState if state.is_active)
MAX_CODE_ARCHIVE_BYTES = 64 << 20


def _normalize(text: str) -> str:
    try:
        # Once more, since the sum may be more than there can be.
        return str(ResourceRequest.parse(str(_merged(ResourceRequest.parse(text)))))
    except UserError as error:
        raise ValueError(str(error)) from None


def _merged(request: ResourceRequest) -> ResourceRequest:
    """Return the request with every kind once: `1,1,1` is `3`."""
    merged: dict[str, DeviceRequest] = {}
    for part in request.parts:
        same = merged.setdefault(part.kind.lower(), replace(part, least=0, most=0))
        merged[part.kind.lower()] = replace(same, least=same.least + part.least, most=same.most + part.most)
    return ResourceRequest(tuple(merged.values()))


_Group = Annotated[tuple[Count, ...], Field(min_length=1, max_length=65_536)]
Groups = Annotated[tuple[_Group, ...], Field(max_length=4096)]


class Submission(ApiModel):
    """A job as it is submitted. The directory of its script was uploaded before, as a code archive with this digest."""

    name: Name
    script: Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^/.\x00][^/\x00]*(/[^/.\x00][^/\x00]*)*$")]
    """Its path within the archive."""
    code_archive: Digest
    arguments: Annotated[tuple[Text, ...], Field(max_length=500)] = ()
    environment: Annotated[dict[Variable, Text], Field(max_length=200)] = Field(default_factory=dict)
    devices: Annotated[str, Field(max_length=500), AfterValidator(_normalize)] = "1"
    priority: Annotated[int, Field(ge=0, le=100)] = 50
    preemptible: bool = False
    max_time_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
    max_restarts: Annotated[int, Field(ge=0, le=100)] = 0
    """How often it is restarted automatically after a failure."""
    groups: Groups = ()
    """The ranks of each group of hybrid mode; empty: all ranks train in lockstep."""
    key: Annotated[str, Field(max_length=100, pattern=r"^[A-Za-z0-9._-]*$")] = ""
    """Chosen by the client: a second submission of the same user with the same key within a day is the same job."""

    @field_validator("environment")
    @classmethod
    def _leave_groups_out(cls, environment: dict[str, str]) -> dict[str, str]:
        if GROUPS.name in environment:
            raise ValueError(f"{GROUPS.name} is set by the server; give groups as a field of the job")
        return environment

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        listed = sorted(rank for group in self.groups for rank in group)
        request = ResourceRequest.parse(self.devices)
        is_fixed = all(part.least == part.most for part in request.parts) and not request.is_all
        if listed and (listed != list(range(request.least)) or not is_fixed):
            raise ValueError(
                f"groups do not have each rank of {self.devices} devices once; give every rank one group, and an exact "
                "number of devices"
            )
        return self


class JobUpdate(ApiModel):
    """What can be changed of a submitted job."""

    priority: Annotated[int, Field(ge=0, le=100)]


class JobProgress(ApiModel):
    """How far a job has come, as of the last report of its first rank."""

    # No bounds: these are sums over what was bounded when it came in.
    step: int = 0
    epoch: int = 0
    samples_per_s: float = 0.0
    """Of all groups together."""
    step_s: float = 0.0
    predicted_step_s: float | None = None
    metrics: dict[str, float | None] = Field(default_factory=dict)
    """None: not finite."""


class Job(ApiModel):
    """A job as the server knows it."""

    id: int
    name: str
    user: str
    state: JobState
    reason: str
    """Why it is in this state, or why it waits."""
    reason_data: dict[str, Any] = Field(default_factory=dict)
    """The same as a value: a kind, and numbers."""
    server_error: str = ""
    """What the server could not handle about it, if anything."""
    queue_position: int | None = None
    """From 1; None: it is not queued, or was submitted a moment ago."""
    script: str
    arguments: tuple[str, ...]
    devices: str
    priority: int
    preemptible: bool
    max_time_s: float | None
    max_restarts: int
    groups: tuple[tuple[int, ...], ...] = ()
    """The ranks of each group of hybrid mode."""
    generation: int
    """How often it was started."""
    allocation: tuple[str, ...]
    """The devices that it holds, in the order of its ranks."""
    last_allocation: tuple[str, ...] = ()
    """The devices that it held last, if it holds none now; only in the answer for a single job."""
    has_plan: bool = False
    """Whether it has stored a plan; only in the answer for a single job."""
    exit_code: int | None
    exit_cause: dict[str, Any] | None = None
    """How the rank ended that made the job end or restart: a kind, and a code or a signal."""
    failed_rank: int | None = None
    """That rank."""
    resumes_from: int | None = None
    """The step from which its next start resumes, if it has a checkpoint; only in the answer for a single job."""
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    progress: JobProgress


class Jobs(ApiModel):
    """A page of jobs, the newest first."""

    jobs: tuple[Job, ...]
    next_before: int | None
    """The `before` of the next page; None: this is the last one."""
    more: Count = 0
    """Number of jobs on the pages that follow."""


class Event(ApiModel):
    """Something that happened to a job."""

    id: int
    at: datetime
    state: JobState
    generation: int
    kind: EventKind
    reason: str
    """For people: the sentence that says what `kind` and `data` say."""
    data: dict[str, Any] = Field(default_factory=dict)
    """Numbers and short strings: rank, device, code, signal, group ..."""


class DryRunResult(ApiModel):
    """What the scheduler would do with a job if it were submitted now."""

    starts: bool
    reason: str
    reason_data: dict[str, Any] = Field(default_factory=dict)
    """The same as a value: a kind, and numbers."""


class Log(ApiModel):
    """A piece of a rank's output."""

    generation: Count
    """The start that it is from; 0: the job was never started."""
    text: str
    next_offset: Count
    has_ended: bool


class Checkpoint(ApiModel):
    """A complete checkpoint."""

    path: Annotated[str, Field(max_length=4096), AfterValidator(one_line)]
    step: Count
    saved_at: datetime
    bytes: Count
