"""What the scheduler sees, and what it decides: plain values, so that a decision can be repeated."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mimatrix.core.resources import ResourceRequest
from mimatrix.scheduler.reasons import StartReason, StopReason, WaitReason


@dataclass(frozen=True, slots=True, order=True)
class DeviceSlot:
    """One device that can be given to a job."""

    node: str
    number: int
    """Among the devices of its node."""
    kind: str = "cpu"
    speed: float = 1.0
    """Relative to other kinds, for jobs of which nothing was measured."""
    rack: str = ""
    """Where in the network its node is: nodes with the same word are close to one another."""

    @property
    def name(self) -> str:
        """Return its name in every layer: `node/0`."""
        return f"{self.node}/{self.number}"


@dataclass(frozen=True, slots=True)
class Queued:
    """A job that waits."""

    job: int
    request: ResourceRequest
    user: str = ""
    priority: int = 50
    since_s: float = 0.0
    """When it was submitted; a job that was preempted or restarted keeps that."""
    max_time_s: float | None = None
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Samples per second on a device of each kind that it was measured on."""


@dataclass(frozen=True, slots=True)
class Running:
    """A job that has devices."""

    job: int
    devices: tuple[DeviceSlot, ...]
    user: str = ""
    priority: int = 50
    started_s: float = 0.0
    max_time_s: float | None = None
    preemptible: bool = False
    is_leaving: bool = False
    """It was told to save and stop, or to end."""
    saves: bool = True
    """Whether it saves before it stops; not one that was cancelled, or that has reached its time limit."""

    @property
    def ends_s(self) -> float:
        """Return the latest moment at which its devices are free."""
        if self.is_leaving:
            return self.started_s
        return float("inf") if self.max_time_s is None else self.started_s + self.max_time_s


@dataclass(frozen=True, slots=True)
class State:
    """All that a decision depends on, except the time."""

    devices: tuple[DeviceSlot, ...]
    """Those of nodes that answer."""
    queued: tuple[Queued, ...] = ()
    running: tuple[Running, ...] = ()
    used: Mapping[str, float] = field(default_factory=dict)
    """Recent device-seconds of each user, weighted by speed."""


@dataclass(frozen=True, slots=True)
class Start:
    """Give a queued job these devices, in the order of its ranks."""

    job: int
    devices: tuple[DeviceSlot, ...]
    reason: StartReason


@dataclass(frozen=True, slots=True)
class Wait:
    """Let a queued job wait."""

    job: int
    reason: WaitReason


@dataclass(frozen=True, slots=True)
class Preempt:
    """Have a running job save and give its devices to another one."""

    job: int
    other: int
    reason: StopReason


@dataclass(frozen=True, slots=True)
class Stop:
    """End a running job that has reached its time limit."""

    job: int
    reason: StopReason


Decision = Start | Wait | Preempt | Stop


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """What is weighed how."""

    backfill: bool = True
    """Whether jobs may start before others that cannot."""
    preempts: bool = True
    ageing_s: float | None = 600.0
    """This much waiting counts as one point of priority; None: waiting does not count."""
    fairshare_weight: float = 10.0
    """Points of priority between a user who had everything recently and one who had nothing."""
    same_node: float = 1.0
    same_place: float = 0.95
    anywhere: float = 0.85
    """What is left of the devices' speed when they are on one node, on nodes close to one another, or anywhere."""
