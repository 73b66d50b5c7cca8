"""The pictures of docs/measurements/allreduce.md."""

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from bench.allreduce.common import Rows
from mimatrix.core.units import format_bytes

COLOURS = {"gloo": "#d8743b", "mpi": "#8a8a8a", "mimatrix": "#7fb2f0", "mimatrix arena": "#1f5fbf"}


def bus_bandwidth(rows: Rows) -> Figure:
    """Draw bus bandwidth against size on one host, for every collective and world."""
    runs = list(dict.fromkeys((row["collective"], row["world"]) for row in rows))
    figure = Figure(figsize=(3.6 * len(runs), 3.6), layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True)
    for panel, (collective, world) in zip(panels, runs, strict=True):
        for who, colour in COLOURS.items():
            line = [row for row in rows if (row["collective"], row["world"], row["who"]) == (collective, world, who)]
            sizes, speeds = [row["bytes"] for row in line], [row["busbw"] / 1e9 for row in line]
            panel.plot(sizes, speeds, marker="o", markersize=4, color=colour, label=who)
        panel.set_xscale("log", base=2)
        ticks = sorted({row["bytes"] for row in rows if (row["collective"], row["world"]) == (collective, world)})
        panel.set_xticks(ticks, [format_bytes(size) for size in ticks], rotation=45)
        panel.set_title(f"{collective}, {world} ranks")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("bus bandwidth [GB/s]")
    panels[0].legend(fontsize=8)
    return figure


def predictions(points: list[tuple[str, str, int, float, float]]) -> Figure:
    """Draw measured against predicted times, each network in its own colour."""
    figure = Figure(figsize=(5.4, 4.6), layout="constrained")
    axes = figure.subplots()
    for network in dict.fromkeys(point[0] for point in points):
        own = [point for point in points if point[0] == network]
        axes.scatter([point[3] for point in own], [point[4] for point in own], label=network, s=26, zorder=3)
    ends = [0.9 * min(point[3] for point in points), 1.2 * max(point[4] for point in points)]
    axes.plot(ends, ends, color="0.5", linewidth=1)
    axes.fill_between(
        ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color="0.9", label="within 10 %", zorder=0
    )
    for axis, set_scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        set_scale("log")
        axis.set_major_locator(FixedLocator([0.25, 0.5, 1, 2]))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("predicted by the simulator [s]")
    axes.set_ylabel("measured in the lab [s]")
    axes.legend(fontsize=8)
    return figure


def lab_bars(figures: dict[str, Rows]) -> Figure:
    """Draw the times of all competitors at the largest size of each network."""
    figure = Figure(figsize=(12, 1.4 + 0.24 * max(len(rows) for rows in figures.values())), layout="constrained")
    panels = figure.subplots(1, len(figures))
    for panel, (network, rows) in zip(panels, figures.items(), strict=True):
        largest = max(row["bytes"] for row in rows)
        shown = [row for row in rows if row["bytes"] == largest and row["who"] != "mimatrix arena"]
        colours = [COLOURS.get(row["who"], "#b9d4f5") for row in shown]
        panel.barh([row["who"] for row in shown], [row["median_s"] for row in shown], color=colours)
        for place, row in enumerate(shown):
            if row["predicted_s"]:
                panel.plot([row["predicted_s"]] * 2, [place - 0.4, place + 0.4], color="crimson")
        panel.invert_yaxis()
        panel.tick_params(axis="y", labelsize=7)
        panel.set_title(f"{network.replace(',', chr(10), 1)}\n{format_bytes(largest)} [s], red: predicted", fontsize=8)
    return figure
