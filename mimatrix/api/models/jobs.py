"""Jobs: submissions, states, events, logs and checkpoints."""

from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from mimatrix.api.models.base import Count, Digest, Message, Name, Text, Variable
from mimatrix.api.text import one_line
from mimatrix.core.errors import UserError
from mimatrix.core.resources import Part, Wish


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


ENDED = (JobState.DONE, JobState.FAILED, JobState.CANCELLED)
ACTIVE = (JobState.STARTING, JobState.PROFILING, JobState.TRAINING, JobState.SAVING)
MAX_CODE_ARCHIVE_BYTES = 64 << 20


def _wish(text: str) -> str:
    try:
        # Once more, since the sum may be more than there can be.
        return str(Wish.parse(str(_merged(Wish.parse(text)))))
    except UserError as error:
        raise ValueError(str(error)) from None


def _merged(wish: Wish) -> Wish:
    """Return the request with every kind once: `1,1,1` is `3`."""
    merged: dict[str, Part] = {}
    for part in wish.parts:
        same = merged.setdefault(part.kind.lower(), replace(part, least=0, most=0))
        merged[part.kind.lower()] = replace(same, least=same.least + part.least, most=same.most + part.most)
    return Wish(tuple(merged.values()))


class Submission(Message):
    """A job as it is submitted. The directory of its script was uploaded before, as a code archive with this digest."""

    name: Name
    script: Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^/.\x00][^/\x00]*(/[^/.\x00][^/\x00]*)*$")]
    """Its path within the archive."""
    code_archive: Digest
    arguments: Annotated[tuple[Text, ...], Field(max_length=500)] = ()
    environment: Annotated[dict[Variable, Text], Field(max_length=200)] = Field(default_factory=dict)
    devices: Annotated[str, Field(max_length=500), AfterValidator(_wish)] = "1"
    priority: Annotated[int, Field(ge=0, le=100)] = 50
    preemptible: bool = False
    max_time_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
    retries: Annotated[int, Field(ge=0, le=100)] = 0
    """How often it is restarted automatically after a failure."""


class JobUpdate(Message):
    """What can be changed of a submitted job."""

    priority: Annotated[int, Field(ge=0, le=100)]


class Progress(Message):
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


class Job(Message):
    """A job as the server knows it."""

    id: int
    name: str
    user: str
    state: JobState
    reason: str
    """Why it is in this state, or why it waits."""
    queue_position: int | None = None
    """From 1; None: it is not queued, or was submitted a moment ago."""
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
    """The devices that it holds, in the order of its ranks."""
    last_seats: tuple[str, ...] = ()
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
    progress: Progress


class Jobs(Message):
    """A page of jobs, the newest first."""

    jobs: tuple[Job, ...]
    next_before: int | None
    """The `before` of the next page; None: this is the last one."""
    more: Count = 0
    """Number of jobs on the pages that follow."""


class Event(Message):
    """Something that happened to a job."""

    id: int
    at: datetime
    state: JobState
    generation: int
    reason: str


class DryRunResult(Message):
    """What the scheduler would do with a job if it were submitted now."""

    starts: bool
    reason: str


class Log(Message):
    """A piece of a rank's output."""

    generation: Count
    """The start that it is from; 0: the job was never started."""
    text: str
    next_offset: Count
    has_ended: bool


class Checkpoint(Message):
    """A complete checkpoint."""

    path: Annotated[str, Field(max_length=4096), AfterValidator(one_line)]
    step: Count
    saved_at: datetime
    bytes: Count
