"""Nodes and devices: what there is and how it is used."""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from mimatrix.api.models.base import Count, Message, Rate
from mimatrix.api.models.jobs import JobState


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
