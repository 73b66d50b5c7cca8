"""Jobs: submissions, states, events, logs and checkpoints."""

from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from mimatrix.api.models.base import Count, Digest, Message, Name, Seconds, Text, Variable
from mimatrix.core.errors import UserError
from mimatrix.core.resources import DeviceRequest, ResourceRequest


class JobState(StrEnum):
    """Where in its life a job is."""

    QUEUED = "queued"
    STARTING = "starting"
    PROFILING = "profiling"
    TRAINING = "training"
    SAVING = "saving"
    PREEMPTED = "preempted"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = (JobState.DONE, JobState.FAILED, JobState.CANCELLED)
ACTIVE = (JobState.STARTING, JobState.PROFILING, JobState.TRAINING, JobState.SAVING)
MOST_SNAPSHOT_BYTES = 64 << 20


def _wish(text: str) -> str:
    try:
        # Once more, since the sum may be more than there can be.
        return str(ResourceRequest.parse(str(_merged(ResourceRequest.parse(text)))))
    except UserError as error:
        raise ValueError(str(error)) from None


def _merged(wish: ResourceRequest) -> ResourceRequest:
    """Every kind once: `1,1,1` is `3`."""
    found: dict[str, DeviceRequest] = {}
    for part in wish.parts:
        same = found.setdefault(part.kind.lower(), replace(part, least=0, most=0))
        found[part.kind.lower()] = replace(same, least=same.least + part.least, most=same.most + part.most)
    return ResourceRequest(tuple(found.values()))


class Submission(Message):
    """A job as it is handed in. The folder of its script was uploaded before, as an archive with this digest."""

    name: Name
    script: Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^/.\x00][^/\x00]*(/[^/.\x00][^/\x00]*)*$")]
    """Inside of the archive."""
    snapshot: Digest
    arguments: Annotated[tuple[Text, ...], Field(max_length=500)] = ()
    environment: Annotated[dict[Variable, Text], Field(max_length=200)] = Field(default_factory=dict)
    devices: Annotated[str, Field(max_length=500), AfterValidator(_wish)] = "1"
    priority: Annotated[int, Field(ge=0, le=100)] = 50
    preemptible: bool = False
    max_time_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
    retries: Annotated[int, Field(ge=0, le=100)] = 0
    """How often it is started again by itself when a node or a worker is lost."""


class Change(Message):
    """What may be changed of a job that is there."""

    priority: Annotated[int, Field(ge=0, le=100)]


class Progress(Message):
    """How far a job is, as its rank 0 said last."""

    step: Count = 0
    epoch: Count = 0
    samples_per_s: Seconds = 0.0
    step_s: Seconds = 0.0
    predicted_step_s: Seconds | None = None
    metrics: dict[str, float | None] = Field(default_factory=dict)
    """None: not finite."""
    at: datetime | None = None


class Job(Message):
    """A job as the server knows it."""

    id: int
    name: str
    user: str
    state: JobState
    reason: str
    """Why it is in this state, or why it waits."""
    place: int | None = None
    """In the queue, from 1; None: it does not wait, or was just handed in."""
    script: str
    arguments: tuple[str, ...]
    devices: str
    priority: int
    preemptible: bool
    max_time_s: float | None
    retries: int
    generation: int
    """How often it was started."""
    seats: tuple[str, ...]
    """The devices that it has, in the order of its ranks."""
    last_seats: tuple[str, ...] = ()
    """Those that it had last, where it has none now; told of one job, not of a list."""
    has_plan: bool = False
    """Whether there is one to ask for; told of one job, not of a list."""
    exit_code: int | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    progress: Progress


class Jobs(Message):
    """A page of jobs, the newest first."""

    jobs: tuple[Job, ...]
    next_before: int | None
    """Ask with it for the page that follows; None: there is none."""
    more: Count = 0
    """How many jobs the pages that follow have."""


class Event(Message):
    """Something that happened to a job."""

    id: int
    at: datetime
    state: JobState
    generation: int
    reason: str


class Wait(Message):
    """What would become of a job that was not handed in yet."""

    starts: bool
    reason: str


class Log(Message):
    """A piece of a rank's output."""

    generation: Count
    """Of which start; 0 if there was none."""
    text: str
    next_offset: Count
    has_ended: bool


class Checkpoint(Message):
    """One that is there."""

    path: Annotated[str, Field(max_length=4096)]
    step: Count
    saved_at: datetime
    bytes: Count
