"""Drawing a cluster from its layout. Importing this imports matplotlib, so no other module imports it early."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, Rectangle

from mimatrix.cluster.layout import Box, GraphLayout, Polyline, arrange
from mimatrix.cluster.layout.boxes import Point
from mimatrix.cluster.layout.scene import count_text, text_width
from mimatrix.cluster.model import Cluster
from mimatrix.core.units import format_rate

_WIDEST, _TALLEST, _NARROWEST = 20.0, 10.0, 6.0
_MARGIN, _HEADER, _LEGEND_ROW, _LEGEND_MARK = 0.3, 0.95, 0.2, 0.6
_SMALLEST_TEXT = 4.2
_PALE, _STRONG = 0.4, 0.85
_MOST_LABELS = 64
_MOST_ENTRIES = 6

_INK, _FAINT = "#1b2433", "#5b6678"
_SWITCH, _NODE, _NODE_EDGE = "#2b3a55", "#f1f4f9", "#8793a8"
_KINDS = ("#566579", "#b0bac9", "#b77ac6", "#7fa650", "#c98b5e")
_SLOW_TO_FAST = ("#8f1d14", "#d9560b", "#e0a100", "#12876f", "#1d6fb8", "#5b3a9e")
_THIN = ((64, 1.4), (160, 1.0), (400, 0.7), (1000, 0.5), (3000, 0.3), (math.inf, 0.15))
_CHOICE = ((), (4,), (1, 4), (1, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5))


def draw(cluster: Cluster) -> Figure:
    """Draw the cluster as a figure, ready to be saved; a large cluster has its nodes in bundles."""
    layout = arrange(cluster)
    pens = _Pens(layout.polylines)
    kinds = list(dict.fromkeys(device.kind for node in cluster.nodes for device in node.devices))
    colour_of = dict(zip(kinds, cycle(_KINDS), strict=False))
    entries = pens.entries() + [_entry_of_kind(kind, colour) for kind, colour in colour_of.items()]
    page = _page(layout, cluster.name, [str(entry.get_label()) for entry in entries])
    _draw_polylines(page, layout.polylines, pens)
    for box in layout.boxes:
        _draw_box(page, box)
    _draw_squares(page, layout.boxes, colour_of)
    _draw_cable_counts(page, layout)
    _write_around(page, layout, cluster, entries)
    return page.figure


@dataclass(frozen=True, slots=True)
class _Page:
    """A figure whose axes count in layout inches, drawn `scale` times as large."""

    figure: Figure
    axes: Axes
    scale: float
    width: float
    height: float
    columns: int
    """Of the legend."""

    def write(self, x: float, y: float, text: str, points: float, colour: str) -> None:
        """Write a text in the layout, unless it would be too small to read."""
        if text and points * self.scale >= _SMALLEST_TEXT:
            size = points * self.scale
            self.axes.text(
                x, y, text, fontsize=size, color=colour, ha="center", va="center", parse_math=False, zorder=6
            )


class _Pens:
    """Colour and width of polylines: colour by the rate of a cable, width by the rate of all cables together."""

    def __init__(self, polylines: Sequence[Polyline]) -> None:
        edges = [polyline.edge for polyline in polylines]
        rates = sorted({edge.rate_bytes_per_s for edge in edges})
        classes = min(len(rates), len(_SLOW_TO_FAST))
        self._class_of = {rate: index * classes // len(rates) for index, rate in enumerate(rates)}
        self._colours = [_SLOW_TO_FAST[index] for index in _CHOICE[classes]]
        self._least = min((edge.rate_bytes_per_s * edge.cables for edge in edges), default=1.0)
        self._thin = next(points for most, points in _THIN if len(edges) <= most)
        self._drawn = sorted({(self._class_of[edge.rate_bytes_per_s], edge.cables) for edge in edges})
        if len(self._drawn) > _MOST_ENTRIES:
            self._drawn = sorted({(number, 1) for number, _ in self._drawn})

    def colour(self, rate_bytes_per_s: float) -> str:
        return self._colours[self._class_of[rate_bytes_per_s]]

    def width(self, rate_bytes_per_s: float) -> float:
        """Return the width in points: ten times the rate is twice as wide, within limits."""
        return self._thin * min(3.2, 1 + math.log10(max(1.0, rate_bytes_per_s / self._least)))

    def entries(self) -> list[Line2D]:
        """Return the lines of the legend: one for each class of rates and number of cables."""
        return [self._entry(number, cables) for number, cables in self._drawn]

    def _entry(self, number: int, cables: int) -> Line2D:
        rates = [rate for rate, rate_class in self._class_of.items() if rate_class == number]
        text = format_rate(rates[0])
        if len(rates) > 1:
            text += f" to {format_rate(rates[-1])}"
        label = f"{cables} × {text}" if cables > 1 else text
        width = self.width(rates[-1] * cables) / self._thin * _THIN[0][1]
        return Line2D([], [], color=self._colours[number], linewidth=width, label=label)


def _entry_of_kind(kind: str, colour: str) -> Line2D:
    return Line2D([], [], linestyle="none", marker="s", markersize=7, color=colour, label=kind)


def _page(layout: GraphLayout, title: str, entries: Sequence[str]) -> _Page:
    """Return an empty page with room for the layout, a title above, captions on the left and a legend below."""
    (left, bottom), (right, top) = layout.extent()
    scale = min(1.0, _WIDEST / (right - left), _TALLEST / (top - bottom))
    margin = _MARGIN + max((text_width(text, 8.5) + 0.25 for text, _ in layout.captions), default=0.0)
    content = margin + (right - left) * scale + _MARGIN
    width = min(_WIDEST + margin, max(_NARROWEST, content, text_width(title, 14) + 2 * _MARGIN))
    entry = _LEGEND_MARK + max(text_width(text, 8.5) for text in entries)
    columns = max(1, min(len(entries), int((width - 2 * _MARGIN) / entry)))
    footer = 0.3 + _LEGEND_ROW * -(-len(entries) // columns)
    height = _HEADER + (top - bottom) * scale + footer
    figure = Figure(figsize=(width, height), facecolor="white", dpi=150)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    start = left - (margin + (width - content) / 2) / scale
    axes.set_xlim(start, start + width / scale)
    axes.set_ylim(bottom - footer / scale, bottom - footer / scale + height / scale)
    return _Page(figure, axes, scale, width, height, columns)


def _draw_polylines(page: _Page, polylines: Sequence[Polyline], pens: _Pens) -> None:
    # A device's own NIC passes over the box of its node; all others stop at, or pass under, the boxes.
    for at_device, zorder in ((False, 1), (True, 3)):
        chosen = [polyline for polyline in polylines if (polyline.edge.square is not None) == at_device]
        edges = [polyline.edge for polyline in chosen]
        lines = LineCollection(
            [polyline.points for polyline in chosen],
            colors=[(pens.colour(s.edge.rate_bytes_per_s), _PALE if s.pale else _STRONG) for s in chosen],
            linewidths=[pens.width(edge.rate_bytes_per_s * edge.cables) for edge in edges],
            capstyle="round",
            zorder=zorder,
        )
        page.axes.add_collection(lines, autolim=False)


def _draw_box(page: _Page, box: Box) -> None:
    if box.kind == "bundle":
        for behind in (2, 1):
            _add_patch(page, box, behind * 0.045, f"card{behind}")
    _add_patch(page, box, 0.0, box.kind)
    colour, points = ("white", 8.0) if box.kind == "switch" else (_INK, 7.0)
    page.write(*box.text_at, box.text, points, colour)


def _add_patch(page: _Page, box: Box, shift: float, role: str) -> None:
    fill, outline = (_SWITCH, _SWITCH) if box.kind == "switch" else (_NODE, _NODE_EDGE)
    corner = (box.at[0] - box.width / 2 + shift, box.at[1] - box.height / 2 - shift)
    style = f"round,pad=0,rounding_size={min(0.06, box.height / 4)}"
    patch = FancyBboxPatch(
        corner, box.width, box.height, boxstyle=style, facecolor=fill, edgecolor=outline, linewidth=0.8 * page.scale
    )
    # NICs of devices pass over the boxes of nodes, but stop at switches.
    patch.set_zorder(4 if box.kind == "switch" else 2)
    patch.set_gid(f"{role}:{box.name}")
    # `add_patch` would measure every patch for limits that are set already: most of the time that 4,096 nodes take.
    page.axes.add_artist(patch)


def _draw_squares(page: _Page, boxes: Sequence[Box], colour_of: dict[str, str]) -> None:
    squares = [square for box in boxes for square in box.squares]
    patches = [Rectangle((s.at[0] - s.side / 2, s.at[1] - s.side / 2), s.side, s.side) for s in squares]
    colours = [colour_of[square.kind] for square in squares]
    page.axes.add_collection(PatchCollection(patches, facecolors=colours, linewidths=0, zorder=4), autolim=False)
    for box in boxes:
        for square in box.squares if box.kind == "node" and len(box.squares) > 1 and box.text else ():
            page.write(*square.at, str(square.number), 5.5, "white")


def _draw_cable_counts(page: _Page, layout: GraphLayout) -> None:
    """Write `×2` on polylines of several cables if there is room on all equal ones; the legend says it anyway."""
    groups: dict[tuple[float, int], list[Polyline]] = defaultdict(list)
    for polyline in layout.polylines:
        if polyline.edge.cables > 1 and len(polyline.points) == 2:
            groups[polyline.edge.rate_bytes_per_s, polyline.edge.cables].append(polyline)
    taken = [_Patch(*box.at, box.width / 2, box.height / 2) for box in layout.boxes]
    for (_, cables), alike in groups.items():
        text = f"×{cables}"
        readable = len(alike) <= _MOST_LABELS and 7 * page.scale >= _SMALLEST_TEXT
        places = _places(alike, text, taken, layout.polylines) if readable else []
        for place in places:
            corner = (place.x - place.half_width, place.y - place.half_height)
            size = (2 * place.half_width, 2 * place.half_height)
            page.axes.add_artist(Rectangle(corner, *size, facecolor="white", edgecolor="none", zorder=5))
            page.write(place.x, place.y, text, 7, _INK)
        taken += places


@dataclass(frozen=True, slots=True)
class _Patch:
    """A rectangle on the page, given by its centre."""

    x: float
    y: float
    half_width: float
    half_height: float

    def overlaps(self, other: "_Patch") -> bool:
        return (
            abs(self.x - other.x) < self.half_width + other.half_width
            and abs(self.y - other.y) < self.half_height + other.half_height
        )

    def crossed_by(self, start: Point, end: Point) -> bool:
        """Return whether a straight line passes through the patch, by clipping it at each side (Liang and Barsky)."""
        enter, leave = 0.0, 1.0
        sides = ((self.x, self.half_width), (self.y, self.half_height))
        for (middle, half), a, b in zip(sides, start, end, strict=True):
            if a == b:
                if abs(a - middle) >= half:
                    return False
                continue
            near, far = sorted(((middle - half - a) / (b - a), (middle + half - a) / (b - a)))
            enter, leave = max(enter, near), min(leave, far)
        return enter < leave


def _places(
    polylines: Sequence[Polyline], text: str, taken: Sequence[_Patch], others: Sequence[Polyline]
) -> list[_Patch]:
    """Return a free place on each polyline, or none at all if one has none: labels on half of them would mislead."""
    places: list[_Patch] = []
    for polyline in polylines:
        start, end = polyline.points
        for t in (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8):
            x, y = (a + (b - a) * t for a, b in zip(start, end, strict=True))
            patch = _Patch(x, y, text_width(text, 7) / 2, 0.07)
            crossing = any(patch.crossed_by(*other.points[:2]) for other in others if other is not polyline)
            if not crossing and not any(patch.overlaps(other) for other in (*taken, *places)):
                places.append(patch)
                break
        else:
            return []
    return places


def _write_around(page: _Page, layout: GraphLayout, cluster: Cluster, entries: Sequence[Artist]) -> None:
    figure, left = page.figure, _MARGIN / page.width
    size = min(13.0, 13.0 * (page.width - 2 * _MARGIN) / max(1.0, text_width(cluster.name, 14)))
    devices = sum(len(node.devices) for node in cluster.nodes)
    counts = ((len(cluster.nodes), "node"), (devices, "device"), (len(cluster.switches), "switch"))
    subtitle = ", ".join(count_text(count, noun) for count, noun in counts)
    top = 1 - 0.3 / page.height
    figure.text(left, top, cluster.name, fontsize=size, fontweight="bold", color=_INK, va="center", parse_math=False)
    figure.text(left, top - 0.25 / page.height, subtitle, fontsize=9.5, color=_FAINT, va="center")
    for text, y in layout.captions:
        height = (y - page.axes.get_ylim()[0]) * page.scale / page.height
        figure.text(left, height, text, fontsize=8.5, color=_FAINT, va="center", parse_math=False)
    legend = figure.legend(
        handles=list(entries),
        loc="lower left",
        bbox_to_anchor=(left - 0.1 / page.width, 0.02 / page.height),
        ncols=page.columns,
        frameon=False,
        fontsize=8.5,
        labelcolor=_INK,
        borderaxespad=0.0,
    )
    for label in legend.get_texts():
        label.set_parse_math(False)
