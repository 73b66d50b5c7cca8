"""Use of this worker's device and network link: GPUs by NVML, CPUs by this process's own use."""

import os
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from mimatrix.api.models import DeviceUsage, LinkUsage

T = TypeVar("T")
_MILLI = 1000.0
_MBIT_BYTES, _NO_SPEED = 125_000.0, 65_535
_MIN_INTERVAL_S = 0.5
_MAX_AGE_S = 5.0
"""To query a device or the kernel takes longer than the rest of a report."""


def device_sampler() -> Callable[[], DeviceUsage | None]:
    """Return a function that reports the use of this device, or None if it is unknown.

    Create it once, since it looks for libraries.
    """
    uuid = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    sample = _gpu_sampler(uuid) if uuid.startswith("GPU-") else None
    return throttled(sample or _process_sampler() or (lambda: None))


def link_sampler(address: str) -> Callable[[], LinkUsage | None]:
    """Return a function that reports the mean traffic, since its last sample, of the NIC with this address."""
    psutil = _import_psutil()
    nic = _find_nic(psutil, address) if psutil else ""
    if not nic:
        return lambda: None
    last, capacity = [time.monotonic(), *_count_bytes(psutil, nic)], _capacity(psutil, nic)

    def sample() -> LinkUsage | None:
        now = [time.monotonic(), *_count_bytes(psutil, nic)]
        seconds, received, sent = (new - old for new, old in zip(now, last, strict=True))
        if seconds < _MIN_INTERVAL_S:
            return None
        last[:] = now
        return LinkUsage(
            nic=nic[:50],
            received_bytes_per_s=max(0.0, received) / seconds,
            sent_bytes_per_s=max(0.0, sent) / seconds,
            capacity_bytes_per_s=capacity,
        )

    return throttled(sample)


def throttled(sample: Callable[[], T]) -> Callable[[], T | None]:
    """Return a function that repeats the last sample; the longer it exists, the less often it samples again."""
    created_s = sampled_s = time.monotonic()
    last: T | None = None

    def sample_or_repeat() -> T | None:
        nonlocal last, sampled_s
        now_s = time.monotonic()
        if last is None or now_s - sampled_s >= min(_MAX_AGE_S, (now_s - created_s) / 2):
            last, sampled_s = sample(), now_s
        return last

    return sample_or_repeat


def _gpu_sampler(uuid: str) -> Callable[[], DeviceUsage | None] | None:
    try:
        nvml = import_module("pynvml")  # the module of nvidia-ml-py
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:  # noqa: BLE001 (it may be missing, too old, or without a driver: then there are no metrics)
        return None

    def query(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *arguments)
        except nvml.NVMLError:
            return None

    def sample() -> DeviceUsage:
        rates, memory = query("nvmlDeviceGetUtilizationRates"), query("nvmlDeviceGetMemoryInfo")
        power = query("nvmlDeviceGetPowerUsage")
        return DeviceUsage(
            busy=rates.gpu / 100 if rates else None,
            memory_bytes=int(memory.used) if memory else None,
            memory_total_bytes=int(memory.total) if memory else None,
            power_w=power / _MILLI if power is not None else None,
            temperature_c=query("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        )

    return sample


def _process_sampler() -> Callable[[], DeviceUsage | None] | None:
    psutil = _import_psutil()
    if psutil is None:
        return None
    process, total = psutil.Process(), psutil.virtual_memory().total
    process.cpu_percent()

    def sample() -> DeviceUsage:
        return DeviceUsage(
            busy=min(1.0, process.cpu_percent() / 100),
            memory_bytes=process.memory_info().rss,
            memory_total_bytes=total,
            temperature_c=_temperature(psutil),
        )

    return sample


def _find_nic(psutil: Any, address: str) -> str:
    nics = psutil.net_if_addrs().items()
    return next((nic for nic, entries in nics if any(entry.address == address for entry in entries)), "")


def _count_bytes(psutil: Any, nic: str) -> tuple[int, int]:
    counters = psutil.net_io_counters(pernic=True).get(nic)
    return (counters.bytes_recv, counters.bytes_sent) if counters else (0, 0)


def _capacity(psutil: Any, nic: str) -> float | None:
    """Return the speed of a NIC, or None; drivers report it in Mbit/s, and 0 or all ones if it is unknown."""
    stats = psutil.net_if_stats().get(nic)
    return stats.speed * _MBIT_BYTES if stats and 0 < stats.speed < _NO_SPEED else None


def _import_psutil() -> Any:
    try:
        return import_module("psutil")
    except ImportError:
        return None


def _temperature(psutil: Any) -> float | None:
    """Return the temperature of the CPU, or None if the machine has no such sensor."""
    try:
        sensors = psutil.sensors_temperatures()
    except (AttributeError, OSError):
        return None
    readings = [sensors[name] for name in ("coretemp", "k10temp", "cpu_thermal") if sensors.get(name)]
    return float(readings[0][0].current) if readings else None
