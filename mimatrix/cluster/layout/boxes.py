"""Boxes, squares and polylines in inches: the parts of a picture once everything has its place."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mimatrix.cluster.layout.scene import GAP, NAME_HEIGHT, PADDING, SQUARE, Edge, Kind, Vertex

Point = tuple[float, float]

_CORNER = 0.12
_CORNER_STEPS = 6
_SMALL_SQUARE = 0.065
_SMALL_PITCH = 0.085


@dataclass(frozen=True, slots=True)
class Square:
    """A device: its centre, its kind, its number in the node, its size."""

    at: Point
    kind: str
    number: int
    side: float = SQUARE


@dataclass(frozen=True, slots=True)
class Box:
    """A switch, node or bundle: its centre and size, its text (empty if there is no room), its devices."""

    name: str
    kind: Kind
    at: Point
    width: float
    height: float
    text: str
    text_at: Point
    squares: tuple[Square, ...]


@dataclass(frozen=True, slots=True)
class Polyline:
    """An edge as a line through points, pale if it passes behind or around boxes that are not its ends."""

    edge: Edge
    points: tuple[Point, ...]
    pale: bool = False


@dataclass(frozen=True, slots=True)
class GraphLayout:
    """The picture in numbers. `captions` name the rows: a text, and its height in the picture."""

    boxes: tuple[Box, ...]
    polylines: tuple[Polyline, ...]
    captions: tuple[tuple[str, float], ...] = ()

    def extent(self) -> tuple[Point, Point]:
        """Return the lower left and the upper right corner of everything."""
        points = [point for polyline in self.polylines for point in polyline.points]
        for box in self.boxes:
            points += [(box.at[0] + way * box.width / 2, box.at[1] + way * box.height / 2) for way in (-1, 1)]
        xs, ys = zip(*points, strict=True)
        return (min(xs), min(ys)), (max(xs), max(ys))


def place(vertex: Vertex, at: Point, named: bool, network_above: bool = True, least_width: float = 0.0) -> Box:
    """Return a vertex as a box around `at`, devices on the side of the network and the name on the other."""
    width, height = vertex.size(named)
    text = vertex.text if named else ""
    way = 1 if network_above else -1
    aside = (at[0], at[1] - way * (height - NAME_HEIGHT - PADDING / 2) / 2)
    if vertex.kind == "switch":
        return Box(vertex.name, vertex.kind, at, max(width, least_width), height, text, at, ())
    if vertex.kind == "bundle":
        return _bundle(Box(vertex.name, vertex.kind, at, width, height, text, at, ()), vertex, way)
    if vertex.below:
        return Box(vertex.name, vertex.kind, at, width, height, text, at, _facing_both(vertex, at, height))
    return Box(vertex.name, vertex.kind, at, width, height, text, aside, _facing_one(vertex, at, height, way))


def round_corners(*corners: Point) -> tuple[Point, ...]:
    """Return a line through the corners, each but the ends rounded off."""
    points = [corners[0]]
    for before, corner, after in zip(corners, corners[1:], corners[2:], strict=False):
        start, end = _towards(corner, before), _towards(corner, after)
        for step in range(_CORNER_STEPS + 1):
            t = step / _CORNER_STEPS
            # A quadratic Bezier curve with the corner as its control point.
            points.append(_mix(_mix(start, corner, t), _mix(corner, end, t), t))
    return (*points, corners[-1])


def _facing_one(vertex: Vertex, at: Point, height: float, way: int) -> tuple[Square, ...]:
    """Return devices in rows, read like text, close to the side of the network."""
    numbers = range(vertex.devices)
    rows = [numbers[first : first + vertex.columns] for first in range(0, len(numbers), vertex.columns)]
    block = len(rows) * (SQUARE + GAP) - GAP
    top = at[1] + height / 2 - PADDING if way > 0 else at[1] - height / 2 + PADDING + block
    return tuple(
        square
        for index, row in enumerate(rows)
        for square in _row(vertex, row, (at[0], top - SQUARE / 2 - index * (SQUARE + GAP)), len(rows[0]))
    )


def _facing_both(vertex: Vertex, at: Point, height: float) -> tuple[Square, ...]:
    """Return devices at the edge on which their network is, in the order of their numbers."""
    offset = height / 2 - PADDING - SQUARE / 2
    upper = [number for number in range(vertex.devices) if number not in vertex.below]
    squares = _row(vertex, upper, (at[0], at[1] + offset), len(upper))
    squares += _row(vertex, sorted(vertex.below), (at[0], at[1] - offset), len(vertex.below))
    return tuple(sorted(squares, key=lambda square: square.number))


def _row(vertex: Vertex, numbers: Sequence[int], middle: Point, slots: int) -> list[Square]:
    left = middle[0] - (slots - 1) / 2 * (SQUARE + GAP)
    devices = vertex.nodes[0].devices
    return [
        Square((left + place * (SQUARE + GAP), middle[1]), devices[number].kind, number)
        for place, number in enumerate(numbers)
    ]


def _bundle(box: Box, vertex: Vertex, way: int) -> Box:
    """Return the box with the devices of all nodes as small squares, if all of them have room next to the text."""
    lines = len(box.text.split("\n")) if box.text else 0
    room = box.height - 2 * PADDING - lines * 0.14
    columns, rows = (int((length + 0.02) / _SMALL_PITCH) for length in (box.width - 2 * PADDING, room))
    if vertex.devices > columns * rows:
        return box
    kinds = [device.kind for node in vertex.nodes for device in node.devices]
    used = -(-len(kinds) // columns)
    columns = -(-len(kinds) // used)
    middle = box.at[1] + way * (box.height - 2 * PADDING - room) / 2
    squares = []
    for number, kind in enumerate(kinds):
        row, column = divmod(number, columns)
        x = box.at[0] + (column - (columns - 1) / 2) * _SMALL_PITCH
        squares.append(Square((x, middle + ((used - 1) / 2 - row) * _SMALL_PITCH), kind, number, _SMALL_SQUARE))
    text_at = (box.at[0], box.at[1] - way * (box.height - lines * 0.14 - PADDING) / 2)
    return replace(box, squares=tuple(squares), text_at=text_at)


def _towards(corner: Point, other: Point) -> Point:
    distance = math.dist(corner, other)
    return _mix(corner, other, min(_CORNER, distance / 2) / distance) if distance else corner


def _mix(a: Point, b: Point, t: float) -> Point:
    return (a[0] + (b[0] - a[0]) * t, a[1] + (b[1] - a[1]) * t)
