"""Nodes of a Ray cluster as ours: names, addresses, devices and what is near, from resources and labels."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mimatrix.launch.launcher import DeviceFacts, NodeFacts

NEAR, KIND, DEVICES = "mimatrix.near", "mimatrix.kind", "mimatrix.devices"
"""Labels of ours, given with `ray start --labels`: the last two say what the node is to be taken for."""
_ACCELERATOR = "ray.io/accelerator-type"


@dataclass(frozen=True, slots=True)
class Raylet:
    """One node as Ray tells of it."""

    id: str
    """Another one after each start of Ray on the machine."""
    name: str
    address: str
    is_alive: bool
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    ending: str = ""
    """Why it is not alive, as far as Ray knows."""


def node_facts(raylet: Raylet, seen: tuple[DeviceFacts, ...]) -> NodeFacts:
    """The node, where `seen` are the devices that its own keeper finds there."""
    return NodeFacts(raylet.name, raylet.address, _devices(raylet, seen), raylet.labels.get(NEAR, ""))


def tell_apart(nodes: Mapping[str, NodeFacts]) -> dict[str, NodeFacts]:
    """The same nodes by their ids; those that share a name have a piece of the id in it."""
    count = Counter(node.name for node in nodes.values())
    return {
        known: node if count[node.name] == 1 else replace(node, name=f"{node.name}-{known[:8]}")
        for known, node in nodes.items()
    }


def named(nodes: Iterable[NodeFacts]) -> str:
    """Their names, for a sentence."""
    return ", ".join(sorted(node.name for node in nodes)) or "none"


def _devices(raylet: Raylet, seen: tuple[DeviceFacts, ...]) -> tuple[DeviceFacts, ...]:
    gpus = int(raylet.resources.get("GPU", 0))
    cpus = int(raylet.resources.get("CPU", 0))
    if raylet.labels.keys() & {KIND, DEVICES}:
        told = raylet.labels.get(DEVICES, "")
        count = int(told) if told.isdecimal() else gpus or cpus
        return _alike(raylet.labels.get(KIND, "cpu"), count, _memory_bytes(raylet))
    if gpus:
        return _gpus(raylet, gpus, tuple(device for device in seen if device.variables))
    return _alike("cpu", cpus, _memory_bytes(raylet))


def _gpus(raylet: Raylet, count: int, seen: tuple[DeviceFacts, ...]) -> tuple[DeviceFacts, ...]:
    """As the driver names them. Without nvidia-ml-py on the node Ray's word has to do, which knows no memory."""
    if len(seen) >= count:
        return seen[:count]
    kind = raylet.labels.get(_ACCELERATOR, "gpu")
    return tuple(DeviceFacts(kind, 0, {"CUDA_VISIBLE_DEVICES": str(index)}) for index in range(count))


def _alike(kind: str, count: int, memory_bytes: int) -> tuple[DeviceFacts, ...]:
    return (DeviceFacts(kind, memory_bytes // count),) * count if count else ()


def _memory_bytes(raylet: Raylet) -> int:
    """What Ray counts on; it may have been told not to count memory."""
    return int(raylet.resources.get("memory", 0)) or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
