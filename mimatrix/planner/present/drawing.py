"""Pictures of plans and of measurements."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogFormatter

from mimatrix.core.units import format_seconds
from mimatrix.planner.model.curve import Curve, Floats
from mimatrix.planner.model.plan import Plan
from mimatrix.planner.model.profile import Measurements, Profile
from mimatrix.planner.present.rows import format_micro_steps, format_rate_per_s, trace_step

COLOURS = {"computing": "#2a9d8f", "optimizer": "#264653", "communication": "#e9a23b", "waiting": "#d9d9d9"}
_OTHER = "#52b7aa"
"""The colour of every second micro-step, so that they can be counted."""
_MAX_DEVICES = 64
_MAX_LINES = 10


def draw_plan(plan: Plan, profiles: Sequence[Profile], title: str = "", equal_counts: bool = False) -> Figure:
    """Draw a step as bars, a row for each device: micro-steps, optimizer, communication, waiting.

    Args:
        plan: The plan to draw.
        profiles: The profiles of its parts.
        title: Begins the title of the figure.
        equal_counts: Whether ranks meet in every micro-step.
    """
    shown = min(len(plan.parts), _MAX_DEVICES)
    figure = Figure(figsize=(11, 1.9 + 0.42 * shown), layout="constrained")
    axes = figure.subplots()
    scale, unit = (1e3, "ms") if plan.step_s < 1 else (1.0, "s")
    for row, spans in enumerate(trace_step(plan, profiles, equal_counts)[:shown]):
        computed = 0
        for span in spans:
            colour = COLOURS[span.doing]
            if span.doing == "computing":
                colour, computed = (colour, _OTHER)[computed % 2], computed + 1
            width = (span.ended_s - span.began_s) * scale
            axes.barh(row, width, 0.72, span.began_s * scale, color=colour, edgecolor="white", linewidth=0.4)
    texts = [
        f"{part.name}\n{format_micro_steps(sizes)}" for part, sizes in zip(plan.parts, plan.split.micro, strict=True)
    ]
    axes.set_yticks(range(shown), texts[:shown], fontsize=8)
    axes.set_ylim(shown - 0.4, -0.6)
    axes.set_xlim(0, plan.step_s * scale * 1.01)
    axes.set_xlabel(f"time [{unit}]")
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    axes.legend(handles=handles, ncols=4, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.6 / shown - 0.12))
    moving = "" if plan.communication_known else " without communication"
    more = f", the first {shown} of {len(plan.parts)} devices" if len(plan.parts) > shown else ""
    axes.set_title(
        f"{title}{'. ' if title else ''}A step of {plan.global_batch} samples in stage {plan.stage}: "
        f"{format_seconds(plan.step_s)}{moving}, {format_rate_per_s(plan.samples_per_s)} samples/s, "
        f"{plan.idle:.1%} idle{more}",
        fontsize=10,
        loc="left",
    )
    return figure


def draw_measurements(measurements: Measurements, speeds: Sequence[float] = ()) -> Figure:
    """Draw time, throughput and memory against the batch, for each rank: points as measured, lines as fitted.

    Memory is drawn only if some was measured. `speeds` are those of the ranks if they are emulated.
    """
    lines = list(zip(_labels(measurements, speeds), measurements.profiles, strict=True))[:_MAX_LINES]
    held = max(value for _, profile in lines for _, value in profile.memory.points)
    scale, unit = (1e9, "GB") if held >= 1e9 else (1e6, "MB")
    figure = Figure(figsize=(16 if held else 11, 4.4), layout="constrained")
    times, rates, *memories = figure.subplots(1, 3 if held else 2)
    for index, (label, profile) in enumerate(lines):
        _plot(times, profile.seconds, lambda _, seconds: seconds * 1e3, index, label)
        _plot(rates, profile.seconds, lambda sizes, seconds: sizes / seconds, index, label)
        for axes in memories:
            _plot(axes, profile.memory, lambda _, count: count / scale, index, label)
    for axes in memories:
        _label(axes, f"memory of a micro-batch at its peak [{unit}]")
        axes.set_ylim(bottom=0)
    _label(times, "time forward and backward [ms]")
    _label(rates, "samples/s")
    times.set_yscale("log")
    times.yaxis.set_major_formatter(LogFormatter())
    times.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
    rates.set_ylim(bottom=0)
    rates.legend(fontsize=8)
    figure.suptitle(f"{measurements.model.name}: measured (points) and fitted (lines)", fontsize=11)
    return figure


def _labels(measurements: Measurements, speeds: Sequence[float]) -> list[str]:
    emulated = [f", speed {speed:g}" for speed in speeds] or [""] * len(measurements.profiles)
    ranks = zip(measurements.profiles, emulated, strict=True)
    return [f"rank {rank}: {profile.device}{speed}" for rank, (profile, speed) in enumerate(ranks)]


def _plot(axes: Axes, curve: Curve, shown: Callable[[Floats, Floats], Floats], index: int, label: str) -> None:
    """Plot a curve as a line with its points; `shown` maps (batch sizes, values) to what is drawn."""
    sizes = np.unique(np.geomspace(curve.points[0][0], curve.most, 200).round().astype(int))
    points = np.array(curve.points)
    axes.plot(sizes, shown(sizes, curve.table[sizes]), color=f"C{index}", label=label)
    axes.plot(points[:, 0], shown(points[:, 0], points[:, 1]), "o", color=f"C{index}", markersize=4)


def _label(axes: Axes, what: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("samples of a micro-batch")
    axes.set_ylabel(what)
    axes.grid(alpha=0.3)
