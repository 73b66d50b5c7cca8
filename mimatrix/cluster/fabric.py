"""A cluster as directed channels, ready for arithmetic: every cable gives one channel for each direction.

Routing happens between *cores*: the switches, and the nodes that forward. Each device reaches the cores through its
`exits`: the channels from it up to a core and back down, one exit for every NIC that it may use.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import shortest_path

from mimatrix.cluster.model import Cluster, Node
from mimatrix.core.errors import UserError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MOST_CORES = 5_000
"""Distances are kept for every pair of cores."""


@dataclass(frozen=True, slots=True)
class Channel:
    """One direction of one cable."""

    tail: str
    head: str
    rate_bytes_per_s: float
    latency_s: float

    @property
    def name(self) -> str:
        """The two ends, as in `n3->leaf0`; a device's own NIC is named after the device."""
        return f"{self.tail}->{self.head}"


@dataclass(frozen=True, slots=True)
class Exit:
    """One path from a device out to a core: channels outwards, channels inwards, both in order of travel."""

    out: tuple[int, ...]
    back: tuple[int, ...]
    core: int


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two channels of a cable, by number, and for a NIC the core that `out` leads to."""

    out: int
    back: int
    core: int = -1


class Fabric:
    """The channels of a cluster, each device's exits, and the distances between cores."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.channels: list[Channel] = []
        self.core_names = [s.name for s in cluster.switches] + [n.name for n in cluster.nodes if n.forwards]
        self.core_channels: list[tuple[int, int, int]] = []
        """(channel, tail, head) of every channel between two cores."""
        self.node_of = np.repeat(np.arange(len(cluster.nodes)), [len(node.devices) for node in cluster.nodes])
        self._cores = {name: index for index, name in enumerate(self.core_names)}
        self._climbs = [_climb(node, local) for node in cluster.nodes for local in range(len(node.devices))]
        nics = self._lay_links()
        rungs = self._lay_buses()
        self.exits = [self._exits(device, nics, rungs) for device in range(len(self._climbs))]
        self._rungs = rungs

    @cached_property
    def rates(self) -> Floats:
        """The rate of every channel in bytes per second."""
        return np.array([channel.rate_bytes_per_s for channel in self.channels])

    @cached_property
    def latencies(self) -> Floats:
        """The latency of every channel in seconds."""
        return np.array([channel.latency_s for channel in self.channels])

    @cached_property
    def distance(self) -> Floats:
        """Hops between each pair of cores; infinite if no path joins them."""
        if len(self.core_names) > MOST_CORES:
            raise UserError(
                f"{self.cluster.name} has {len(self.core_names)} switches and nodes that forward, more than the "
                f"{MOST_CORES} that routes can be found among; use a smaller one"
            )
        joined = np.zeros((len(self.core_names), len(self.core_names)))
        for _, tail, head in self.core_channels:
            joined[tail, head] = 1.0
        hops: Floats = shortest_path(csr_array(joined), unweighted=True, method="D")
        return hops

    def inside(self, source: int, target: int) -> tuple[int, ...] | None:
        """Return the channels between two devices of one node over its bus, or None if no bus joins them."""
        up, down = self._climbs[source], self._climbs[target]
        meeting = next((vertex for vertex in up if vertex in down), None)
        if meeting is None:
            return None
        rising = tuple(self._rungs[vertex].out for vertex in up[: up.index(meeting)])
        falling = tuple(self._rungs[vertex].back for vertex in reversed(down[: down.index(meeting)]))
        return rising + falling

    def _lay_links(self) -> dict[str, list[_Pair]]:
        """Add channels for every cable of every link; return the NICs by the node or device that they serve."""
        nics: dict[str, list[_Pair]] = defaultdict(list)
        for link in self.cluster.links:
            near, far = (link.a, link.b) if link.b in self._cores else (link.b, link.a)
            if far not in self._cores:
                raise UserError(
                    f"the link {link.a} - {link.b} joins two machines that do not forward; put a switch between them "
                    f"(or let it end at nodes that have forwards = true)"
                )
            for _ in range(link.parallel):
                pair = self._lay(near, far, link.rate_bytes_per_s, link.latency_s)
                if near in self._cores:
                    tail, head = self._cores[near], self._cores[far]
                    self.core_channels += [(pair.out, tail, head), (pair.back, head, tail)]
                else:
                    nics[near].append(_Pair(pair.out, pair.back, self._cores[far]))
        return nics

    def _lay_buses(self) -> dict[str, _Pair]:
        """Add channels up from each device and each PCIe switch; return them by the name of the lower end."""
        rungs: dict[str, _Pair] = {}
        for climb, node in zip(self._climbs, self.node_of, strict=True):
            bus = self.cluster.nodes[node].bus
            for below, above in pairwise(climb):
                if bus and below not in rungs:
                    rungs[below] = self._lay(below, above, bus.rate_bytes_per_s, bus.latency_s)
        return rungs

    def _exits(self, device: int, nics: dict[str, list[_Pair]], rungs: dict[str, _Pair]) -> tuple[Exit, ...]:
        node, climb = self.cluster.nodes[self.node_of[device]], self._climbs[device]
        to_host = [rungs[vertex] for vertex in climb[:-1]]
        if climb[0] in nics:
            # Its own NIC sits on the PCIe switch next to the device, where there is one.
            to_switch = to_host[:1] if node.bus and node.bus.fanout else []
            return tuple(_exit([*to_switch, nic], nic.core) for nic in nics[climb[0]])
        if node.forwards:
            return (_exit(to_host, self._cores[node.name]),)
        return tuple(_exit([*to_host, nic], nic.core) for nic in nics.get(node.name, ()))

    def _lay(self, near: str, far: str, rate_bytes_per_s: float, latency_s: float) -> _Pair:
        self.channels.append(Channel(near, far, rate_bytes_per_s, latency_s))
        self.channels.append(Channel(far, near, rate_bytes_per_s, latency_s))
        return _Pair(len(self.channels) - 2, len(self.channels) - 1)


def _climb(node: Node, local: int) -> list[str]:
    """Return the vertices from a device up to its host: itself, its PCIe switch if any, the host if it has a bus."""
    device = f"{node.name}/{local}"
    if node.bus is None:
        return [device]
    if node.bus.fanout:
        return [device, f"{node.name}/pcie{local // node.bus.fanout}", node.name]
    return [device, node.name]


def _exit(pairs: Iterable[_Pair], core: int) -> Exit:
    steps = list(pairs)
    return Exit(tuple(pair.out for pair in steps), tuple(pair.back for pair in reversed(steps)), core)
