"""What workers send to the server, and what it answers."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from mimatrix.api.models.base import Count, Document, Mean, Message, Metrics, Rate, Seconds
from mimatrix.api.models.jobs import Checkpoint, JobState
from mimatrix.api.models.nodes import DeviceUsage, LinkUsage
from mimatrix.api.text import one_line

PROTOCOL = 4
"""The version that worker and server must share; another one is refused."""
MAX_REPORT_BYTES = 16 << 10
MAX_DOCUMENT_BYTES = 1 << 20
MAX_LOGGED = 64
"""Entries of `run.log` in a report."""


class RendezvousRequest(Message):
    """A worker has started. Rank 0 gives the address of its store."""

    protocol: int
    generation: Count
    rank: Count
    address: Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9._:%-]*$")] = ""
    port: Annotated[int, Field(ge=0, le=65_535)] = 0


class Rendezvous(Message):
    """The ranks of a job and the address of its store; unknown as long as `master_port` is 0."""

    ranks: int
    local_rank: int
    local_ranks: int
    master_address: str
    master_port: int
    generation: int


class Waiting(Message):
    """The collective that a rank is blocked in, the peer that it waits for, and how long it has waited."""

    call: Annotated[str, Field(max_length=200), AfterValidator(one_line)]
    round: Count
    peer: Count | None
    """Its number in the group; None: any peer."""
    seconds: Seconds


class PushStats(Message):
    """The pushes of a group to the parameter service, where groups train asynchronously."""

    pushes: Count
    samples: Count
    """In all pushes so far."""
    staleness: Mean
    """Pushes of other groups between this group's last pull and its last push."""
    moved_s: Seconds = 0.0
    """Total time that training stood still for pushes, without the next one."""
    waited_s: Seconds
    """Total time spent waiting for other groups."""


class Logged(Message):
    """What a script logged for one step."""

    step: Count
    metrics: Metrics


class Report(Message):
    """The periodic report of a worker."""

    protocol: int
    generation: Count
    rank: Count
    state: JobState
    step: Count = 0
    epoch: Count = 0
    samples_per_s: Rate = 0.0
    step_s: Seconds = 0.0
    compute_s: Seconds = 0.0
    waiting_s: Seconds = 0.0
    communication_s: Seconds = 0.0
    data_s: Seconds = 0.0
    """Waiting for the data loader."""
    samples: Count = 0
    """Of this rank in a step."""
    moved_bytes: Count = 0
    """By collectives in a step."""
    predicted_step_s: Seconds | None = None
    planned_s: Seconds | None = None
    """How long this rank should compute in a step."""
    follows: bool = False
    """Whether the split is adjusted to changing speeds."""
    use: DeviceUsage | None = None
    traffic: LinkUsage | None = None
    """Sent by one worker of each machine."""
    waiting: Waiting | None = None
    group: Count = 0
    """Ranks of different groups never wait for each other."""
    pushed: PushStats | None = None
    """Sent by the first rank of each group, where groups train asynchronously."""
    aside: bool = False
    """It evaluates, loads, or waits for a checkpoint, between steps."""
    metrics: Metrics = Field(default_factory=dict)
    """The newest values of what is logged in most steps."""
    logged: Annotated[tuple[Logged, ...], Field(max_length=MAX_LOGGED)] = ()
    """What was logged since the last report and is not in most steps, such as evaluations."""


class ReportReply(Message):
    """The server's answer to a report."""

    leave: bool
    """Save a checkpoint, then exit."""
    report_interval_s: Seconds
    """Seconds until the next report."""
    notice: str = ""
    """A sentence for the job's log, sent to one rank."""
    speaks: bool = False
    """Whether this rank sends what is known once per job: plan and checkpoints. Rank 0, unless that was lost."""


class JsonDocument(Message):
    """The plan of a job, or the profile that it was made from."""

    content: dict[str, Any]


class DocumentUpload(Message):
    """The profile of a job's devices, or its plan, as its worker sends it."""

    protocol: int
    generation: Count
    content: Document


class CheckpointList(Message):
    """The checkpoints in a job's folder, the newest first."""

    protocol: int
    generation: Count
    checkpoints: Annotated[tuple[Checkpoint, ...], Field(max_length=100)]
