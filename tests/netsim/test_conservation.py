"""Nothing is lost and nothing appears: what channels carry over any cut is what the moves send across it."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import cache
from random import Random

import numpy as np
import pytest

from mimatrix.cluster import Bus, Cluster, Device, Ecmp, Fabric, Link, Node, Switch, topology_from_name
from mimatrix.cluster.routes import NO_CHANNEL, find_paths
from mimatrix.collectives import CATALOG, AlgorithmRequest, Collective, Schedule, Shares, build
from mimatrix.core.errors import UserError
from mimatrix.netsim import Costs, replay

MESSAGE_BYTES = 1e6
ROUTES = Ecmp()
RANDOM_CUTS = 20


def mixed() -> Cluster:
    """Nodes of every make: no bus, a bus, PCIe switches, own NICs with and without them, two NICs, parallel cables."""
    two, three = (Device(),) * 2, (Device(),) * 3
    nodes = (
        Node("plain", two),
        Node("bus", three, Bus(8e9)),
        Node("pcie", three, Bus(8e9, fanout=2)),
        Node("own", two, Bus(8e9)),
        Node("rails", three, Bus(8e9, fanout=2)),
    )
    links = [Link("a", "b", 5e9, 1e-6, parallel=2), Link("b", "c", 3e9, 1e-6), Link("a", "c", 2e9, 1e-6)]
    links += [Link("plain", "a", 1e9), Link("bus", "a", 2e9), Link("bus", "b", 2e9), Link("pcie", "c", 4e9, parallel=2)]
    links += [Link(name, "b", 1e9) for node in nodes[3:] for name in node.device_names()]
    return Cluster("mixed", nodes, tuple(map(Switch, "abc")), tuple(links))


CLUSTERS = {
    word: topology_from_name(word)
    for word in (
        "star:7",
        "star:3,devices=2",
        "star:3,devices=4,nic=own,fanout=2",
        "bigraph:2x2",
        "bigraph:2x2,devices=2,nic=own,parallel=2",
        "leaf_spine:2x4,oversubscription=2",
        "fat_tree:4",
        "torus:3x3",
        "torus:2x3,devices=2",
    )
} | {"mixed": mixed()}


def test_every_algorithm_is_held_to_account_on_every_cluster() -> None:
    for cluster in CLUSTERS:
        reduced = {name for where, name, what in QUESTIONS if (where, what) == (cluster, Collective.ALL_REDUCE)}
        assert reduced == set(CATALOG)


def schedule_for(cluster: str, algorithm: str, collective: Collective) -> Schedule:
    """With uneven shares, the last of them zero, where the algorithm takes shares."""
    ranks = len(CLUSTERS[cluster].device_names)
    shares = Shares.of([1 + rank % 3 for rank in range(ranks - 1)] + [0])
    takes_shares = "shares" in CATALOG[algorithm].options
    return build(algorithm, AlgorithmRequest(collective, ranks, shares=shares if takes_shares else None))


def buildable() -> list[tuple[str, str, Collective]]:
    """Every cluster with every algorithm and collective that can be built for all of its devices."""
    found = []
    for cluster in CLUSTERS:
        for entry in CATALOG.values():
            for collective in entry.collectives:
                try:
                    schedule_for(cluster, entry.name, collective)
                except UserError:
                    continue
                found.append((cluster, entry.name, collective))
    return found


def device_vertices(cluster: Cluster) -> list[str]:
    """Where each device sits: at itself, or, with neither bus nor NIC of its own, at its node."""
    nics = {end for link in cluster.links for end in (link.a, link.b)}
    return [name if node.bus or name in nics else node.name for node in cluster.nodes for name in node.device_names()]


def lone_devices(cluster: Cluster) -> set[str]:
    """Return the vertices where one device sits and nothing passes through: each direction must be exact there."""
    seats = Counter(device_vertices(cluster))
    return {vertex for vertex, devices in seats.items() if devices == 1} - {n.name for n in cluster.nodes if n.forwards}


def transits(cluster: Cluster) -> set[str]:
    """Return the vertices where no device sits: switches, PCIe switches, hosts with a bus."""
    ends = channel_ends(Fabric(cluster))
    return {vertex for pair in ends for vertex in pair} - set(device_vertices(cluster))


def channel_ends(fabric: Fabric) -> tuple[tuple[str, str], ...]:
    """Tail and head of each channel, a device's own NIC moved to the PCIe switch that it sits on."""
    fanouts = {node.name: node.bus.fanout for node in fabric.cluster.nodes if node.bus and node.bus.fanout}
    switches = {switch.name for switch in fabric.cluster.switches}

    def seat(end: str, other: str) -> str:
        node, _, local = end.partition("/")
        on_switch = other in switches and local and node in fanouts
        return f"{node}/pcie{int(local) // fanouts[node]}" if on_switch else end

    return tuple((seat(c.tail, c.head), seat(c.head, c.tail)) for c in fabric.channels)


QUESTIONS = buildable()
NAMES = ("cluster", "algorithm", "collective")
every_question = pytest.mark.parametrize(NAMES, QUESTIONS)


@dataclass(frozen=True)
class Flows:
    """What a replay says of each channel, with its ends; and what the moves send between vertices, by (from, to)."""

    ends: tuple[tuple[str, str], ...]
    carried: tuple[float, ...]
    sent: dict[tuple[str, str], float]

    @property
    def vertices(self) -> list[str]:
        return sorted({vertex for pair in self.ends for vertex in pair})

    def over(self, inner: Set[str]) -> tuple[float, float]:
        """Bytes that channels carry out of the set of vertices and into it."""
        return _across(inner, zip(self.ends, self.carried, strict=True))

    def asked(self, inner: Set[str]) -> tuple[float, float]:
        """Bytes that moves send out of the set of vertices and into it."""
        return _across(inner, self.sent.items())


def _across(inner: Set[str], amounts: Iterable[tuple[tuple[str, str], float]]) -> tuple[float, float]:
    """Return the sums of what steps out of the set and of what steps into it."""
    leaving, entering = [], []
    for (tail, head), amount in amounts:
        if tail in inner and head not in inner:
            leaving.append(amount)
        if head in inner and tail not in inner:
            entering.append(amount)
    return math.fsum(leaving), math.fsum(entering)


@cache
def flows_of(cluster: str, algorithm: str, collective: Collective) -> Flows:
    schedule = schedule_for(cluster, algorithm, collective)
    costs = Costs(sync_s=1e-6, add_bytes_per_s=5e9, in_flight=2)
    timeline = replay(schedule, CLUSTERS[cluster], None, MESSAGE_BYTES, costs=costs, routes=ROUTES)
    fabric = Fabric(CLUSTERS[cluster])
    places = device_vertices(CLUSTERS[cluster])
    sent: dict[tuple[str, str], float] = defaultdict(float)
    for (source, target), amount in bytes_between(schedule).items():
        sent[places[source], places[target]] += amount
    return Flows(channel_ends(fabric), tuple(timeline.channel_bytes.tolist()), sent)


def bytes_between(schedule: Schedule) -> dict[tuple[int, int], float]:
    """Bytes that moves send from rank to rank, all rounds together."""
    sent: dict[tuple[int, int], float] = defaultdict(float)
    for moves in schedule.rounds:
        for move in moves:
            part = math.fsum(schedule.shares.fractions[block] for block in move.blocks)
            sent[move.src, move.dst] += part * MESSAGE_BYTES
    return sent


def close(amounts: tuple[float, float]) -> object:
    return pytest.approx(amounts, rel=1e-9, abs=1e-9 * MESSAGE_BYTES)


@pytest.mark.parametrize(NAMES, [question for question in QUESTIONS if lone_devices(CLUSTERS[question[0]])])
def test_a_device_sends_and_receives_what_its_moves_say(cluster: str, algorithm: str, collective: Collective) -> None:
    flows = flows_of(cluster, algorithm, collective)
    for device in lone_devices(CLUSTERS[cluster]):
        assert flows.over({device}) == close(flows.asked({device})), device


@every_question
def test_a_node_sends_and_receives_what_its_moves_say(cluster: str, algorithm: str, collective: Collective) -> None:
    flows = flows_of(cluster, algorithm, collective)
    for node in CLUSTERS[cluster].nodes:
        inner = {vertex for vertex in flows.vertices if vertex.partition("/")[0] == node.name}
        (out, back), (asked_out, asked_back) = flows.over(inner), flows.asked(inner)
        # What devices without a bus send one another goes out and back; what passes a forwarding node, in and out.
        detour = flows.sent.get((node.name, node.name), 0.0)
        if not node.forwards:
            assert (out, back) == close((asked_out + detour, asked_back + detour)), node.name
        assert out - back == pytest.approx(asked_out - asked_back, abs=1e-9 * MESSAGE_BYTES), node.name


@pytest.mark.parametrize(NAMES, [question for question in QUESTIONS if transits(CLUSTERS[question[0]])])
def test_a_switch_gives_out_what_it_takes_in(cluster: str, algorithm: str, collective: Collective) -> None:
    flows = flows_of(cluster, algorithm, collective)
    for vertex in transits(CLUSTERS[cluster]):
        out, back = flows.over({vertex})
        assert out == pytest.approx(back, rel=1e-9), vertex


@every_question
def test_random_cuts_carry_what_the_moves_send_across(cluster: str, algorithm: str, collective: Collective) -> None:
    flows = flows_of(cluster, algorithm, collective)
    rng = Random(f"{cluster} {algorithm} {collective}")
    for _ in range(RANDOM_CUTS):
        inner = set(rng.sample(flows.vertices, rng.randrange(1, len(flows.vertices))))
        (out, back), (asked_out, asked_back) = flows.over(inner), flows.asked(inner)
        # A path may leave the set and come back, once more in each direction: the difference cannot.
        assert out - back == pytest.approx(asked_out - asked_back, abs=1e-9 * MESSAGE_BYTES)
        assert out >= asked_out - 1e-9 * MESSAGE_BYTES
        assert back >= asked_back - 1e-9 * MESSAGE_BYTES


@every_question
def test_random_cuts_carry_each_direction_exactly(cluster: str, algorithm: str, collective: Collective) -> None:
    flows = flows_of(cluster, algorithm, collective)
    walks = walked(cluster, algorithm, collective)
    rng = Random(f"{cluster} {algorithm} {collective}")
    for _ in range(RANDOM_CUTS):
        inner = set(rng.sample(flows.vertices, rng.randrange(1, len(flows.vertices))))
        assert flows.over(inner) == close(_across(inner, walks))


def walked(cluster: str, algorithm: str, collective: Collective) -> list[tuple[tuple[str, str], float]]:
    """Every step of every pair of ranks along their path, with the bytes that take it. The path must hang together."""
    fabric, places = Fabric(CLUSTERS[cluster]), device_vertices(CLUSTERS[cluster])
    ends, steps = channel_ends(fabric), []
    pairs = bytes_between(schedule_for(cluster, algorithm, collective))
    sources, targets = np.array(list(pairs), dtype=np.int64).T
    for (source, target), row in zip(pairs, find_paths(fabric, sources, targets, ROUTES).tolist(), strict=True):
        here = places[source]
        for channel in (each for each in row if each != NO_CHANNEL):
            assert ends[channel][0] == here
            here = ends[channel][1]
            steps.append((ends[channel], pairs[source, target]))
        assert here == places[target]
    return steps
