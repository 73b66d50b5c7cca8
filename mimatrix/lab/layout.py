"""The parts of a lab as a value: a pure function of the cluster, so that it can be examined before it exists.

Every node and every switch is a `Space` (a network namespace); every cable is a pair of `Port`s, one in each of two
spaces, and a port sends exactly one channel of `Fabric.channels`. Each rank has a `Seat`: its space and its address.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Address
from itertools import permutations

import numpy as np

from mimatrix.cluster.fabric import Fabric, Ints
from mimatrix.cluster.model import Cluster, Node
from mimatrix.cluster.routes import NO_CHANNEL, Ecmp, Routes, find_paths
from mimatrix.core.errors import UserError

MOST_SPACES = 400
"""Nodes and switches of one lab: beyond this a single machine only measures itself."""

_FIRST_ADDRESS = IPv4Address("10.0.0.2")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")


@dataclass(frozen=True, slots=True)
class Port:
    """One end of a cable. It sends the channel of this number and receives the one that its peer sends."""

    space: str
    interface: str
    address: str
    channel: int
    rate_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Cable:
    """Two ports that are connected."""

    near: Port
    far: Port


@dataclass(frozen=True, slots=True)
class Route:
    """Packets for `target` leave by `interface` to `via`; with a `source`, only those that come from there.

    `prefer` is the address that a socket of this space takes when it has chosen none.
    """

    target: str
    interface: str
    via: str
    source: str = ""
    prefer: str = ""


@dataclass(frozen=True, slots=True)
class Space:
    """One network namespace: a switch, or a node."""

    name: str
    forwards: bool
    ports: tuple[Port, ...]
    routes: tuple[Route, ...]


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank runs. Ranks that share a NIC share its address."""

    rank: int
    node: str
    node_index: int
    local_rank: int
    local_size: int
    address: str
    interface: str


@dataclass(frozen=True, slots=True)
class ByAddress:
    """The lab's rule among equally short paths: routers see addresses, so ranks that share one share their paths.

    Give it to the simulator to predict what the lab does. `leader[device]` is the first device with its address.
    """

    leader: tuple[int, ...]
    rule: Routes

    def keys(self, sources: Ints, targets: Ints, hop: int) -> Ints:
        """Return the keys of `rule` for the leaders."""
        leaders = np.asarray(self.leader, dtype=np.int64)
        return self.rule.keys(leaders[sources], leaders[targets], hop)


@dataclass(frozen=True)
class LabLayout:
    """Everything that `up` makes."""

    fabric: Fabric
    spaces: tuple[Space, ...]
    cables: tuple[Cable, ...]
    seats: tuple[Seat, ...]
    rule: ByAddress

    @cached_property
    def ports(self) -> dict[int, Port]:
        """The port that sends each channel. Channels of a bus have none: they stay within a node."""
        return {port.channel: port for cable in self.cables for port in (cable.near, cable.far)}

    def path(self, source: int, target: int) -> tuple[str, ...]:
        """Return the names of the channels that packets between two ranks cross; none within a node."""
        if self.seats[source].node == self.seats[target].node:
            return ()
        row = find_paths(self.fabric, np.array([source]), np.array([target]), self.rule)[0]
        return tuple(self.fabric.channels[channel].name for channel in row if channel in self.ports)


def lay_out(cluster: Cluster, rule: Routes | None = None) -> LabLayout:
    """Return the layout of a cluster's lab; `rule` picks among equally short paths, by hash if it is omitted."""
    _check_names(cluster)
    fabric = Fabric(cluster)
    cables = tuple(_lay_cables(fabric))
    seats = tuple(_seats(cluster, cables, fabric))
    by_address = ByAddress(_leaders(seats), rule or Ecmp())
    routes = _routes(fabric, cables, seats, by_address)
    forwards = {switch.name: True for switch in cluster.switches} | {n.name: n.forwards for n in cluster.nodes}
    ports = _by_space([port for cable in cables for port in (cable.near, cable.far)])
    spaces = tuple(
        Space(name, forwards[name], tuple(ports.get(name, ())), tuple(routes.get(name, ()))) for name in forwards
    )
    return LabLayout(fabric, spaces, cables, seats, by_address)


def _check_names(cluster: Cluster) -> None:
    names = [node.name for node in cluster.nodes] + [switch.name for switch in cluster.switches]
    if len(names) > MOST_SPACES:
        raise UserError(
            f"{cluster.name} has {len(names)} nodes and switches, more than the {MOST_SPACES} of a lab; "
            f"use a smaller one, or `mimatrix simulate`"
        )
    for name in names:
        if not _NAME.fullmatch(name):
            raise UserError(f'"{name}" cannot name a network namespace; use letters, digits, dots and hyphens')


def _lay_cables(fabric: Fabric) -> Iterator[Cable]:
    """Yield the cables: the fabric has two channels for each, out and back, before those of the buses."""
    used: Counter[str] = Counter()
    for number in range(sum(link.parallel for link in fabric.cluster.links)):
        out = fabric.channels[2 * number]
        near, far = (end.partition("/")[0] for end in (out.tail, out.head))
        if near == far:
            raise UserError(
                f"the link {out.tail} - {out.head} stays within one node; leave it out, or describe it as the bus"
            )
        ports = []
        for side, space in enumerate((near, far)):
            address = str(_FIRST_ADDRESS + 2 * number + side)
            ports.append(Port(space, f"eth{used[space]}", address, 2 * number + side, out.rate_bytes_per_s))
            used[space] += 1
        yield Cable(*ports)


def _seats(cluster: Cluster, cables: Sequence[Cable], fabric: Fabric) -> Iterator[Seat]:
    ports: dict[str, Port] = {}
    for cable in cables:
        for port in (cable.near, cable.far):
            # By the name of the link's end, so that a device's own NIC is not taken for its node's.
            ports.setdefault(fabric.channels[port.channel].tail, port)
    rank = 0
    for index, node in enumerate(cluster.nodes):
        for local, device in enumerate(node.device_names()):
            address, interface = _address(node, device, ports)
            yield Seat(rank, node.name, index, local, len(node.devices), address, interface)
            rank += 1


def _address(node: Node, device: str, ports: Mapping[str, Port]) -> tuple[str, str]:
    port = ports.get(device) or ports.get(node.name)
    return (port.address, port.interface) if port else ("127.0.0.1", "lo")


def _leaders(seats: Sequence[Seat]) -> tuple[int, ...]:
    first: dict[tuple[str, str], int] = {}
    return tuple(first.setdefault((seat.node, seat.address), seat.rank) for seat in seats)


def _routes(fabric: Fabric, cables: Sequence[Cable], seats: Sequence[Seat], rule: ByAddress) -> dict[str, list[Route]]:
    """Return for each space the routes that carry every pair of addresses along its path in the fabric."""
    ways = _ways(fabric, cables, seats, rule)
    homes: dict[str, list[Seat]] = defaultdict(list)
    for seat in seats:
        homes[seat.node].append(seat)
    return {space: list(_compress(table, homes.get(space, []))) for space, table in ways.items()}


_Way = tuple[Port, Port]


def _ways(
    fabric: Fabric, cables: Sequence[Cable], seats: Sequence[Seat], rule: ByAddress
) -> dict[str, dict[tuple[str, str], _Way]]:
    """Return for each space and each (source, target) that passes through it the port it leaves by, and its peer."""
    sends = {way[0].channel: way for cable in cables for way in ((cable.near, cable.far), (cable.far, cable.near))}
    leaders = sorted(set(rule.leader))
    pairs = [(a, b) for a, b in permutations(leaders, 2) if seats[a].node != seats[b].node]
    ways: dict[str, dict[tuple[str, str], _Way]] = defaultdict(dict)
    if not pairs:
        return ways
    sources, targets = np.array(pairs, dtype=np.int64).T
    for (a, b), row in zip(pairs, find_paths(fabric, sources, targets, rule), strict=True):
        for channel in row[row != NO_CHANNEL]:
            if way := sends.get(int(channel)):
                ways[way[0].space][seats[a].address, seats[b].address] = way
    return ways


def _compress(table: Mapping[tuple[str, str], _Way], residents: Sequence[Seat]) -> Iterator[Route]:
    """Yield one route for each target, and another for every source that takes another path.

    In a space with ranks, the first of them that sends to the target sets the route for sockets without a source.
    """
    by_target: dict[str, dict[str, _Way]] = defaultdict(dict)
    for (source, target), way in table.items():
        by_target[target][source] = way
    for target, ways in by_target.items():
        prefer = next((seat.address for seat in residents if seat.address in ways), "")
        common = ways[prefer] if prefer else Counter(ways.values()).most_common(1)[0][0]
        yield Route(target, common[0].interface, common[1].address, prefer=prefer)
        for source, (port, peer) in ways.items():
            if (port, peer) != common:
                yield Route(target, port.interface, peer.address, source)


def _by_space(ports: Sequence[Port]) -> dict[str, list[Port]]:
    found: dict[str, list[Port]] = defaultdict(list)
    for port in ports:
        found[port.space].append(port)
    return found
