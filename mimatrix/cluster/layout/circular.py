"""Layouts around a centre and on a grid: stars, rings, tori, and any nodes that forward without switches."""

import math
from itertools import product

from mimatrix.cluster.layout.boxes import Box, GraphLayout, Point, Polyline, place, round_corners
from mimatrix.cluster.layout.scene import Edge, Scene

_ROOM_FOR_NAMES = 40
_ROOM_ON_A_GRID = 12


def circle(scene: Scene, hub: str = "") -> GraphLayout:
    """Arrange all vertices on a circle, clockwise from the top, a hub in the middle; edges run straight."""
    around = [name for name in scene.vertices if name != hub]
    named = len(around) <= _ROOM_FOR_NAMES
    widest = max(math.hypot(*scene.vertices[name].size(named)) for name in around)
    radius = max(1.1, (widest + (0.3 if named else 0.1)) * len(around) / math.tau)
    boxes = [place(scene.vertices[hub], (0.0, 0.0), named)] if hub else []
    for index, name in enumerate(around):
        angle = math.pi / 2 - math.tau * index / len(around)
        at = (radius * math.cos(angle), radius * math.sin(angle)) if len(around) > 1 else (0.0, 0.0)
        boxes.append(place(scene.vertices[name], at, named, network_above=not hub or at[1] < 1e-9))
    return _join(scene, boxes)


def grid(scene: Scene, sides: tuple[int, int]) -> GraphLayout:
    """Arrange the vertices in rows and columns; the edges that close a row or column run around it."""
    _, columns = sides
    named = max(sides) <= _ROOM_ON_A_GRID
    sizes = [vertex.size(named) for vertex in scene.vertices.values()]
    pitch = max(max(width for width, _ in sizes), max(height for _, height in sizes)) + (0.5 if named else 0.3)
    boxes = [
        place(vertex, (index % columns * pitch, -(index // columns) * pitch), named)
        for index, vertex in enumerate(scene.vertices.values())
    ]
    return _join(scene, boxes, pitch)


def torus_sides(scene: Scene) -> tuple[int, int] | None:
    """Return rows and columns if the nodes in their order are a torus of two dimensions, otherwise None."""
    order = {name: index for index, name in enumerate(scene.vertices)}
    joined = {tuple(sorted((order[edge.a], order[edge.b]))) for edge in scene.edges}
    count = len(order)
    for rows in range(2, count // 2 + 1):
        # A torus of two rows or columns has fewer cables, never more than two for each node.
        if count % rows == 0 and len(joined) <= 2 * count and joined == _torus_pairs(rows, count // rows):
            return rows, count // rows
    return None


def _torus_pairs(rows: int, columns: int) -> set[tuple[int, ...]]:
    pairs = set()
    for row, column in product(range(rows), range(columns)):
        here = row * columns + column
        for there in ((row + 1) % rows * columns + column, row * columns + (column + 1) % columns):
            pairs.add(tuple(sorted((here, there))))
    return pairs


def _join(scene: Scene, boxes: list[Box], pitch: float = math.inf) -> GraphLayout:
    """Return the boxes with the edges between them; one longer than `pitch` runs around the boxes in between."""
    by_name = {box.name: box for box in boxes}
    polylines = []
    for edge in scene.edges:
        a, b = _end(by_name[edge.a], edge), by_name[edge.b].at
        if math.dist(by_name[edge.a].at, b) > 1.5 * pitch:
            polylines.append(Polyline(edge, _detour(by_name[edge.a], by_name[edge.b], pitch), pale=True))
        else:
            polylines.append(Polyline(edge, (a, b)))
    return GraphLayout(tuple(boxes), tuple(polylines))


def _end(box: Box, edge: Edge) -> Point:
    return box.at if edge.square is None else box.squares[edge.square].at


def _detour(a: Box, b: Box, pitch: float) -> tuple[Point, ...]:
    """Return a line out at the far side of one box, along a lane half-way to the next row, into the other box."""
    (x0, y0), (x1, y1) = sorted((a.at, b.at))
    if y0 == y1:
        out, lane = 0.38 * pitch, y0 + 0.38 * pitch
        return round_corners((x0, y0), (x0 - out, y0), (x0 - out, lane), (x1 + out, lane), (x1 + out, y1), (x1, y1))
    # Wider than around rows, so that the two do not run side by side at the corners.
    out, lane = 0.55 * pitch, x0 - 0.5 * pitch
    low, high = min(y0, y1), max(y0, y1)
    return round_corners(
        (x0, low), (x0, low - out), (lane, low - out), (lane, high + out), (x0, high + out), (x0, high)
    )
