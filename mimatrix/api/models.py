"""The messages of the job server, as JSON. Both ends read them strictly: unknown keys and excess sizes are refused."""

from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mimatrix.core.errors import UserError
from mimatrix.core.resources import Part, Wish

PROTOCOL = 3
"""Of workers and server; another one is refused."""
MOST_REPORT_BYTES = 16 << 10
MOST_LOGGED = 64
"""Entries of `run.log` in a report."""
MOST_PROFILE_BYTES = 1 << 20
MOST_SNAPSHOT_BYTES = 64 << 20


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


class Role(StrEnum):
    """What the bearer of a token may do."""

    ADMIN = "admin"
    USER = "user"
    VIEWER = "viewer"
    WORKER = "worker"


class Message(BaseModel):
    """Frozen, and without keys that nobody knows."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _wish(text: str) -> str:
    try:
        # Once more, since the sum may be more than there can be.
        return str(Wish.parse(str(_merged(Wish.parse(text)))))
    except UserError as error:
        raise ValueError(str(error)) from None


def _merged(wish: Wish) -> Wish:
    """Every kind once: `1,1,1` is `3`."""
    found: dict[str, Part] = {}
    for part in wish.parts:
        same = found.setdefault(part.kind.lower(), replace(part, least=0, most=0))
        found[part.kind.lower()] = replace(same, least=same.least + part.least, most=same.most + part.most)
    return Wish(tuple(found.values()))


Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]
Variable = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Rate = Annotated[float, Field(ge=0, le=1e15)]
Count = Annotated[int, Field(ge=0, le=1 << 53)]


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


class Use(Message):
    """How a device is used now; None where nobody can tell."""

    busy: Annotated[float, Field(ge=0, le=1)] | None = None
    memory_bytes: Count | None = None
    memory_total_bytes: Count | None = None
    power_w: Annotated[float, Field(ge=0, le=1e6)] | None = None
    temperature_c: Annotated[float, Field(ge=-300, le=1000)] | None = None


class Traffic(Message):
    """What a machine's link carries now, whoever it is for."""

    nic: Annotated[str, Field(max_length=50)]
    """The interface by which the machine reaches the server."""
    received_bytes_per_s: Rate
    sent_bytes_per_s: Rate
    capacity_bytes_per_s: Rate | None = None
    """Each way; None where nobody can tell."""


class Device(Message):
    """A device of a node, and the job that has it."""

    name: str
    kind: str
    memory_bytes: int
    job: int | None
    use: Use | None = None
    """As its worker says; None without one."""
    moved_bytes_per_s: float | None = None
    """Summed and gathered with other devices."""


class Node(Message):
    """A machine."""

    name: str
    address: str
    near: str
    answers: bool
    seen_at: datetime
    devices: tuple[Device, ...]
    traffic: Traffic | None = None
    """Of its link, where a worker runs there that tells."""


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


class Join(Message):
    """A worker is there. Rank 0 says where the others find it."""

    protocol: int
    generation: Count
    rank: Count
    address: Annotated[str, Field(max_length=200)] = ""
    port: Annotated[int, Field(ge=0, le=65_535)] = 0


class Joined(Message):
    """What a worker needs to find the others; not yet known while `master_port` is 0."""

    ranks: int
    local_rank: int
    local_ranks: int
    master_address: str
    master_port: int
    generation: int


class Waiting(Message):
    """A rank is in a collective and cannot go on: for whom it waits, and how long already."""

    call: Annotated[str, Field(max_length=200)]
    round: Count
    peer: Count | None
    """Its number in the group; None: for anybody."""
    seconds: Seconds


class Pushed(Message):
    """How it goes with the pushes of a group, where groups do not wait for each other."""

    pushes: Count
    samples: Count
    """In them, in all."""
    staleness: Seconds
    """Pushes of others between its last pull and its last push."""
    moved_s: Seconds = 0.0
    """What it stood still for its pushes, in all, but for the next."""
    waited_s: Seconds
    """For other groups, in all."""


Metrics = Annotated[dict[Annotated[str, Field(max_length=100)], float | None], Field(max_length=32)]
"""What `run.log` was given, by name. None: not finite."""


class Logged(Message):
    """What a script logged for one step."""

    step: Count
    metrics: Metrics


class Report(Message):
    """What a worker says now and then."""

    protocol: int
    generation: Count
    rank: Count
    state: JobState
    step: Count = 0
    epoch: Count = 0
    samples_per_s: Seconds = 0.0
    step_s: Seconds = 0.0
    compute_s: Seconds = 0.0
    waiting_s: Seconds = 0.0
    communication_s: Seconds = 0.0
    data_s: Seconds = 0.0
    """Waiting for the loader."""
    samples: Count = 0
    """Of this rank, in a step."""
    moved_bytes: Count = 0
    """In collectives, in a step."""
    predicted_step_s: Seconds | None = None
    planned_s: Seconds | None = None
    """How long this rank should be busy in a step."""
    follows: bool = False
    """Whether batches follow speeds that change."""
    use: Use | None = None
    traffic: Traffic | None = None
    """Said by one worker of each machine."""
    waiting: Waiting | None = None
    group: Count = 0
    """Ranks of one group wait for each other, and for nobody else."""
    pushed: Pushed | None = None
    """Said by the first rank of each group, where there are groups."""
    aside: bool = False
    """It evaluates, loads or waits for a checkpoint, between steps."""
    metrics: Metrics = Field(default_factory=dict)
    """The newest of what is logged in most steps."""
    logged: Annotated[tuple[Logged, ...], Field(max_length=MOST_LOGGED)] = ()
    """What was logged since the last report and is not in most steps, such as evaluations."""


class Orders(Message):
    """What the server answers."""

    leave: bool
    """Save, and end."""
    again_s: Seconds
    """When to report again."""
    notice: str = ""
    """A sentence for the job's log, said to one rank."""
    speaks: bool = False
    """Whether this rank tells what is known once of a job: its plan, its checkpoints. Rank 0, unless that was lost."""


class Rank(Message):
    """One rank of a job that runs, as it said last."""

    rank: int
    seat: str
    at: datetime
    step: int
    step_s: float
    compute_s: float
    data_s: float
    waiting_s: float
    communication_s: float
    samples: int
    planned_s: float | None
    use: Use | None
    group: int = 0
    """Ranks of one group wait for each other, and for nobody else."""
    samples_per_s: float = 0.0
    """Of its group."""
    pushed: Pushed | None = None
    """Of its group, as the first rank of it says."""


class Trouble(Message):
    """A rank that holds the others up."""

    kind: str
    """`slow` or `hang`."""
    rank: int
    seat: str
    cause: str
    """Of a slow one: compute, loader, link or memory."""
    lost_s: float
    """In every step, or since it is waited for."""
    sentence: str


class Ranks(Message):
    """All ranks of a job that runs, and who holds them up."""

    ranks: tuple[Rank, ...]
    troubles: tuple[Trouble, ...]


class Point(Message):
    """A job over a while: means. Lists have an entry for each rank; None: it said nothing."""

    at: datetime
    step: int
    samples_per_s: float | None
    """None, as `step_s`: the point is of what was logged for a step alone, such as an evaluation."""
    step_s: float | None
    predicted_step_s: float | None
    metrics: dict[str, float | None]
    """None: not finite. What has no value here was not logged then."""
    ranks: dict[str, tuple[float | None, ...]]
    """compute_s, data_s, waiting_s, communication_s, busy, memory_bytes, power_w, temperature_c; of the first rank of
    each group, where there are groups, also group_pushes, group_samples, group_staleness, group_moved_s,
    group_waited_s."""


class History(Message):
    """How a job went. The further back, the coarser."""

    every_s: float
    """Between points at least."""
    points: tuple[Point, ...]


class UsePoint(Message):
    """The cluster over a while."""

    at: datetime
    devices: int
    used: float
    """Of them, by jobs; a mean."""
    queued: float
    """Jobs that waited; a mean."""


class DeviceJob(Message):
    """A job that had a device."""

    id: int
    name: str
    user: str
    state: JobState
    started_at: datetime
    ended_at: datetime | None


class DeviceHistory(Message):
    """Who used a device, the newest first."""

    seat: str
    jobs: tuple[DeviceJob, ...]


class DevicePoint(Message):
    """A device over a while: means. None where nobody had it, or could tell."""

    at: datetime
    busy: float | None = None
    memory_bytes: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None


class Me(Message):
    """Whose token it is."""

    user: str
    role: Role


class Stored(Message):
    """The plan of a job, or the curves that it was made from."""

    content: dict[str, Any]


class Measured(Message):
    """Curves of a job's devices, or the plan that its rank 0 made."""

    protocol: int
    generation: Count
    content: dict[str, Any]


class Checkpoint(Message):
    """One that is there."""

    path: Annotated[str, Field(max_length=4096)]
    step: Count
    saved_at: datetime
    bytes: Count


class Saved(Message):
    """What lies in the folder of a job's checkpoints, the newest first."""

    protocol: int
    generation: Count
    checkpoints: Annotated[tuple[Checkpoint, ...], Field(max_length=100)]


class TokenWanted(Message):
    """A token to be made."""

    user: Name
    role: Role


class Token(Message):
    """A token as it is shown once, and then never again."""

    id: int
    user: str
    role: Role
    secret: str = ""


class Problem(Message):
    """What went wrong, after RFC 9457."""

    model_config = ConfigDict(extra="ignore")

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    """One sentence, and the fix."""
