"""Nodes and devices: what there is and how it is used."""

from datetime import datetime
from typing import Annotated

from pydantic import AfterValidator, Field

from mimatrix.api.models.base import ApiModel, Count, Rate
from mimatrix.api.models.jobs import JobState
from mimatrix.api.text import one_line


class DeviceUsage(ApiModel):
    """How a device is used now; None where that cannot be measured."""

    busy: Annotated[float, Field(ge=0, le=1)] | None = None
    memory_bytes: Count | None = None
    memory_total_bytes: Count | None = None
    power_w: Annotated[float, Field(ge=0, le=1e6)] | None = None
    temperature_c: Annotated[float, Field(ge=-300, le=1000)] | None = None


class LinkUsage(ApiModel):
    """The traffic on a machine's link now, of all its programs."""

    nic: Annotated[str, Field(max_length=50), AfterValidator(one_line)]
    """The interface by which the machine reaches the server."""
    received_bytes_per_s: Rate
    sent_bytes_per_s: Rate
    capacity_bytes_per_s: Rate | None = None
    """In each direction; None: unknown."""


class DeviceStatus(ApiModel):
    """A device of a node, and the job that holds it."""

    name: str
    kind: str
    memory_bytes: int
    job: int | None
    use: DeviceUsage | None = None
    """As reported by its worker; None without one."""
    moved_bytes_per_s: float | None = None
    """By collectives."""


class NodeStatus(ApiModel):
    """A machine."""

    name: str
    address: str
    rack: str
    """Jobs are placed in one rack where that is possible; empty: unknown."""
    answers: bool
    seen_at: datetime
    devices: tuple[DeviceStatus, ...]
    traffic: LinkUsage | None = None
    """As reported by one of its workers; None without one."""


class ClusterPoint(ApiModel):
    """Means of the cluster's use over an interval."""

    at: datetime
    devices: int
    used: float
    """Devices that jobs held."""
    queued: float
    """Jobs that waited."""


class DeviceJob(ApiModel):
    """A job that held a device."""

    id: int
    name: str
    user: str
    state: JobState
    started_at: datetime
    ended_at: datetime | None


class DeviceHistory(ApiModel):
    """The jobs that held a device, the newest first."""

    device: str
    jobs: tuple[DeviceJob, ...]


class DevicePoint(ApiModel):
    """Means of a device's use over an interval. None: it was free, or that was not measured."""

    at: datetime
    busy: float | None = None
    memory_bytes: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
