"""What workers send to the server, and what it answers."""

from typing import Annotated, Any

from pydantic import Field

from mimatrix.api.models.base import Count, Message, Metrics, Seconds
from mimatrix.api.models.jobs import Checkpoint, JobState
from mimatrix.api.models.nodes import Traffic, Use

PROTOCOL = 3
"""Of workers and server; another one is refused."""
MOST_REPORT_BYTES = 16 << 10
MOST_PROFILE_BYTES = 1 << 20
MOST_LOGGED = 64
"""Entries of `run.log` in a report."""


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


class Stored(Message):
    """The plan of a job, or the curves that it was made from."""

    content: dict[str, Any]


class Measured(Message):
    """Curves of a job's devices, or the plan that its rank 0 made."""

    protocol: int
    generation: Count
    content: dict[str, Any]


class Saved(Message):
    """What lies in the folder of a job's checkpoints, the newest first."""

    protocol: int
    generation: Count
    checkpoints: Annotated[tuple[Checkpoint, ...], Field(max_length=100)]
