"""Arrangements around a middle, and on a grid: stars, rings, tori, and any nodes that forward without switches."""

import math
from itertools import product

from mimatrix.cluster.layout.boxes import Box, Layout, Point, Strand, put, rounded
from mimatrix.cluster.layout.scene import Cord, Scene

_ROOM_FOR_NAMES = 40
_ROOM_ON_A_GRID = 12


def circle(scene: Scene, hub: str = "") -> Layout:
    """All things on a circle, clockwise from the top, a hub in its middle; cords run straight."""
    around = [name for name in scene.things if name != hub]
    named = len(around) <= _ROOM_FOR_NAMES
    widest = max(math.hypot(*scene.things[name].size(named)) for name in around)
    radius = max(1.1, (widest + (0.3 if named else 0.1)) * len(around) / math.tau)
    boxes = [put(scene.things[hub], (0.0, 0.0), named)] if hub else []
    for index, name in enumerate(around):
        angle = math.pi / 2 - math.tau * index / len(around)
        at = (radius * math.cos(angle), radius * math.sin(angle)) if len(around) > 1 else (0.0, 0.0)
        boxes.append(put(scene.things[name], at, named, network_above=not hub or at[1] < 1e-9))
    return _joined(scene, boxes)


def grid(scene: Scene, sides: tuple[int, int]) -> Layout:
    """Rows and columns; the cords that close a row or column run around it."""
    _, columns = sides
    named = max(sides) <= _ROOM_ON_A_GRID
    sizes = [thing.size(named) for thing in scene.things.values()]
    pitch = max(max(width for width, _ in sizes), max(height for _, height in sizes)) + (0.5 if named else 0.3)
    boxes = [
        put(thing, (index % columns * pitch, -(index // columns) * pitch), named)
        for index, thing in enumerate(scene.things.values())
    ]
    return _joined(scene, boxes, pitch)


def torus_sides(scene: Scene) -> tuple[int, int] | None:
    """Rows and columns, if the nodes in their order are a torus of two dimensions."""
    order = {name: index for index, name in enumerate(scene.things)}
    joined = {tuple(sorted((order[cord.a], order[cord.b]))) for cord in scene.cords}
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


def _joined(scene: Scene, boxes: list[Box], pitch: float = math.inf) -> Layout:
    """The boxes with the cords between them; one longer than `pitch` goes around what lies between."""
    by_name = {box.name: box for box in boxes}
    strands = []
    for cord in scene.cords:
        a, b = _end(by_name[cord.a], cord), by_name[cord.b].at
        if math.dist(by_name[cord.a].at, b) > 1.5 * pitch:
            strands.append(Strand(cord, _detour(by_name[cord.a], by_name[cord.b], pitch), pale=True))
        else:
            strands.append(Strand(cord, (a, b)))
    return Layout(tuple(boxes), tuple(strands))


def _end(box: Box, cord: Cord) -> Point:
    return box.at if cord.square is None else box.squares[cord.square].at


def _detour(a: Box, b: Box, pitch: float) -> tuple[Point, ...]:
    """Out at the far side of one box, along the row or column half way to the next, in at the far side of the other."""
    (x0, y0), (x1, y1) = sorted((a.at, b.at))
    if y0 == y1:
        out, lane = 0.38 * pitch, y0 + 0.38 * pitch
        return rounded((x0, y0), (x0 - out, y0), (x0 - out, lane), (x1 + out, lane), (x1 + out, y1), (x1, y1))
    # Wider than around rows, so that the two do not run side by side at the corners.
    out, lane = 0.55 * pitch, x0 - 0.5 * pitch
    low, high = min(y0, y1), max(y0, y1)
    return rounded((x0, low), (x0, low - out), (lane, low - out), (lane, high + out), (x0, high + out), (x0, high))
