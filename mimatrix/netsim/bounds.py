"""Lower bounds for any algorithm: what must cross the edge of a part of the cluster, divided by the edge's rate.

Contract a set of ranks into one: it must still send its data out (or the result, if it sums) and take the result in, so
the whole message crosses its edge in each direction. And over the n parts of a partition an all-reduce moves at least
2(n-1) messages (one-way gossip), its halves and the broadcast n-1. The parts tried are the devices, the nodes, and the
devices attached to each switch.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mimatrix.cluster.fabric import Fabric
from mimatrix.collectives.schedule import Collective, Schedule
from mimatrix.netsim.traffic import check_placement

Ints = NDArray[np.int64]


def lower_bound_seconds(
    schedule: Schedule, fabric: Fabric, placement: Sequence[int] | None, message_bytes: float
) -> float:
    """Return a time that no algorithm for this collective can beat on this placement."""
    devices = check_placement(fabric, schedule.ranks, placement)
    owned = np.bincount(schedule.owners, weights=schedule.shares.fractions, minlength=schedule.ranks)
    per_byte = 0.0
    for part_of, edges in _partitions(fabric, devices):
        rates = np.array([fabric.rates[list(edge)].sum() for edge in edges])
        share = np.bincount(part_of, owned, len(edges)).astype(np.float64, copy=False)
        if len(edges) > 1:
            per_byte = max(per_byte, _seconds_per_byte(schedule.collective, rates, share))
    return per_byte * message_bytes + _least_latency_s(fabric, devices)


def _seconds_per_byte(collective: Collective, rates: NDArray[np.float64], share: NDArray[np.float64]) -> float:
    """Return the larger bound: of the slowest part alone, and of all parts together."""
    crossing = np.ones(len(rates))
    if collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
        crossing = np.maximum(share, 1 - share)
    messages = (2 if collective is Collective.ALL_REDUCE else 1) * (len(rates) - 1)
    return float(max((crossing / rates).max(), messages / rates.sum()))


def _partitions(fabric: Fabric, devices: Ints) -> Iterator[tuple[Ints, list[set[int]]]]:
    """Yield each partition tried: the part of each rank, and for each part the channels that lead out of it."""
    yield np.arange(len(devices)), [_device_edge(fabric, int(device)) for device in devices]
    nodes, node_of = np.unique(fabric.node_of[devices], return_inverse=True)
    if len(nodes) < len(devices):
        yield node_of, [_node_edge(fabric, int(node)) for node in nodes]
    switches = [{way.core for way in fabric.exits[device]} for device in devices]
    # A node on two switches joins them from within, so that what hangs on one switch has more ways out than its links.
    on_one = all(len({core for at in np.flatnonzero(node_of == n) for core in switches[at]}) == 1 for n in set(node_of))
    if on_one and all(switches):
        cores, core_of = np.unique([next(iter(cores)) for cores in switches], return_inverse=True)
        yield core_of, [_core_edge(fabric, int(core)) for core in cores]


def _device_edge(fabric: Fabric, device: int) -> set[int]:
    exits = fabric.exits[device]
    first = {way.out[0] for way in exits if way.out}
    standing_on_a_core = [way.core for way in exits if not way.out]
    first |= {channel for core in standing_on_a_core for channel in _core_edge(fabric, core)}
    return first | {
        channel for other in _neighbours(fabric, device) for channel in (fabric.inside(device, other) or ())[:1]
    }


def _neighbours(fabric: Fabric, device: int) -> list[int]:
    """Return one other device of the same node, if any: the paths to all of them start with the same channel."""
    alike = np.flatnonzero(fabric.node_of == fabric.node_of[device])
    return [int(other) for other in alike if other != device][:1]


def _node_edge(fabric: Fabric, node: int) -> set[int]:
    """Return a node's NICs and those of its devices, and if it forwards its cables to others."""
    name = fabric.cluster.nodes[node].name
    own = fabric.core_names.index(name) if fabric.cluster.nodes[node].forwards else -1
    ways = [way for device in np.flatnonzero(fabric.node_of == node) for way in fabric.exits[device]]
    return {way.out[-1] for way in ways if way.core != own} | _core_edge(fabric, own)


def _core_edge(fabric: Fabric, core: int) -> set[int]:
    return {channel for channel, tail, _ in fabric.core_channels if tail == core}


def _least_latency_s(fabric: Fabric, devices: Ints) -> float:
    """Return the earliest arrival of any data: the fastest first hop and, unless nodes forward, the fastest last."""
    firsts = [fabric.latencies[list(_device_edge(fabric, int(device)))].min(initial=np.inf) for device in devices]
    hops = 1 if any(node.forwards for node in fabric.cluster.nodes) else 2
    return hops * float(min(firsts))
