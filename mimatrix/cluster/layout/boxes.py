"""Boxes, squares and strands in inches: what a picture is made of once everything has its place."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mimatrix.cluster.layout.scene import GAP, NAME_HEIGHT, PADDING, SQUARE, Cord, Kind, Thing

Point = tuple[float, float]

_CORNER = 0.12
_CORNER_STEPS = 6
_SMALL_SQUARE = 0.065
_SMALL_PITCH = 0.085


@dataclass(frozen=True, slots=True)
class Square:
    """A device: its middle, its kind, its number in the node, its size."""

    at: Point
    kind: str
    number: int
    side: float = SQUARE


@dataclass(frozen=True, slots=True)
class Box:
    """A switch, node or bundle: its middle and size, its text (empty where there is no room), its devices."""

    name: str
    kind: Kind
    at: Point
    width: float
    height: float
    text: str
    text_at: Point
    squares: tuple[Square, ...]


@dataclass(frozen=True, slots=True)
class Strand:
    """A cord as a line through points, pale where it passes behind or around boxes that it has nothing to do with."""

    cord: Cord
    points: tuple[Point, ...]
    pale: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """The picture in numbers. `captions` name the rows: a text, and its height in the picture."""

    boxes: tuple[Box, ...]
    strands: tuple[Strand, ...]
    captions: tuple[tuple[str, float], ...] = ()

    def extent(self) -> tuple[Point, Point]:
        """The lower left and the upper right corner of everything."""
        points = [point for strand in self.strands for point in strand.points]
        for box in self.boxes:
            points += [(box.at[0] + way * box.width / 2, box.at[1] + way * box.height / 2) for way in (-1, 1)]
        xs, ys = zip(*points, strict=True)
        return (min(xs), min(ys)), (max(xs), max(ys))


def put(thing: Thing, at: Point, named: bool, network_above: bool = True, least_width: float = 0.0) -> Box:
    """A thing as a box around `at`. The devices are on the side of the network, the name on the other."""
    width, height = thing.size(named)
    text = thing.text if named else ""
    way = 1 if network_above else -1
    aside = (at[0], at[1] - way * (height - NAME_HEIGHT - PADDING / 2) / 2)
    if thing.kind == "switch":
        return Box(thing.name, thing.kind, at, max(width, least_width), height, text, at, ())
    if thing.kind == "bundle":
        return _bundle(Box(thing.name, thing.kind, at, width, height, text, at, ()), thing, way)
    if thing.below:
        return Box(thing.name, thing.kind, at, width, height, text, at, _facing_both(thing, at, height))
    return Box(thing.name, thing.kind, at, width, height, text, aside, _facing_one(thing, at, height, way))


def rounded(*corners: Point) -> tuple[Point, ...]:
    """A line through the corners, each but the ends rounded off."""
    points = [corners[0]]
    for before, corner, after in zip(corners, corners[1:], corners[2:], strict=False):
        start, end = _towards(corner, before), _towards(corner, after)
        for step in range(_CORNER_STEPS + 1):
            t = step / _CORNER_STEPS
            # A quadratic Bezier curve with the corner as its control point.
            points.append(_mix(_mix(start, corner, t), _mix(corner, end, t), t))
    return (*points, corners[-1])


def _facing_one(thing: Thing, at: Point, height: float, way: int) -> tuple[Square, ...]:
    """Devices in rows, read like text, close to the side of the network."""
    numbers = range(thing.devices)
    rows = [numbers[first : first + thing.columns] for first in range(0, len(numbers), thing.columns)]
    block = len(rows) * (SQUARE + GAP) - GAP
    top = at[1] + height / 2 - PADDING if way > 0 else at[1] - height / 2 + PADDING + block
    return tuple(
        square
        for index, row in enumerate(rows)
        for square in _row(thing, row, (at[0], top - SQUARE / 2 - index * (SQUARE + GAP)), len(rows[0]))
    )


def _facing_both(thing: Thing, at: Point, height: float) -> tuple[Square, ...]:
    """Devices at the edge where their network is, in the order of their numbers."""
    edge = height / 2 - PADDING - SQUARE / 2
    upper = [number for number in range(thing.devices) if number not in thing.below]
    squares = _row(thing, upper, (at[0], at[1] + edge), len(upper))
    squares += _row(thing, sorted(thing.below), (at[0], at[1] - edge), len(thing.below))
    return tuple(sorted(squares, key=lambda square: square.number))


def _row(thing: Thing, numbers: Sequence[int], middle: Point, slots: int) -> list[Square]:
    left = middle[0] - (slots - 1) / 2 * (SQUARE + GAP)
    devices = thing.nodes[0].devices
    return [
        Square((left + place * (SQUARE + GAP), middle[1]), devices[number].kind, number)
        for place, number in enumerate(numbers)
    ]


def _bundle(box: Box, thing: Thing, way: int) -> Box:
    """The devices of all nodes as small squares, if all of them have room beside the text."""
    lines = len(box.text.split("\n")) if box.text else 0
    room = box.height - 2 * PADDING - lines * 0.14
    columns, rows = (int((length + 0.02) / _SMALL_PITCH) for length in (box.width - 2 * PADDING, room))
    if thing.devices > columns * rows:
        return box
    kinds = [device.kind for node in thing.nodes for device in node.devices]
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
