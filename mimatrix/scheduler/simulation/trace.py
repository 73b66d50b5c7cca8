"""Jobs as they were submitted, and the devices of the cluster: a trace, read from JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mimatrix.core.errors import UserError, nearest
from mimatrix.core.resources import ResourceRequest
from mimatrix.scheduler.state import DeviceSlot

_DEVICE_KEYS = ("node", "kind", "count", "speed", "rack")
_JOB_KEYS = ("job", "user", "at_s", "devices", "work_s", "priority", "preemptible", "max_time_s")
EXAMPLE = (
    '{"devices": [{"node": "a", "kind": "a100", "count": 4, "speed": 2}], '
    '"jobs": [{"job": "x", "at_s": 0, "devices": "2", "work_s": 600}]}'
)


@dataclass(frozen=True, slots=True)
class JobArrival:
    """A job that is submitted at a time and has an amount of work."""

    job: str
    request: ResourceRequest
    at_s: float
    work_s: float
    """Seconds on the least number of devices that it asks for, if they have speed 1."""
    user: str = ""
    priority: int = 50
    preemptible: bool = False
    max_time_s: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Devices, and jobs in the order in which they are submitted."""

    devices: tuple[DeviceSlot, ...]
    arrivals: tuple[JobArrival, ...]

    @classmethod
    def from_text(cls, text: str, name: str = "trace.json") -> "Trace":
        """Parse JSON; `name` is what errors call it.

        Raises:
            UserError: It is not a trace.
        """
        try:
            found = json.loads(text)
            devices, jobs = found["devices"], found["jobs"]
            if not isinstance(devices, list) or not isinstance(jobs, list):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"{name} is not a trace; write devices and jobs, as in {EXAMPLE}") from None
        devices = tuple(
            device for number, each in enumerate(devices) for device in _devices(each, f"{name}, device {number + 1}")
        )
        arrivals = tuple(_arrival(each, f"{name}, job {number + 1}") for number, each in enumerate(jobs))
        _check_names(devices, arrivals, name)
        return cls(devices, tuple(sorted(arrivals, key=lambda each: (each.at_s, each.job))))


def _devices(entry: Any, place: str) -> tuple[DeviceSlot, ...]:
    values = _table(entry, _DEVICE_KEYS, ("node",), place)
    count = int(_number(values, "count", 1, place, least=1))
    speed = _number(values, "speed", 1.0, place, least=1e-6)
    kind, rack = str(values.get("kind", "gpu")), str(values.get("rack", ""))
    return tuple(DeviceSlot(str(values["node"]), number, kind, speed, rack) for number in range(count))


def _arrival(entry: Any, place: str) -> JobArrival:
    values = _table(entry, _JOB_KEYS, ("job", "work_s"), place)
    limit = _number(values, "max_time_s", 0.0, place)
    try:
        request = ResourceRequest.parse(str(values.get("devices", "1")))
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    return JobArrival(
        str(values["job"]),
        request,
        _number(values, "at_s", 0.0, place),
        _number(values, "work_s", 0.0, place),
        str(values.get("user", "")),
        int(_number(values, "priority", 50, place)),
        bool(values.get("preemptible", False)),
        limit or None,
    )


def _table(entry: Any, known: tuple[str, ...], needed: tuple[str, ...], place: str) -> Mapping[str, Any]:
    if not isinstance(entry, dict):
        raise UserError(f"{place} is not an object; write {{...}} with the keys {', '.join(known)}")
    for key in entry:
        if key not in known:
            raise UserError(f'{place} has an unknown key "{key}"{nearest(key, known)}')
    for key in needed:
        if key not in entry:
            raise UserError(f'{place} has no "{key}"; add it')
    return entry


def _number(values: Mapping[str, Any], key: str, default: float, place: str, least: float = 0.0) -> float:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e15:
        raise UserError(f'{place}: "{key}" must be a number from {least:g}, got {value!r}')
    return value


def _check_names(devices: tuple[DeviceSlot, ...], arrivals: tuple[JobArrival, ...], name: str) -> None:
    if len({device.name for device in devices}) < len(devices):
        raise UserError(f"{name}: a node is there twice; give every node its own name")
    if len({arrival.job for arrival in arrivals}) < len(arrivals):
        raise UserError(f"{name}: a job is there twice; give every job its own name")
