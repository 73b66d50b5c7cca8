"""The hardware as values. A cluster is nodes with devices, switches, and the links between them.

A link that ends at a node is that node's NIC, shared by its devices; a link that ends at a device (`node/0`) is that
device's own NIC. A NIC is nothing but such a link.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from mimatrix.core.errors import UserError, nearest
from mimatrix.core.units import format_rate

MOST_PARTS = 2_000_000
"""Devices, switches and cables of one cluster: a slip of the finger is refused before it fills the memory."""

# Beyond these no cable is, and sums of times would lose their digits.
_SLOWEST, _FASTEST, _LONGEST_S = 1e-3, 1e18, 1e6


@dataclass(frozen=True, slots=True)
class Device:
    """One processor that computes: a GPU, or the CPU of a host."""

    kind: str = "gpu"
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Bus:
    """The bus that joins the devices of one node, usually PCIe.

    With `fanout` devices share a PCIe switch in groups of that size, and the switches meet at the host; with 0 every
    device is joined to the host directly.
    """

    rate_bytes_per_s: float
    latency_s: float = 0.0
    fanout: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """One machine. `forwards` lets traffic of others pass through it, as in a ring or a torus."""

    name: str
    devices: tuple[Device, ...]
    bus: Bus | None = None
    forwards: bool = False

    def device_names(self) -> Iterator[str]:
        """Return the names that links use: `node/0`, `node/1`, ..."""
        return (f"{self.name}/{index}" for index in range(len(self.devices)))


@dataclass(frozen=True, slots=True)
class Switch:
    """A network switch. `group` is its role in the network (leaf, spine, upper, lower, ...)."""

    name: str
    group: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """A full-duplex cable, or `parallel` equal ones: `rate_bytes_per_s` for each cable and direction."""

    a: str
    b: str
    rate_bytes_per_s: float
    latency_s: float = 0.0
    parallel: int = 1


@dataclass(frozen=True)
class Cluster:
    """All that a plan or a simulation needs to know of the hardware. Checked on construction."""

    name: str
    nodes: tuple[Node, ...]
    switches: tuple[Switch, ...]
    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        _check_size(self)
        _check_names(self)
        for node in self.nodes:
            _check_node(node)
        for link in self.links:
            _check_link(link, self.kind_of)

    @cached_property
    def device_names(self) -> tuple[str, ...]:
        """Every device of every node, in the order of the file: device number i is `device_names[i]`."""
        return tuple(name for node in self.nodes for name in node.device_names())

    @cached_property
    def kind_of(self) -> dict[str, Literal["node", "device", "switch"]]:
        """The kind of each name that a link may end at."""
        kinds: dict[str, Literal["node", "device", "switch"]] = {s.name: "switch" for s in self.switches}
        kinds |= {node.name: "node" for node in self.nodes}
        kinds |= dict.fromkeys(self.device_names, "device")
        return kinds


def _check_size(cluster: Cluster) -> None:
    devices, cables = sum(len(node.devices) for node in cluster.nodes), sum(link.parallel for link in cluster.links)
    if devices + len(cluster.switches) + cables > MOST_PARTS:
        raise UserError(
            f'cluster "{cluster.name}" has {devices} devices, {len(cluster.switches)} switches and {cables} cables; '
            f"use fewer, {MOST_PARTS} in all at the most"
        )


def _check_names(cluster: Cluster) -> None:
    if not cluster.device_names:
        raise UserError(f'cluster "{cluster.name}" has no device; add a [[node]] with devices = [...]')
    for name, times in Counter([n.name for n in cluster.nodes] + [s.name for s in cluster.switches]).items():
        if times > 1:
            raise UserError(f'the name "{name}" is used {times} times; give every node and switch its own')
        if not name or "/" in name or "->" in name:
            raise UserError(
                f'"{name}" cannot be a name; use letters, digits and hyphens ("/" marks a device of a node)'
            )


def _check_node(node: Node) -> None:
    if not node.devices:
        raise UserError(f'node "{node.name}" has no device; add one, or leave the node out')
    if any(device.memory_bytes < 0 for device in node.devices):
        raise UserError(f'a device of node "{node.name}" has less than no memory; write for example memory = "24GB"')
    if node.forwards and len(node.devices) > 1 and not node.bus:
        raise UserError(
            f'node "{node.name}" forwards and has several devices; say what joins them, as bus = {{rate = "16GB"}}'
        )
    if node.bus:
        _check_rate(f'the bus of node "{node.name}"', node.bus.rate_bytes_per_s, node.bus.latency_s)
        if node.bus.fanout < 0:
            raise UserError(
                f'the bus of node "{node.name}" has fanout {node.bus.fanout}; use 0 (no PCIe switch) or more'
            )


def _check_link(link: Link, known: Iterable[str]) -> None:
    name = f"the link {link.a} - {link.b}"
    for end in (link.a, link.b):
        if end not in known:
            raise UserError(f'{name} ends at "{end}", which does not exist{nearest(end, known)}')
    if link.a == link.b:
        raise UserError(f"{name} joins a thing to itself; remove it")
    _check_rate(name, link.rate_bytes_per_s, link.latency_s)
    if link.parallel < 1:
        raise UserError(f"{name} has parallel = {link.parallel}; use 1 or more")


def _check_rate(name: str, rate_bytes_per_s: float, latency_s: float) -> None:
    if not _SLOWEST <= rate_bytes_per_s <= _FASTEST:
        raise UserError(
            f"{name} has the rate {format_rate(rate_bytes_per_s)}; write a finite one above zero, as in 25Gbit"
        )
    if not 0 <= latency_s <= _LONGEST_S:
        raise UserError(f"{name} has the latency {latency_s} s; it must be zero or more and short, as in 3us")
