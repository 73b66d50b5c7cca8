"""The devices of this machine: its GPUs, or else the cores of its processor."""

import os
from importlib import import_module
from typing import Any

from mimatrix.launch.launcher import DeviceFacts


def find_devices() -> tuple[DeviceFacts, ...]:
    """One for each GPU that the driver knows; without any, one for each core, with its part of the memory."""
    return _find_gpus() or cores(len(os.sched_getaffinity(0)))


def cores(count: int) -> tuple[DeviceFacts, ...]:
    """So many devices of the kind `cpu`, with equal parts of this machine's memory."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (DeviceFacts("cpu", memory_bytes // count),) * count


def _find_gpus() -> tuple[DeviceFacts, ...]:
    """None where nvidia-ml-py is not installed, or where there is no driver."""
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


def _gpu(nvml: Any, index: int) -> DeviceFacts | None:
    """None for one that does not answer: it has fallen off the bus, or somebody took it."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
        memory_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:
        return None
    # By its name for all time: CUDA orders GPUs by speed, the driver by bus.
    return DeviceFacts(_text(name), memory_bytes, {"CUDA_VISIBLE_DEVICES": _text(uuid)})


def _text(told: str | bytes) -> str:
    """Older versions of the library answer in bytes."""
    return told.decode() if isinstance(told, bytes) else told
