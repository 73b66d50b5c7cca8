"""Layouts of switched networks in layers: nodes below the switches they are attached to, the core on top.

A BiGraph has its two groups facing one another, the nodes of the upper group above it; nodes that are attached to
both groups lie between them.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from mimatrix.cluster.layout.boxes import Box, GraphLayout, Point, Polyline, place, round_corners
from mimatrix.cluster.layout.scene import SQUARE, Edge, Scene, count_text

_ROOM_FOR_NAMES = 40
_WIDEST_NAMED = 31.5
_NODE_GAP = 0.09
_STACK_GAP = 0.17
_COLUMN_GAP = 0.3
_PORT_PITCH = 0.1
_LEVELS = {"leaf": 1, "edge": 1, "tor": 1, "aggregation": 2, "agg": 2, "spine": 3, "core": 3}


@dataclass(frozen=True, slots=True)
class _Row:
    """Vertices side by side, named if there is room; nodes keep to the columns of the switches `heads`."""

    names: list[str]
    heads: tuple[str, ...] = ()
    named: bool = True


@dataclass(frozen=True, slots=True)
class _Column:
    """Vertices side by side under (or over) one head, or a single vertex with none."""

    names: list[str]
    head: str | None
    width: float


def layers(scene: Scene) -> GraphLayout:
    """Arrange rows from top to bottom, each vertex near its neighbours, edges from box to box."""
    rows = [_Row(row.names, row.heads, _has_room(scene, row.names)) for row in _rows(scene) if row.names]
    widths = {name: scene.vertices[name].size(row.named)[0] for row in rows for name in row.names}
    columns = _columns(scene, rows, widths)
    xs, ys = _spread(columns, widths), _heights(scene, rows, columns)
    edges = Counter(end for edge in scene.edges for end in (edge.a, edge.b))
    boxes: dict[str, Box] = {}
    for index, (row, y) in enumerate(zip(rows, ys, strict=True)):
        # Switches grow with their ports as far as there is room, so that edges keep apart.
        room = 0.5 * _total(columns) / len(row.names)
        for name in row.names:
            # Only the upper nodes of a BiGraph, at the very top, have the network below them.
            at, ports = (xs[name], y), min(_PORT_PITCH * edges[name], room)
            boxes[name] = place(scene.vertices[name], at, row.named, network_above=index > 0, least_width=ports)
    captions = tuple((_caption(scene, row.names), y) for row, y in zip(rows, ys, strict=True))
    return GraphLayout(tuple(boxes.values()), tuple(_polylines(scene, boxes)), captions)


def _rows(scene: Scene) -> list[_Row]:
    switches, nodes = scene.of_kind("switch"), scene.of_kind("node", "bundle")
    group_of = {name: scene.vertices[name].group for name in switches}
    if set(group_of.values()) != {"upper", "lower"}:
        level = _levels(scene, group_of)
        tiers = [tuple(s for s in switches if level[s] == tier) for tier in sorted(set(level.values()), reverse=True)]
        return [*(_Row(list(tier)) for tier in tiers), _Row(nodes, tiers[-1])]
    upper, lower = (tuple(s for s in switches if group_of[s] == side) for side in ("upper", "lower"))
    sides = {node: {group_of[name] for name in scene.neighbours[node] if name in group_of} for node in nodes}
    if any(len(side) > 1 for side in sides.values()):
        index_of = {name: index for side in (upper, lower) for index, name in enumerate(side)}
        nodes.sort(key=lambda node: statistics.fmean(index_of.get(name, 0) for name in scene.neighbours[node] or [""]))
        return [_Row(list(upper)), _Row(nodes), _Row(list(lower))]
    above = [node for node in nodes if sides[node] == {"upper"}]
    below = [node for node in nodes if sides[node] != {"upper"}]
    return [_Row(above, upper), _Row(list(upper)), _Row(list(lower)), _Row(below, lower)]


def _levels(scene: Scene, group_of: dict[str, str]) -> dict[str, int]:
    """Return the tier of each switch: by the names of the groups if all are known, otherwise hops from the nodes."""
    if all(group in _LEVELS for group in group_of.values()):
        return {name: _LEVELS[group] for name, group in group_of.items()}
    level: dict[str, int] = {}
    front = scene.of_kind("node", "bundle")
    for tier in range(1, len(group_of) + 1):
        front = [near for name in front for near in scene.neighbours[name] if near in group_of and near not in level]
        level |= dict.fromkeys(front, tier)
    return {name: level.get(name, 1) for name in group_of}


def _has_room(scene: Scene, names: list[str]) -> bool:
    width = sum(scene.vertices[name].size(named=True)[0] + _NODE_GAP for name in names)
    return len(names) <= _ROOM_FOR_NAMES and width <= _WIDEST_NAMED


def _columns(scene: Scene, rows: list[_Row], widths: dict[str, float]) -> list[list[_Column]]:
    """Return the columns of each row; switches that head columns of nodes are in those."""
    headed_columns: list[list[_Column]] = []
    headed: set[str] = set()
    for row in rows:
        homes = {name: [head for head in scene.neighbours[name] if head in row.heads] for name in row.names}
        if row.heads and all(len(home) <= 1 for home in homes.values()):
            below: dict[str | None, list[str]] = {head: [] for head in row.heads}
            for name, home in homes.items():
                below.setdefault(home[0] if home else None, []).append(name)
            headed_columns.append([_column(names, head, widths) for head, names in below.items()])
            headed.update(row.heads)
    plain = [row.names for row in rows if row.names[0] not in headed and not (row.heads and headed & set(row.heads))]
    return headed_columns + [[_column([name], None, widths) for name in names] for names in plain]


def _column(names: list[str], head: str | None, widths: dict[str, float]) -> _Column:
    wide = sum(widths[name] + _NODE_GAP for name in names) - _NODE_GAP
    gap = _COLUMN_GAP if len(names) > 1 else _STACK_GAP if head else _NODE_GAP
    return _Column(names, head, max(wide, widths[head] if head else 0.0) + gap)


def _spread(columns: list[list[_Column]], widths: dict[str, float]) -> dict[str, float]:
    """Return the centre of each vertex; every row takes the width of the widest."""
    total = _total(columns)
    xs: dict[str, float] = {}
    for row in columns:
        spare = (total - sum(column.width for column in row)) / len(row)
        left = 0.0
        for column in row:
            middle = left + (column.width + spare) / 2
            if column.head:
                xs[column.head] = middle
            x = middle - (sum(widths[name] + _NODE_GAP for name in column.names) - _NODE_GAP) / 2
            for name in column.names:
                xs[name] = x + widths[name] / 2
                x += widths[name] + _NODE_GAP
            left += column.width + spare
    return xs


def _total(columns: list[list[_Column]]) -> float:
    return max(sum(column.width for column in row) for row in columns)


def _heights(scene: Scene, rows: list[_Row], columns: list[list[_Column]]) -> list[float]:
    """Return the centre of each row, from the top down."""
    tall = [max(scene.vertices[name].size(row.named)[1] for name in row.names) for row in rows]
    ys = [0.0]
    for index, (upper, lower) in enumerate(pairwise(rows)):
        ys.append(ys[-1] - (tall[index] + tall[index + 1]) / 2 - _gap(scene, upper, lower, columns))
    return ys


def _gap(scene: Scene, upper: _Row, lower: _Row, columns: list[list[_Column]]) -> float:
    """Return the space between two rows for the edges: more if they run far sideways."""
    total = _total(columns)
    if all(scene.vertices[row.names[0]].kind == "switch" for row in (upper, lower)):
        return max(0.9, 0.13 * total)
    if not (upper.heads or lower.heads):
        return max(0.7, 0.09 * total)
    widest = max(column.width for row in columns for column in row)
    return max(0.5, 0.03 * total, 0.09 * widest)


def _caption(scene: Scene, names: list[str]) -> str:
    vertices = [scene.vertices[name] for name in names]
    if vertices[0].kind == "switch":
        groups = {vertex.group for vertex in vertices}
        return count_text(len(vertices), f"{groups.pop()} switch".strip() if len(groups) == 1 else "switch")
    sizes = Counter(len(vertex.nodes) for vertex in vertices)
    if vertices[0].kind == "bundle" and len(sizes) == 1 and len(vertices) > 1:
        return f"{len(vertices)} × {count_text(len(vertices[0].nodes), 'node')}"
    return count_text(sum(len(vertex.nodes) for vertex in vertices), "node")


def _polylines(scene: Scene, boxes: dict[str, Box]) -> Iterator[Polyline]:
    """Yield edges from port to port, or from the square of a device."""
    ports = _ports(scene, boxes)
    levels: dict[float, list[float]] = defaultdict(list)
    for box in boxes.values():
        levels[box.at[1]].append(box.at[0])
    for number, edge in enumerate(scene.edges):
        a, b = boxes[edge.a], boxes[edge.b]
        start, end = ports.get((edge.a, number)), ports[edge.b, number]
        if start is None:
            assert edge.square is not None
            x, y = a.squares[edge.square].at
            start = (x, y + _sides(a, b)[0] * SQUARE / 2)
        if a.at[1] == b.at[1]:
            yield _line_in_row(edge, a, b, (start, end), levels[a.at[1]])
        else:
            low, high = sorted((a.at[1], b.at[1]))
            yield Polyline(edge, (start, end), pale=any(low < level < high for level in levels))


def _ports(scene: Scene, boxes: dict[str, Box]) -> dict[tuple[str, int], Point]:
    """Return the point at which each edge meets a box: spread along its sides, ordered by what the edges lead to."""
    targets: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    for number, edge in enumerate(scene.edges):
        a, b = boxes[edge.a], boxes[edge.b]
        side, other = _sides(a, b)
        if edge.square is None:
            targets[a.name, side].append((b.at[0], number))
        targets[b.name, other].append((a.at[0] if edge.square is None else a.squares[edge.square].at[0], number))
    return {
        (name, number): _port(boxes[name], side, slot, len(wanted))
        for (name, side), wanted in targets.items()
        for slot, (_, number) in enumerate(sorted(wanted))
    }


def _sides(a: Box, b: Box) -> tuple[int, int]:
    """Return the sides that face one another, 1 the upper, -1 the lower; in one row the side without other edges."""
    if a.at[1] == b.at[1]:
        side = 1 if a.kind == "switch" else -1
        return side, side
    return (-1, 1) if a.at[1] > b.at[1] else (1, -1)


def _port(box: Box, side: int, slot: int, count: int) -> Point:
    span = min(0.8 * box.width, _PORT_PITCH * (count - 1))
    offset = span * (slot / (count - 1) - 0.5) if count > 1 else 0.0
    return box.at[0] + offset, box.at[1] + side * box.height / 2


def _line_in_row(edge: Edge, a: Box, b: Box, ports: tuple[Point, Point], row: list[float]) -> Polyline:
    """Return a line between two boxes of one row: straight between neighbours, otherwise around those in between."""
    near, far = sorted((a.at, b.at))
    if not any(near[0] < x < far[0] for x in row):
        return Polyline(edge, (near, far))
    start, end = ports
    lane = start[1] + math.copysign(0.2 + 0.03 * abs(end[0] - start[0]), start[1] - a.at[1])
    return Polyline(edge, round_corners(start, (start[0], lane), (end[0], lane), end), pale=True)
