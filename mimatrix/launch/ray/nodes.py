"""Nodes of a Ray cluster: names, addresses, devices and racks, from resources and labels."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mimatrix.launch.devices import DeviceInfo, NodeInfo

RACK, KIND, DEVICES = "mimatrix.rack", "mimatrix.kind", "mimatrix.devices"
"""Our labels for `ray start --labels`; the last two replace the devices that the node has."""
_ACCELERATOR = "ray.io/accelerator-type"


@dataclass(frozen=True, slots=True)
class Raylet:
    """One node, as Ray describes it."""

    id: str
    """A new one after each start of Ray on the machine."""
    name: str
    address: str
    is_alive: bool
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    ending: str = ""
    """Why it is not alive, as far as Ray knows."""


def node_info(raylet: Raylet, seen: tuple[DeviceInfo, ...]) -> NodeInfo:
    """Return the node, given the devices that its agent has found there."""
    return NodeInfo(raylet.name, raylet.address, _devices(raylet, seen), raylet.labels.get(RACK, ""))


def tell_apart(nodes: Mapping[str, NodeInfo]) -> dict[str, NodeInfo]:
    """Return the nodes, with a piece of the id in each name that several of them have."""
    count = Counter(node.name for node in nodes.values())
    return {
        known: node if count[node.name] == 1 else replace(node, name=f"{node.name}-{known[:8]}")
        for known, node in nodes.items()
    }


def join_names(nodes: Iterable[NodeInfo]) -> str:
    """Return the names of nodes, for a sentence."""
    return ", ".join(sorted(node.name for node in nodes)) or "none"


def _devices(raylet: Raylet, seen: tuple[DeviceInfo, ...]) -> tuple[DeviceInfo, ...]:
    gpus = int(raylet.resources.get("GPU", 0))
    cpus = int(raylet.resources.get("CPU", 0))
    if raylet.labels.keys() & {KIND, DEVICES}:
        told = raylet.labels.get(DEVICES, "")
        count = int(told) if told.isdecimal() else gpus or cpus
        return _alike(raylet.labels.get(KIND, "cpu"), count, _memory_bytes(raylet))
    if gpus:
        return _gpus(raylet, gpus, tuple(device for device in seen if device.variables))
    return _alike("cpu", cpus, _memory_bytes(raylet))


def _gpus(raylet: Raylet, count: int, seen: tuple[DeviceInfo, ...]) -> tuple[DeviceInfo, ...]:
    """Return the GPUs as the driver names them; without nvidia-ml-py on the node, as Ray does, without memory."""
    if len(seen) >= count:
        return seen[:count]
    kind = raylet.labels.get(_ACCELERATOR, "gpu")
    return tuple(DeviceInfo(kind, 0, {"CUDA_VISIBLE_DEVICES": str(index)}) for index in range(count))


def _alike(kind: str, count: int, memory_bytes: int) -> tuple[DeviceInfo, ...]:
    return (DeviceInfo(kind, memory_bytes // count),) * count if count else ()


def _memory_bytes(raylet: Raylet) -> int:
    """Return the memory that Ray manages, or all if it was told not to manage memory."""
    return int(raylet.resources.get("memory", 0)) or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
