"""Families of topologies with parameters, named in one word: `star:8`, `bigraph:4x4,parallel=2`, `leaf_spine:4x8`.

A `Server` is attached to each port of the network: one device by default, or several behind a shared NIC or with one
NIC each. Rates may be uneven: `star:4,rate=2*40Gbit+2*10Gbit` gives the servers their NICs in that order.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import Literal

from mimatrix.cluster.model import MOST_PARTS, Bus, Cluster, Device, Link, Node, Switch
from mimatrix.core.errors import UserError, nearest
from mimatrix.core.units import parse_rate, parse_seconds

GBIT = 1e9 / 8
DEFAULT_RATE = 100 * GBIT
DEFAULT_LATENCY_S = 1e-6
PCIE_BYTES_PER_S = 16e9


@dataclass(frozen=True, slots=True)
class Server:
    """A server on a port: devices, a bus between them, `shared` or `own` NICs; servers take the rates in turn."""

    devices: int = 1
    nic: Literal["shared", "own"] = "shared"
    rates_bytes_per_s: tuple[float, ...] = (DEFAULT_RATE,)
    latency_s: float = DEFAULT_LATENCY_S
    bus: Bus | None = None

    @property
    def ports(self) -> int:
        """Number of switch ports that one server takes."""
        return self.devices if self.nic == "own" else 1

    @property
    def rate_bytes_per_s(self) -> float:
        """Rate of the fastest NIC, which links between switches are given."""
        return max(self.rates_bytes_per_s)


class _Builder:
    """Collects nodes, switches and links; numbers the servers in the order in which they are added."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.nodes: list[Node] = []
        self.switches: list[Switch] = []
        self.links: list[Link] = []
        self._rates = cycle(server.rates_bytes_per_s)
        self._parts = 0

    def switch(self, name: str, group: str) -> str:
        self._grow(1)
        self.switches.append(Switch(name, group))
        return name

    def node(self, forwards: bool = False) -> Node:
        self._grow(self.server.devices)
        devices = (Device(),) * self.server.devices
        bus = self.server.bus or (Bus(PCIE_BYTES_PER_S) if self.server.devices > 1 else None)
        self.nodes.append(Node(f"n{len(self.nodes)}", devices, bus, forwards))
        return self.nodes[-1]

    def plug(self, switches: Sequence[str]) -> None:
        """Add a server and plug its NICs into `switches` in turn."""
        self._grow(self.server.ports)
        node = self.node()
        ends = list(node.device_names()) if self.server.nic == "own" else [node.name]
        rate = next(self._rates)
        self.links += [
            Link(end, switch, rate, self.server.latency_s) for end, switch in zip(ends, cycle(switches), strict=False)
        ]

    def cable(self, a: str, b: str, rate_bytes_per_s: float | None = None, parallel: int = 1) -> None:
        self._grow(parallel)
        rate = rate_bytes_per_s or self.server.rate_bytes_per_s
        self.links.append(Link(a, b, rate, self.server.latency_s, parallel))

    def cluster(self, name: str) -> Cluster:
        return Cluster(name, tuple(self.nodes), tuple(self.switches), tuple(self.links))

    def _grow(self, parts: int) -> None:
        self._parts += parts
        if self._parts > MOST_PARTS:
            raise UserError(
                f"this cluster has more than {MOST_PARTS} devices, switches and cables in all; use smaller numbers"
            )


def star(nodes: int, server: Server = Server()) -> Cluster:
    """Build one switch with `nodes` servers on it."""
    build = _Builder(server)
    hub = build.switch("hub", "leaf")
    for _ in range(nodes):
        build.plug([hub])
    return build.cluster(f"star:{nodes}")


def leaf_spine(
    leaves: int, nodes_per_leaf: int, server: Server = Server(), *, oversubscription: float = 1.0, spines: int = 0
) -> Cluster:
    """Build leaves that are each joined to every spine: as many spines as a leaf has NICs, over `oversubscription`."""
    ports = nodes_per_leaf * server.ports
    count = spines or max(1, round(ports / oversubscription))
    uplink = ports * server.rate_bytes_per_s / oversubscription / count
    build = _Builder(server)
    tops = [f"spine{index}" for index in range(count)]
    for leaf in [build.switch(f"leaf{index}", "leaf") for index in range(leaves)]:
        for _ in range(nodes_per_leaf):
            build.plug([leaf])
        for top in tops:
            build.cable(leaf, top, uplink)
    for top in tops:
        build.switch(top, "spine")
    return build.cluster(f"leaf_spine:{leaves}x{nodes_per_leaf}")


def fat_tree(k: int, server: Server = Server()) -> Cluster:
    """Build the k-ary fat tree: k pods of k/2 edge and k/2 aggregation switches, k*k/4 cores, k/2 ports per edge."""
    if k % 2:
        raise UserError(f"fat_tree needs an even number of ports per switch, got {k}; use fat_tree:{k + 1}")
    half = k // 2
    if half % server.ports:
        raise UserError(
            f"fat_tree:{k} has {half} ports per edge switch, which {server.ports} NICs per server do not divide; "
            f"use fat_tree:{2 * server.ports}, or nic=shared"
        )
    build = _Builder(server)
    cores = [[build.switch(f"core{row}-{column}", "core") for column in range(half)] for row in range(half)]
    for pod in range(k):
        tops = [build.switch(f"agg{pod}-{row}", "aggregation") for row in range(half)]
        for row, column in product(range(half), repeat=2):
            build.cable(tops[row], cores[row][column])
        for edge in [build.switch(f"edge{pod}-{index}", "edge") for index in range(half)]:
            for top in tops:
                build.cable(edge, top)
            for _ in range(half // server.ports):
                build.plug([edge])
    return build.cluster(f"fat_tree:{k}")


def bigraph(switches: int, endpoints: int, server: Server = Server(), *, parallel: int = 1) -> Cluster:
    """Build two groups of `switches`, each switch joined to every one of the other group, with `endpoints` ports each.

    A server with one NIC per device has them on successive switches of both groups in turn, as EFLOPS has.
    """
    build = _Builder(server)
    upper = [build.switch(f"upper{index}", "upper") for index in range(switches)]
    lower = [build.switch(f"lower{index}", "lower") for index in range(switches)]
    for top, bottom in product(upper, lower):
        build.cable(top, bottom, parallel=parallel)
    turns = [switch for pair in zip(upper, lower, strict=True) for switch in pair]
    ports = turns * endpoints if server.ports > 1 else [switch for switch in upper + lower for _ in range(endpoints)]
    if len(ports) % server.ports:
        raise UserError(
            f"bigraph:{switches}x{endpoints} has {len(ports)} ports, which {server.ports} NICs per server do not "
            f"divide; use bigraph:{server.ports}x{endpoints}, or nic=shared"
        )
    for first in range(0, len(ports), server.ports):
        build.plug(ports[first : first + server.ports])
    return build.cluster(f"bigraph:{switches}x{endpoints}")


def ring(nodes: int, server: Server = Server()) -> Cluster:
    """Build nodes cabled in a circle, each forwarding for the others."""
    return torus((nodes,), server, name=f"ring:{nodes}")


def torus(sides: Sequence[int], server: Server = Server(), name: str = "") -> Cluster:
    """Build nodes on a grid of any dimension, each cabled to its neighbours, the ends joined."""
    if server.nic == "own":
        raise UserError("nodes of a ring or torus are cabled to one another as wholes; leave nic=own out")
    if len(set(server.rates_bytes_per_s)) > 1:
        raise UserError("the cables of a ring or torus are all alike; write one rate, as in rate=40Gbit")
    build = _Builder(server)
    places = list(product(*(range(side) for side in sides)))
    names = {place: build.node(forwards=True).name for place in places}
    for place, axis in product(places, range(len(sides))):
        following = (*place[:axis], (place[axis] + 1) % sides[axis], *place[axis + 1 :])
        # A side of two has one cable between its ends, not one for each way round.
        if following != place and not (sides[axis] == 2 and place[axis] == 1):
            build.cable(names[place], names[following])
    return build.cluster(name or f"torus:{'x'.join(map(str, sides))}")


@dataclass(frozen=True, slots=True)
class Family:
    """A family as the command line knows it: how its dimensions read, which settings are its own, how it is built."""

    dimensions: str
    build: Callable[[Sequence[int], Server, dict[str, float]], Cluster]
    settings: tuple[str, ...] = ()


FAMILIES: dict[str, Family] = {
    "star": Family("NODES", lambda d, server, _: star(d[0], server)),
    "leaf_spine": Family(
        "LEAVESxNODES_PER_LEAF",
        lambda d, server, s: leaf_spine(
            d[0], d[1], server, oversubscription=s.get("oversubscription", 1.0), spines=int(s.get("spines", 0))
        ),
        ("oversubscription", "spines"),
    ),
    "fat_tree": Family("PORTS_PER_SWITCH", lambda d, server, _: fat_tree(d[0], server)),
    "bigraph": Family(
        "SWITCHES_PER_SIDExENDPOINTS_PER_SWITCH",
        lambda d, server, s: bigraph(d[0], d[1], server, parallel=int(s.get("parallel", 1))),
        ("parallel",),
    ),
    "ring": Family("NODES", lambda d, server, _: ring(d[0], server)),
    "torus": Family("SIDExSIDE...", lambda d, server, _: torus(d, server)),
}

_SERVER_SETTINGS = ("rate", "latency", "devices", "nic", "bus", "fanout")


def topology_from_name(text: str) -> Cluster:
    """Build the cluster of a name such as `star:8` or `leaf_spine:4x8,oversubscription=2,rate=25Gbit`."""
    head, *rest = text.split(",")
    word, _, sizes = head.partition(":")
    family = FAMILIES.get(word)
    if family is None:
        raise UserError(
            f'"{text}" is neither a file nor a family of clusters{nearest(word, FAMILIES)} '
            f"(write for example star:8, or the path of a TOML file)"
        )
    settings = _settings(rest, (*_SERVER_SETTINGS, *family.settings))
    cluster = family.build(_dimensions(word, family, sizes), _server(settings), _numbers(settings, family.settings))
    return replace(cluster, name=text)


def _dimensions(word: str, family: Family, sizes: str) -> list[int]:
    parts = sizes.split("x")
    fits = word == "torus" or len(parts) == family.dimensions.count("x") + 1
    if not fits or not all(part.isdecimal() and float(part) > 0 for part in parts):
        raise UserError(
            f'"{word}:{sizes}" is not a size; write {word}:{family.dimensions} with whole numbers, '
            f"for example {_EXAMPLES[word]}"
        )
    # In floats, which take any number of digits.
    if math.prod(map(float, parts)) > MOST_PARTS:
        raise UserError(f"{word}:{sizes} is too large; use smaller numbers, for example {_EXAMPLES[word]}")
    return [int(float(part)) for part in parts]


_EXAMPLES = {
    "star": "star:8",
    "leaf_spine": "leaf_spine:4x8",
    "fat_tree": "fat_tree:4",
    "bigraph": "bigraph:4x4",
    "ring": "ring:8",
    "torus": "torus:4x4",
}


def _settings(parts: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for part in parts:
        key, _, value = part.partition("=")
        if key not in known:
            raise UserError(f'unknown setting "{key}" of a family{nearest(key, known)}')
        if not value:
            raise UserError(f'the setting "{key}" has no value; write {key}=...')
        if key in settings:
            raise UserError(f'the setting "{key}" is there twice; leave one out')
        settings[key] = value
    return settings


def _server(settings: dict[str, str]) -> Server:
    devices = int(_number("devices", settings.get("devices", "1")))
    nic = settings.get("nic", "shared")
    if nic not in ("shared", "own"):
        raise UserError(f"nic={nic} is not known{nearest(nic, ('shared', 'own'))}")
    bus = None
    if "bus" in settings or "fanout" in settings:
        rate = parse_rate(settings["bus"]) if "bus" in settings else PCIE_BYTES_PER_S
        bus = Bus(rate, fanout=int(_number("fanout", settings.get("fanout", "0"), least=0)))
    rates = _rates(settings["rate"]) if "rate" in settings else (DEFAULT_RATE,)
    latency = parse_seconds(settings["latency"]) if "latency" in settings else DEFAULT_LATENCY_S
    return Server(devices, "own" if nic == "own" else "shared", rates, latency, bus)


def _rates(text: str) -> tuple[float, ...]:
    """Read NIC rates such as `2*40Gbit+2*10Gbit`: one per server, in order, repeated if there are more servers."""
    rates: list[float] = []
    for part in text.split("+"):
        times, star_, rate = part.rpartition("*")
        count = int(_number("rate", times, example="2*40Gbit")) if star_ else 1
        rates += [parse_rate(rate)] * count
    return tuple(rates)


def _numbers(settings: dict[str, str], keys: Sequence[str]) -> dict[str, float]:
    return {key: _number(key, settings[key]) for key in keys if key in settings}


def _number(key: str, text: str, least: float = 1, example: str = "2") -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    whole = key != "oversubscription"
    if not least <= value <= MOST_PARTS or (whole and value != int(value)):
        kind = "whole number" if whole else "number"
        raise UserError(
            f"{key}={text} is not a {kind} from {least:g} to {MOST_PARTS}; write for example {key}={example}"
        )
    return value
