"""What the scheduler sees, and what it says: all of it plain values, so that a decision can be repeated."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mimatrix.core.resources import Wish


@dataclass(frozen=True, slots=True, order=True)
class Seat:
    """One device, as it is given to a job."""

    node: str
    number: int
    """Among the devices of its node."""
    kind: str = "cpu"
    speed: float = 1.0
    """Beside other kinds, for jobs of which nothing was measured."""
    near: str = ""
    """Where in the network its node is: nodes with the same word are close to one another."""

    @property
    def name(self) -> str:
        """As everywhere: `node/0`."""
        return f"{self.node}/{self.number}"


@dataclass(frozen=True, slots=True)
class Queued:
    """A job that waits."""

    job: str
    wish: Wish
    user: str = ""
    priority: int = 50
    since_s: float = 0.0
    """When it was submitted; a job that was preempted keeps that."""
    max_time_s: float | None = None
    speeds: Mapping[str, float] = field(default_factory=dict)
    """What it would do in a second on a device of each kind that it was measured on."""


@dataclass(frozen=True, slots=True)
class Running:
    """A job that has devices."""

    job: str
    seats: tuple[Seat, ...]
    user: str = ""
    priority: int = 50
    started_s: float = 0.0
    max_time_s: float | None = None
    preemptible: bool = False
    is_leaving: bool = False
    """It was told to save and go, or to end."""
    saves: bool = True
    """Whether it saves before it leaves; not one that was cancelled, or that has had its time."""

    @property
    def ends_s(self) -> float:
        """The latest moment at which its devices are free."""
        if self.is_leaving:
            return self.started_s
        return float("inf") if self.max_time_s is None else self.started_s + self.max_time_s


@dataclass(frozen=True, slots=True)
class State:
    """All that a decision depends on, but for the time."""

    seats: tuple[Seat, ...]
    """Those that answer."""
    queued: tuple[Queued, ...] = ()
    running: tuple[Running, ...] = ()
    used: Mapping[str, float] = field(default_factory=dict)
    """By user, device-seconds of late, weighted by speed."""


@dataclass(frozen=True, slots=True)
class Start:
    """Give a queued job these devices, in the order of its ranks."""

    job: str
    seats: tuple[Seat, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """A queued job goes on waiting."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class Preempt:
    """Have a running job save and give its devices to another one."""

    job: str
    other: str
    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """A running job has had its time."""

    job: str
    reason: str


Decision = Start | Wait | Preempt | End


@dataclass(frozen=True, slots=True)
class Policy:
    """What is weighed how."""

    backfill: bool = True
    """Whether jobs may start before others that cannot."""
    preempts: bool = True
    ageing_s: float | None = 600.0
    """Waiting so long counts as much as one point of priority; None: it does not count."""
    fair: float = 10.0
    """Points of priority between a user who had everything of late and one who had nothing."""
    same_node: float = 1.0
    same_place: float = 0.95
    anywhere: float = 0.85
    """What is left of the devices' speed when they are on one node, on nodes close to one another, or anywhere."""
