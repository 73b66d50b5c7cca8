"""The pictures of docs/measurements/heterogeneous.md."""

from typing import Any

from matplotlib.figure import Figure

from bench.heterogeneous.rounds import IDEAL, OURS, Rows

OURS_COLOUR, EVEN_COLOUR, PEER_COLOUR = "#1f5fbf", "#7fb2f0", "#d8743b"


def fraction_bars(rows: Rows) -> Figure:
    """Draw the fraction of the ideal that each reached, a panel for each set of speeds; the spread as a line."""
    settings = list(dict.fromkeys(row["speeds"] for row in rows))
    figure = Figure(figsize=(5.2 * len(settings), 3.9), layout="constrained")
    panels = figure.subplots(1, len(settings), sharey=True, squeeze=False)[0]
    for panel, speeds in zip(panels, settings, strict=True):
        shown = [row for row in rows if row["speeds"] == speeds and row["who"] != IDEAL and row["rounds"]]
        _bars(panel, shown)
        panel.axvline(1, color="0.4", linewidth=1, linestyle="--")
        panel.set_xlim(0, 1.12)
        panel.set_title(f"speeds {speeds.replace(',', ', ')}")
        panel.set_xlabel("fraction of the ideal")
        panel.grid(axis="x", alpha=0.3)
        panel.invert_yaxis()
    return figure


def drift_line(figures: dict[str, Any]) -> Figure:
    """Draw samples per second of every step, with the drop, the recovery and the ideals before and after."""
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.subplots()
    rates = figures["samples_per_s"]
    axes.plot(range(len(rates)), rates, marker="o", markersize=3, color=OURS_COLOUR, label="MiMatrix")
    drop, back = figures["dropped_at"], figures["recovered_at"]
    for first, last, key in ((0, drop, "ideal_before"), (drop, len(rates) - 1, "ideal_after")):
        axes.hlines(figures[key], first, last, color="0.4", linestyle="--", label="ideal" if first == 0 else "_")
    axes.axvline(drop, color="crimson", linewidth=1, label=f"drop, step {drop}")
    if back is not None:
        axes.axvline(back, color="#3a9a4a", linewidth=1, label=f"back at 0.9 of the ideal, step {back}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel("samples/s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def _bars(panel: Any, shown: Rows) -> None:
    values = [row["fraction_of_ideal"] for row in shown]
    ends = [row["fraction_spread"] for row in shown]
    errors = [
        [value - low for value, (low, _) in zip(values, ends, strict=True)],
        [high - value for value, (_, high) in zip(values, ends, strict=True)],
    ]
    colours = {OURS: OURS_COLOUR, "mimatrix even": EVEN_COLOUR}
    panel.barh(
        [row["who"] for row in shown],
        values,
        xerr=errors,
        color=[colours.get(row["who"], PEER_COLOUR) for row in shown],
        error_kw={"elinewidth": 1, "capsize": 2},
    )
    for place, value in enumerate(values):
        panel.text(0.02, place, f"{value:.2f}", va="center", fontsize=8, color="white")
