"""Devices and nodes, and the devices of this machine: its GPUs, or else the cores of its CPU."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device of a node."""

    kind: str
    """For people, and for what jobs ask for: `NVIDIA A40`, `cpu`."""
    memory_bytes: int
    variables: Mapping[str, str] = field(default_factory=dict)
    """What a process needs in its environment to see this device and no other."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One machine that answers."""

    name: str
    address: str
    """The address at which the other nodes reach it."""
    devices: tuple[DeviceInfo, ...]
    rack: str = ""
    """Nodes with the same value are close to one another."""


def find_devices() -> tuple[DeviceInfo, ...]:
    """Return the GPUs that the driver knows; if there are none, one device per core, with its part of the memory."""
    return _find_gpus() or cores(len(os.sched_getaffinity(0)))


def cores(count: int) -> tuple[DeviceInfo, ...]:
    """Return `count` devices of the kind `cpu`, with equal parts of this machine's memory."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (DeviceInfo("cpu", memory_bytes // count),) * count


def _find_gpus() -> tuple[DeviceInfo, ...]:
    """Return no GPU if nvidia-ml-py is not installed, or if there is no driver."""
    try:
        nvml = import_module("pynvml")  # what nvidia-ml-py is imported as
        nvml.nvmlInit()
    except (ImportError, OSError):
        return ()
    except nvml.NVMLError:
        return ()
    try:
        found = [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()
    return tuple(gpu for gpu in found if gpu)


def _gpu(nvml: Any, index: int) -> DeviceInfo | None:
    """Return None for one that does not answer: it has fallen off the bus, or was taken away."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
        memory_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:
        return None
    # By its UUID: CUDA orders GPUs by speed, the driver by bus.
    return DeviceInfo(_text(name), memory_bytes, {"CUDA_VISIBLE_DEVICES": _text(uuid)})


def _text(value: str | bytes) -> str:
    """Decode what older versions of the library return as bytes."""
    return value.decode() if isinstance(value, bytes) else value
