"""The graph that the picture of a cluster shows: vertices (switches, nodes, bundles of nodes) and edges.

Many nodes become bundles, one for each set of switches that they are attached to, so that a picture stays readable.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from mimatrix.cluster.model import Cluster, Node

Kind = Literal["switch", "node", "bundle"]

SQUARE = 0.17
GAP = 0.045
PADDING = 0.07
NAME_HEIGHT = 0.16
_LONGEST_NAME = 16
_CROWDED_ROW = 32.0
_SQUARES_PER_ROW = 4


@dataclass(frozen=True, slots=True)
class Vertex:
    """A node of the graph, drawn as one box.

    Devices stand in rows of `columns`; those in `below` have their network below them.
    """

    name: str
    kind: Kind
    group: str = ""
    nodes: tuple[Node, ...] = ()
    columns: int = 1
    below: frozenset[int] = frozenset()

    @property
    def text(self) -> str:
        """The label of the box, shortened if a name is long."""
        if self.kind == "bundle":
            nodes, devices = count_text(len(self.nodes), "node"), count_text(self.devices, "device")
            return nodes if self.devices == len(self.nodes) else f"{nodes}\n{devices}"
        return self.name if len(self.name) <= _LONGEST_NAME else self.name[: _LONGEST_NAME - 1] + "…"

    @property
    def devices(self) -> int:
        """Number of devices in the box."""
        return sum(len(node.devices) for node in self.nodes)

    def size(self, named: bool) -> tuple[float, float]:
        """Return width and height in inches, with room for the text if it is `named`."""
        if self.kind == "node":
            rows = 2 if self.below else -(-self.devices // self.columns)
            width, height = (count * (SQUARE + GAP) - GAP + 2 * PADDING for count in (self.columns, rows))
            return (max(width, text_width(self.text, 7) + PADDING), height + NAME_HEIGHT) if named else (width, height)
        if self.kind == "bundle":
            return (max(0.62, text_width(self.text, 7) + 0.14), 0.62) if named else (0.34, 0.34)
        return (max(0.6, text_width(self.text, 8) + 0.16), 0.32) if named else (0.26, 0.26)


@dataclass(frozen=True, slots=True)
class Edge:
    """Equal cables between two vertices. A device's own NIC ends at square number `square` of `a`."""

    a: str
    b: str
    rate_bytes_per_s: float
    square: int | None
    cables: int


@dataclass(frozen=True)
class Scene:
    """The vertices by name, in the order of the cluster, and the edges between them."""

    vertices: dict[str, Vertex]
    edges: tuple[Edge, ...]

    @cached_property
    def neighbours(self) -> dict[str, list[str]]:
        """The vertices that each vertex has edges to, each once."""
        adjacent: dict[str, dict[str, None]] = {name: {} for name in self.vertices}
        for edge in self.edges:
            adjacent[edge.a][edge.b] = adjacent[edge.b][edge.a] = None
        return {name: list(others) for name, others in adjacent.items()}

    def of_kind(self, *kinds: Kind) -> list[str]:
        """Return the names of all vertices of these kinds."""
        return [vertex.name for vertex in self.vertices.values() if vertex.kind in kinds]


def compose(cluster: Cluster) -> Scene:
    """Return the scene of a cluster; nodes become bundles if a row of them would be too long."""
    switches = [Vertex(switch.name, "switch", switch.group) for switch in cluster.switches]
    nics = _own_nics(cluster)
    nodes = [_node(node, nics.get(node.name, {})) for node in cluster.nodes]
    sides = len({switch.group for switch in cluster.switches} & {"upper", "lower"}) or 1
    if switches and sum(vertex.size(named=False)[0] + GAP for vertex in nodes) > sides * _CROWDED_ROW:
        nodes = _bundles(cluster)
    vertices = {vertex.name: vertex for vertex in switches + nodes}
    return Scene(vertices, tuple(_edges(cluster, vertices)))


def count_text(count: int, noun: str) -> str:
    """Return a count with its noun: `1 node`, `2 nodes`, `2 switches`."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{count:,} {noun if count == 1 else plural}"


def text_width(text: str, points: float) -> float:
    """Estimate how many inches a text takes, rather too many."""
    return max(map(len, text.split("\n"))) * points * 0.62 / 72


def _own_nics(cluster: Cluster) -> dict[str, dict[int, str]]:
    """Return the groups of the switches that devices' own NICs lead to, by node and number of the device."""
    group_of = {switch.name: switch.group for switch in cluster.switches}
    nics: dict[str, dict[int, str]] = defaultdict(dict)
    for link in cluster.links:
        for near, far in ((link.a, link.b), (link.b, link.a)):
            node, _, local = near.partition("/")
            if local:
                nics[node][int(local)] = group_of.get(far, "")
    return nics


def _node(node: Node, own: dict[int, str]) -> Vertex:
    """Return a node as a vertex whose devices can be reached: with own NICs in one row, in a BiGraph in two."""
    count = len(node.devices)
    if set(own.values()) == {"upper", "lower"}:
        below = frozenset(number for number, group in own.items() if group == "lower")
        return Vertex(node.name, "node", "", (node,), max(len(below), count - len(below)), below)
    return Vertex(node.name, "node", "", (node,), count if own else min(count, _SQUARES_PER_ROW))


def _bundles(cluster: Cluster) -> list[Vertex]:
    switches_of: dict[str, set[str]] = defaultdict(set)
    for link in cluster.links:
        switches_of[link.a.partition("/")[0]].add(link.b)
        switches_of[link.b.partition("/")[0]].add(link.a)
    alike: dict[tuple[str, ...], list[Node]] = defaultdict(list)
    for node in cluster.nodes:
        alike[tuple(sorted(switches_of[node.name]))].append(node)
    return [Vertex(f"{nodes[0].name}...", "bundle", "", tuple(nodes)) for nodes in alike.values()]


def _edges(cluster: Cluster, vertices: dict[str, Vertex]) -> list[Edge]:
    vertex_of = {node.name: vertex.name for vertex in vertices.values() for node in vertex.nodes}
    counts: Counter[tuple[str, str, float, int | None]] = Counter()
    for link in cluster.links:
        # A device's end comes first: that is the end where a edge may have a square.
        a, b = (link.b, link.a) if "/" in link.b else (link.a, link.b)
        near, _, local = a.partition("/")
        box = vertex_of.get(near, near)
        square = int(local) if local and vertices[box].kind == "node" else None
        far = b.partition("/")[0]
        counts[box, vertex_of.get(far, far), link.rate_bytes_per_s, square] += link.parallel
    return [Edge(*key, cables) for key, cables in counts.items() if key[0] != key[1]]
