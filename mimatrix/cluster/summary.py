"""Summary of a cluster's network: distances between devices, bisection bandwidth, and what is oversubscribed."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from mimatrix.cluster.bisection import narrowest_bisection
from mimatrix.cluster.fabric import Fabric, Floats, Ints
from mimatrix.core.units import format_rate


@dataclass(frozen=True, slots=True)
class Oversubscribed:
    """A switch or node that devices can fill faster than it empties: `ratio` to 1."""

    name: str
    ratio: float
    reason: str


@dataclass(frozen=True, slots=True)
class ClusterSummary:
    """The figures of a cluster's network.

    Hops are the switches, and the nodes that forward for others, on the shortest path between devices of different
    nodes: 1 in a star, 0 between neighbours of a ring; infinite if some devices cannot reach one another, and
    `unreachable` then names two of them. 0 in a cluster of one node.

    The bisection bandwidth is at most `bisection_bytes_per_s`: that of the narrowest split into halves of those tried,
    which `split` names, with ideal routing. `full_bisection_bytes_per_s` is what this split would have if NICs and
    buses alone set limits, a shared NIC counted once.
    """

    nodes: int
    devices: int
    switches: int
    nic_cables: int
    """Cables between a node or device and a switch; parallel ones counted."""
    trunk_cables: int
    """Cables between switches, and between nodes that forward; parallel ones counted."""
    most_hops: float
    mean_hops: float
    unreachable: tuple[str, str] | None
    split: str
    bisection_bytes_per_s: float
    full_bisection_bytes_per_s: float
    oversubscribed: tuple[Oversubscribed, ...]

    @property
    def bisection_ratio(self) -> float:
        """The fraction of the full bisection bandwidth: 1 if the network sets no limit, 0 if it carries nothing."""
        if self.full_bisection_bytes_per_s == 0:
            return 0.0 if self.unreachable else 1.0
        return self.bisection_bytes_per_s / self.full_bisection_bytes_per_s


def summarize(fabric: Fabric) -> ClusterSummary:
    """Summarize a cluster's network. Works by switches, not by pairs of devices: 4,096 devices take seconds."""
    cluster = fabric.cluster
    hops = _HopStatistics(fabric)
    bisection = narrowest_bisection(fabric)
    trunks = len(fabric.core_channels) // 2
    return ClusterSummary(
        nodes=len(cluster.nodes),
        devices=len(fabric.node_of),
        switches=len(cluster.switches),
        nic_cables=sum(link.parallel for link in cluster.links) - trunks,
        trunk_cables=trunks,
        most_hops=hops.most,
        mean_hops=hops.mean,
        unreachable=hops.unreachable,
        split=bisection.split,
        bisection_bytes_per_s=bisection.bytes_per_s,
        full_bisection_bytes_per_s=bisection.full_bytes_per_s,
        oversubscribed=(*_narrow_switches(fabric), *_narrow_nodes(fabric)),
    )


_Place = tuple[tuple[int, ...], bool]
"""The cores that a device's exits lead to, and whether one of them is its own node."""


class _HopStatistics:
    """Hops between devices of different nodes, by places: devices with the same exits are at the same place."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        numbers: dict[_Place, int] = {}
        self._place = np.array([numbers.setdefault(place, len(numbers)) for place in _places(fabric)])
        self._hops = _hops_between(fabric, list(numbers))
        self._pairs = self._count_pairs(len(numbers))

    @property
    def most(self) -> float:
        return float(self._hops.max(where=self._pairs > 0, initial=0.0))

    @property
    def mean(self) -> float:
        if math.isinf(self.most):
            return math.inf
        counted = self._pairs > 0
        return float((self._hops[counted] * self._pairs[counted]).sum() / max(1, self._pairs.sum()))

    @property
    def unreachable(self) -> tuple[str, str] | None:
        """Two devices of different nodes with no path between them, or None."""
        apart = np.argwhere(np.isinf(self._hops) & (self._pairs > 0))
        if not len(apart):
            return None
        node_of, names = self._fabric.node_of, self._fabric.cluster.device_names
        sources, targets = np.flatnonzero(self._place == apart[0, 0]), np.flatnonzero(self._place == apart[0, 1])
        source = next(device for device in sources if (node_of[targets] != node_of[device]).any())
        target = next(device for device in targets if node_of[device] != node_of[source])
        return names[source], names[target]

    def _count_pairs(self, places: int) -> Ints:
        """Count the ordered pairs of devices of different nodes, for each pair of places."""
        counts = np.bincount(self._place, minlength=places)
        pairs = np.multiply.outer(counts, counts)
        starts = np.flatnonzero(np.diff(self._fabric.node_of, prepend=-1))
        for within in np.split(self._place, starts[1:]):
            held, times = np.unique(within, return_counts=True)
            pairs[np.ix_(held, held)] -= np.multiply.outer(times, times)
        return pairs


def _places(fabric: Fabric) -> Iterator[_Place]:
    for exits, node in zip(fabric.exits, fabric.node_of, strict=True):
        cores = tuple(sorted({way.core for way in exits}))
        yield cores, any(fabric.core_names[core] == fabric.cluster.nodes[node].name for core in cores)


def _hops_between(fabric: Fabric, places: list[_Place]) -> Floats:
    """Return the cores crossed on the shortest path between each two places, a device's own node left out."""
    reached = np.flatnonzero([bool(cores) for cores, _ in places])
    width = max(len(cores) for cores, _ in places)
    # Padded with the first core of each place: a minimum does not mind.
    cores = np.array([(*near, *near[:1] * (width - len(near))) for near, _ in places if near], dtype=np.int64)
    cores = cores.reshape(len(reached), width)
    own = np.array([stands for near, stands in places if near], dtype=float)
    crossed = np.full((len(reached), len(reached)), np.inf)
    for near, far in product(range(width), repeat=2):
        np.minimum(crossed, fabric.distance[np.ix_(cores[:, near], cores[:, far])], out=crossed)
    crossed += 1.0 - own[:, None]
    crossed -= own[None, :]
    if len(reached) == len(places):
        return crossed
    hops = np.full((len(places), len(places)), np.inf)
    hops[np.ix_(reached, reached)] = crossed
    return hops


def _narrow_switches(fabric: Fabric) -> Iterator[Oversubscribed]:
    """Yield switches that take more from their nodes than they can pass on to other switches."""
    switches = fabric.cluster.switches
    below, across = defaultdict[int, float](float), defaultdict[int, float](float)
    for channel, tail, head in fabric.core_channels:
        towards = across if head < len(switches) else below
        towards[tail] += float(fabric.rates[channel])
    nics = {(way.core, way.out[-1]) for exits in fabric.exits for way in exits if way.core < len(switches)}
    for core, channel in nics:
        below[core] += float(fabric.rates[channel])
    for core, switch in enumerate(switches):
        if across[core] and below[core] > across[core] * (1 + 1e-9):
            ratio = below[core] / across[core]
            rates = f"{format_rate(below[core])} to its devices, {format_rate(across[core])} to other switches"
            yield Oversubscribed(switch.name, ratio, f"{rates}: {ratio:.3g} to 1")


def _narrow_nodes(fabric: Fabric) -> Iterator[Oversubscribed]:
    """Yield nodes whose devices share NICs that are slower than the devices' buses together."""
    first = 0
    for node in fabric.cluster.nodes:
        devices = range(first, first + len(node.devices))
        first = devices.stop
        nics = _shared_nics(fabric, node.name, devices) if len(devices) > 1 else set()
        rate = float(sum(fabric.rates[nic] for nic in nics))
        wanted = _rate_into_nics(fabric, devices, rate)
        if nics and wanted > rate * (1 + 1e-9):
            shared = f"one NIC of {format_rate(rate)}"
            if len(nics) > 1:
                shared = f"{len(nics)} NICs of {format_rate(rate)} together"
            reason = f"{len(devices)} devices share {shared}: {wanted / rate:.3g} to 1"
            yield Oversubscribed(node.name, wanted / rate, reason)


def _shared_nics(fabric: Fabric, node: str, devices: range) -> set[int]:
    """Return the channels out of the node that its devices share; for a node that forwards, all its cables."""
    ways = [way for device in devices for way in fabric.exits[device]]
    standing = {way.core for way in ways if fabric.core_names[way.core] == node}
    if standing:
        return {channel for channel, tail, _ in fabric.core_channels if tail in standing}
    return {way.out[-1] for way in ways if fabric.channels[way.out[-1]].tail == node}


def _rate_into_nics(fabric: Fabric, devices: range, nic_rate_bytes_per_s: float) -> float:
    """Return the rate from the buses into the NICs; without a bus each device counts as fast as all NICs together."""
    node = fabric.cluster.nodes[int(fabric.node_of[devices.start])]
    if node.bus is None:
        return len(devices) * nic_rate_bytes_per_s
    feeders = math.ceil(len(devices) / node.bus.fanout) if node.bus.fanout else len(devices)
    return feeders * node.bus.rate_bytes_per_s
