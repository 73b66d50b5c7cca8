"""Drawing a timeline: above, every rank's rounds and waits; below, the use of the busiest links over time."""

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from numpy.typing import NDArray

from mimatrix.core.units import format_bytes, format_seconds
from mimatrix.netsim.timeline import Timeline

Floats = NDArray[np.float64]

_MOST_RANKS = 64
_MOST_CHANNELS = 32
_BINS = 240


def draw_timeline(timeline: Timeline, title: str) -> Figure:
    """Draw a Gantt chart of the ranks over a heat map of the links, on one time axis."""
    ranks = min(timeline.traffic.ranks, _MOST_RANKS)
    channels = min(int((timeline.channel_bytes > 0).sum()), _MOST_CHANNELS)
    figure = Figure(figsize=(11, 2.4 + 0.14 * (ranks + channels)), layout="constrained")
    ratio = {"height_ratios": [max(ranks, 6), max(channels, 6)]}
    above, below = figure.subplots(2, 1, sharex=True, gridspec_kw=ratio)
    unit, scale = _unit(timeline.seconds)
    _draw_ranks(above, timeline, scale)
    _draw_links(below, timeline, scale)
    below.set_xlabel(f"time [{unit}]")
    cluster = timeline.traffic.fabric.cluster.name
    figure.suptitle(
        f"{title} of {format_bytes(timeline.message_bytes)} on {cluster}: {format_seconds(timeline.seconds)}"
    )
    return figure


def link_use(timeline: Timeline, channels: NDArray[np.int64], bins: int) -> Floats:
    """Return [channel, bin]: the fraction of each channel's capacity used per slice of time.

    Reads count as even in time.
    """
    edges = np.linspace(0.0, timeline.seconds, bins + 1)
    traffic = timeline.traffic
    carried = np.zeros((len(channels), bins + 1))
    for row, channel in enumerate(channels):
        moves = np.flatnonzero((traffic.path == channel).any(axis=1))
        size = traffic.fraction[moves] * timeline.message_bytes
        began, ended = timeline.move_began_s[moves], timeline.move_ended_s[moves]
        length = np.maximum(ended - began, timeline.seconds * 1e-12)
        for index, edge in enumerate(edges):
            carried[row, index] = (size * np.clip((edge - began) / length, 0.0, 1.0)).sum()
    per_bin = traffic.fabric.rates[channels][:, None] * timeline.seconds / bins
    return np.diff(carried, axis=1) / per_bin


def _draw_ranks(axes: Axes, timeline: Timeline, scale: float) -> None:
    ranks = np.unique(np.linspace(0, timeline.traffic.ranks - 1, _MOST_RANKS).astype(int))
    colours = colormaps["viridis"](np.linspace(0.15, 0.95, max(timeline.traffic.rounds, 2)))
    bars, fills = [], []
    for row, rank in enumerate(ranks):
        for span in timeline.spans(int(rank)):
            bars.append(_bar(span.began_s * scale, span.ended_s * scale, row))
            fills.append(tuple(colours[span.round]))
    axes.set_facecolor("0.92")
    axes.add_collection(PolyCollection(bars, facecolors=fills, edgecolors="white", linewidths=0.3))
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlim(0, timeline.seconds * scale)
    step = max(1, len(ranks) // 16)
    axes.set_yticks(range(0, len(ranks), step), [str(rank) for rank in ranks[::step]])
    axes.set_ylabel("rank")
    axes.set_title("rounds by colour, waiting in grey", fontsize=9, loc="left")


def _draw_links(axes: Axes, timeline: Timeline, scale: float) -> None:
    fabric = timeline.traffic.fabric
    need = timeline.channel_bytes / fabric.rates
    used = np.flatnonzero(need > 0)
    channels = used[np.argsort(-need[used], kind="stable")][:_MOST_CHANNELS]
    use = link_use(timeline, channels, _BINS)
    extent = (0.0, timeline.seconds * scale, len(channels) - 0.5, -0.5)
    image = axes.imshow(use, aspect="auto", extent=extent, cmap="Reds", vmin=0, vmax=1, interpolation="nearest")
    step = max(1, len(channels) // 16)
    names = [fabric.channels[channel].name for channel in channels]
    axes.set_yticks(range(0, len(channels), step), names[::step], fontsize=7)
    axes.set_title(f"use of the {len(channels)} busiest links of {len(used)}", fontsize=9, loc="left")
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes, label="part of capacity", pad=0.01)


def _bar(start: float, end: float, row: int) -> list[tuple[float, float]]:
    return [(start, row - 0.42), (end, row - 0.42), (end, row + 0.42), (start, row + 0.42)]


def _unit(seconds: float) -> tuple[str, float]:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return unit, scale
    return "ns", 1e9
