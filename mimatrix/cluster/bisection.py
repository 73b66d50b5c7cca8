"""The bisection bandwidth of a cluster: several splits of its devices into halves, and the narrowest of them.

Finding the true bisection is hard; trying splits and taking the narrowest gives an upper bound. The bandwidth of a
split is a maximum flow over the channels, which assumes ideal routing: real traffic gets less, never more.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array, diags_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow
from scipy.sparse.linalg import eigsh

from mimatrix.cluster.fabric import Exit, Fabric, Floats, Ints

Mask = NDArray[np.bool_]
FlowVertex = tuple[str, str | int]

_SOURCE: FlowVertex = ("source", "")
_SINK: FlowVertex = ("sink", "")
_CROSSBAR: FlowVertex = ("crossbar", "")
_MAX_DENSE_CORES = 400
_MAX_CAPACITY = 2**30
_MAX_EXHAUSTIVE = 8


@dataclass(frozen=True, slots=True)
class Bisection:
    """A split of the devices, its bandwidth, and the bandwidth it would have if only NICs and buses set limits."""

    split: str
    bytes_per_s: float
    full_bytes_per_s: float


def narrowest_bisection(fabric: Fabric) -> Bisection:
    """Return the split with the least bandwidth of those tried; the true bisection bandwidth is at most that."""
    network = _Network(fabric)
    flows = [(network.flow(half), split, half) for split, half in _splits(fabric) if half.any()]
    if not flows:
        return Bisection("one device", 0.0, 0.0)
    narrowest, split, half = min(flows, key=lambda flow: flow[0])
    return Bisection(split, narrowest, _Network(fabric, ideal=True).flow(half))


class _Network:
    """The channels as a graph for maximum flows.

    Machines pass on traffic only if they forward, so the paths up (out of devices) and down (into them) are separate
    within a node; they meet only where the bus of the node turns. `ideal` puts one crossbar in place of all switches
    and of all cables between nodes, so that NICs and buses alone set limits.
    """

    def __init__(self, fabric: Fabric, ideal: bool = False) -> None:
        self._fabric = fabric
        self._ideal = ideal
        self._numbers: dict[FlowVertex, int] = {}
        self._edges: dict[tuple[FlowVertex, FlowVertex, int], float] = {}
        self._joints: dict[tuple[FlowVertex, FlowVertex], None] = {}
        for channel, tail, head in fabric.core_channels:
            self._add_between_cores(channel, tail, head)
        for device, exits in enumerate(fabric.exits):
            for way in exits:
                self._add_exit(device, way)
        for first in np.flatnonzero(fabric.node_of[1:] == fabric.node_of[:-1]).tolist():
            self._add_inside(first, first + 1)
            self._add_inside(first + 1, first)

    def flow(self, half: Mask) -> float:
        """Return the bytes per second that the devices in `half` can send to all other devices together."""
        ends = [(_SOURCE, ("up", d)) if chosen else (("down", d), _SINK) for d, chosen in enumerate(half.tolist())]
        joints = [*self._joints, *ends]
        pairs = [(tail, head) for tail, head, _ in self._edges] + joints
        tails, heads = np.array([(self._number(tail), self._number(head)) for tail, head in pairs]).T
        rates = np.array([*self._edges.values(), *[math.inf] * len(joints)])
        graph = coo_array((_whole(rates), (tails, heads)), shape=(len(self._numbers),) * 2).tocsr()
        side = _source_side(graph, self._number(_SOURCE), self._number(_SINK))
        return float(rates[side[tails] & ~side[heads]].sum())

    def _number(self, vertex: FlowVertex) -> int:
        return self._numbers.setdefault(vertex, len(self._numbers))

    def _core(self, core: int) -> FlowVertex:
        return _CROSSBAR if self._ideal and core < len(self._fabric.cluster.switches) else ("core", core)

    def _add_between_cores(self, channel: int, tail: int, head: int) -> None:
        ends = [self._core(tail), self._core(head)]
        if self._ideal:
            ends.insert(1, _CROSSBAR)
        for near, far in pairwise(ends):
            if near != far:
                self._carry([near, far], [channel])

    def _add_exit(self, device: int, way: Exit) -> None:
        channels, core = self._fabric.channels, self._core(way.core)
        if not way.out:
            self._joints |= {(("up", device), core): None, (core, ("down", device)): None}
            return
        rising: list[FlowVertex] = [("up", channels[channel].head) for channel in way.out[:-1]]
        # A NIC's channel is named after its device even where it sits on the PCIe switch: ask the next one.
        falling: list[FlowVertex] = [("down", channels[channel].tail) for channel in way.back[1:]]
        self._carry([("up", device), *rising, core], way.out)
        self._carry([core, *falling, ("down", device)], way.back)

    def _add_inside(self, source: int, target: int) -> None:
        channels, path = self._fabric.channels, self._fabric.inside(source, target)
        if path is None:
            return
        rising, falling = path[: len(path) // 2], path[len(path) // 2 :]
        up: list[FlowVertex] = [("up", source), *(("up", channels[channel].head) for channel in rising)]
        down: list[FlowVertex] = [*(("down", channels[channel].tail) for channel in falling), ("down", target)]
        self._carry(up, rising)
        self._carry(down, falling)
        self._joints[up[-1], down[0]] = None

    def _carry(self, vertices: list[FlowVertex], channels: Iterable[int]) -> None:
        for tail, head, channel in zip(vertices, vertices[1:], channels, strict=False):
            self._edges[tail, head, channel] = float(self._fabric.rates[channel])


def _whole(rates: Floats) -> Ints:
    """Return the rates in proportion as integers: exact for round rates, small enough that no sum leaves 32 bits."""
    finite = rates[np.isfinite(rates)]
    common = float(np.gcd.reduce(np.rint(finite).astype(np.int64))) if finite.max(initial=0.0) < 2**53 else 0.0
    unit = max(common, float(finite.sum()) / (_MAX_CAPACITY / 2), math.ulp(0.0))
    capacities = np.full(len(rates), _MAX_CAPACITY)
    # Upwards, so that no channel vanishes next to much faster ones; what is whole must stay whole.
    capacities[np.isfinite(rates)] = np.ceil(finite / unit - 1e-6)
    return capacities


def _source_side(graph: csr_array, source: int, sink: int) -> Mask:
    """Return the vertices on the source's side of a minimum cut: those it still reaches in the residual graph.

    The cut is worth more than the value of the flow: its real rates have none of the rounding of the capacities.
    """
    residual = csr_array(graph.astype(np.int32) - maximum_flow(graph.astype(np.int32), source, sink).flow)
    residual.eliminate_zeros()
    side = np.zeros(residual.shape[0], dtype=bool)
    side[breadth_first_order(residual, source, return_predecessors=False)] = True
    return side


def _splits(fabric: Fabric) -> Iterator[tuple[str, Mask]]:
    """Yield halves worth trying: all of them for few devices.

    For many devices, one half for each score of the devices: the lower half against the rest, ties in device order.
    """
    if len(fabric.exits) <= _MAX_EXHAUSTIVE:
        yield from _all_halves(len(fabric.exits))
        return
    home = np.array([exits[0].core if exits else -1 for exits in fabric.exits])
    groups, group_of, place = _group_cores(fabric)
    scores = {"in device order": np.zeros(len(home))}
    scores["switches in turn"] = np.where(home < 0, 0, place[home] % 2)
    scores["by group of switches"] = np.where(home < 0, groups, group_of[home])
    if len(fabric.core_names) > 1:
        scores["spectral"] = np.where(home < 0, 0, _fiedler_rank(fabric)[home])
    seen: set[bytes] = set()
    for split, score in scores.items():
        half = np.zeros(len(home), dtype=bool)
        half[np.argsort(score, kind="stable")[: len(home) // 2]] = True
        if half.tobytes() not in seen:
            seen.add(half.tobytes())
            yield split, half


def _all_halves(devices: int) -> Iterator[tuple[str, Mask]]:
    for chosen in combinations(range(devices), devices // 2):
        half = np.zeros(devices, dtype=bool)
        half[list(chosen)] = True
        yield "of all halves", half


def _group_cores(fabric: Fabric) -> tuple[int, Ints, Ints]:
    """Return the number of groups of cores, the group of each core, and its place within the group."""
    switches = fabric.cluster.switches
    names = [switch.group for switch in switches] + ["node"] * (len(fabric.core_names) - len(switches))
    numbers = {name: index for index, name in enumerate(dict.fromkeys(names))}
    counts = [0] * len(numbers)
    places = []
    for name in names:
        places.append(counts[numbers[name]])
        counts[numbers[name]] += 1
    return len(numbers), np.array([numbers[name] for name in names] or [0]), np.array(places or [0])


def _fiedler_rank(fabric: Fabric) -> Ints:
    """Return the cores in order of the Fiedler vector of their network, which puts well connected ones close together.

    On symmetric networks it has ties, of which the next eigenvector takes one side: halves of a torus stay connected.
    """
    vectors = np.round(_smooth_vectors(fabric), 6)
    rank = np.empty(len(vectors), dtype=np.int64)
    rank[np.lexsort(vectors.T[:0:-1])] = np.arange(len(vectors))
    return rank


def _smooth_vectors(fabric: Fabric) -> Floats:
    """Return the eigenvectors of the three smallest eigenvalues of the cores' Laplacian, scaled to their length."""
    count = len(fabric.core_names)
    joined = np.array(fabric.core_channels, dtype=np.int64).reshape(-1, 3)
    weights = fabric.rates[joined[:, 0]] / fabric.rates.max(initial=1.0)
    adjacency = csr_array(coo_array((weights, (joined[:, 1], joined[:, 2])), shape=(count, count)))
    laplacian = csr_array(diags_array(adjacency.sum(axis=1)) - adjacency)
    if count <= _MAX_DENSE_CORES:
        vectors: Floats = np.linalg.eigh(laplacian.toarray())[1][:, :3]
    else:
        # A Laplacian is singular, so the target is just below zero. The start is fixed: equal clusters, equal figures.
        start = np.random.default_rng(0).standard_normal(count)
        vectors = eigsh(laplacian, k=3, sigma=-1e-3, v0=start)[1]
    return vectors * math.sqrt(count)
