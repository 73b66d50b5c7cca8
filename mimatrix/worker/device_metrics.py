"""How this worker's device is used: of a GPU by the driver's own figures, of a CPU by what this process takes."""

import os
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from mimatrix.wire.messages import Traffic, Use

T = TypeVar("T")
_MILLI = 1000.0
_MBIT_BYTES, _NO_SPEED = 125_000.0, 65_535
_LEAST_S = 0.5
_GAUGED_S = 5.0
"""To ask a device, or the kernel, takes longer than all the rest of a report."""


def gauge() -> Callable[[], Use | None]:
    """A function that tells it; None from it where nobody can tell. Made once, since libraries are looked for."""
    uuid = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    found = _of_gpu(uuid) if uuid.startswith("GPU-") else None
    return _now_and_then(found or _of_process() or (lambda: None))


def _now_and_then(told: Callable[[], T]) -> Callable[[], T | None]:
    """What it told last; it is asked again the less often the longer it goes on, up to a limit."""
    began_s = at_s = time.monotonic()
    said: T | None = None

    def remembered() -> T | None:
        nonlocal said, at_s
        now_s = time.monotonic()
        if said is None or now_s - at_s >= min(_GAUGED_S, (now_s - began_s) / 2):
            said, at_s = told(), now_s
        return said

    return remembered


def _of_gpu(uuid: str) -> Callable[[], Use | None] | None:
    try:
        nvml = import_module("pynvml")  # what nvidia-ml-py is imported as
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:  # noqa: BLE001 (it may be missing, too old, or without a driver: there are no figures then)
        return None

    def asked(name: str, *more: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *more)
        except nvml.NVMLError:
            return None

    def told() -> Use:
        rates, memory = asked("nvmlDeviceGetUtilizationRates"), asked("nvmlDeviceGetMemoryInfo")
        power = asked("nvmlDeviceGetPowerUsage")
        return Use(
            busy=rates.gpu / 100 if rates else None,
            memory_bytes=int(memory.used) if memory else None,
            memory_total_bytes=int(memory.total) if memory else None,
            power_w=power / _MILLI if power is not None else None,
            temperature_c=asked("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        )

    return told


def _of_process() -> Callable[[], Use | None] | None:
    psutil = _psutil()
    if psutil is None:
        return None
    process, total = psutil.Process(), psutil.virtual_memory().total
    process.cpu_percent()

    def told() -> Use:
        return Use(
            busy=min(1.0, process.cpu_percent() / 100),
            memory_bytes=process.memory_info().rss,
            memory_total_bytes=total,
            temperature_c=_temperature(psutil),
        )

    return told


def link_gauge(address: str) -> Callable[[], Traffic | None]:
    """Tells what the link with this address carries, as a mean since it was asked last."""
    psutil = _psutil()
    nic = _nic_of(psutil, address) if psutil else ""
    if not nic:
        return lambda: None
    last, capacity = [time.monotonic(), *_counted(psutil, nic)], _capacity(psutil, nic)

    def told() -> Traffic | None:
        now = [time.monotonic(), *_counted(psutil, nic)]
        seconds, received, sent = (new - old for new, old in zip(now, last, strict=True))
        if seconds < _LEAST_S:
            return None
        last[:] = now
        return Traffic(
            nic=nic[:50],
            received_bytes_per_s=max(0.0, received) / seconds,
            sent_bytes_per_s=max(0.0, sent) / seconds,
            capacity_bytes_per_s=capacity,
        )

    return _now_and_then(told)


def _nic_of(psutil: Any, address: str) -> str:
    found = psutil.net_if_addrs().items()
    return next((nic for nic, known in found if any(each.address == address for each in known)), "")


def _counted(psutil: Any, nic: str) -> tuple[int, int]:
    found = psutil.net_io_counters(pernic=True).get(nic)
    return (found.bytes_recv, found.bytes_sent) if found else (0, 0)


def _capacity(psutil: Any, nic: str) -> float | None:
    """Drivers give it in Mbit/s, and 0 or all ones where there is no such thing."""
    found = psutil.net_if_stats().get(nic)
    return found.speed * _MBIT_BYTES if found and 0 < found.speed < _NO_SPEED else None


def _psutil() -> Any:
    try:
        return import_module("psutil")
    except ImportError:
        return None


def _temperature(psutil: Any) -> float | None:
    """Of the processor, where the machine has a sensor that says so."""
    try:
        sensors = psutil.sensors_temperatures()
    except (AttributeError, OSError):
        return None
    named = [sensors[name] for name in ("coretemp", "k10temp", "cpu_thermal") if sensors.get(name)]
    return float(named[0][0].current) if named else None
