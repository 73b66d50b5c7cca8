"""`mimatrix demo`: three workers of different speeds train on digits, evenly and then as planned."""

import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mimatrix.cli.output import check_file, plain_console, print_json, save_picture, say
from mimatrix.cli.train.demo.display import Board, Result, Way, summarize
from mimatrix.cli.train.run import SlowBy
from mimatrix.core.errors import UserError
from mimatrix.core.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPEEDS = (1.0, 0.5, 0.25)
_TIMEOUT_S = 150.0
_PICTURE = Path("out/demo.png")
_COLOURS = {"computing": "#2a9d8f", "moving data": "#e9a23b", "waiting": "#d9d9d9"}


def demo(
    picture: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the picture.")] = _PICTURE,
    epochs: Annotated[int, typer.Option(metavar="N", help="Epochs of each of the two trainings.")] = 15,
    slow_by: SlowBy = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train on three workers of this machine with speeds 1, 0.5 and 0.25: evenly as DDP does, then as planned.

    Trains a small network on scikit-learn's digits. Shows which workers compute and which wait, then a table and a
    picture. It takes one to two minutes and does not need root.

    Example: mimatrix demo --picture demo.png
    """
    if picture == _PICTURE:
        with suppress(OSError):  # a missing directory is reported below
            picture.parent.mkdir(exist_ok=True)
    check_file(picture, (".png", ".svg", ".pdf"))
    if epochs < 2:
        raise UserError(f"{epochs} epochs are too few to measure; use --epochs 2 or more")
    if find_spec("sklearn") is None:
        raise UserError("the demo trains on scikit-learn's digits; install it: pip install scikit-learn")
    found = _train(epochs, slow_by)
    save_picture(_draw(found), picture)
    if as_json:
        print_json(asdict(found) | {"picture": str(picture)})
    else:
        _print(found, picture)


def _train(epochs: int, slow_by: str) -> Result:
    """Train with three workers and return the results. No worker is left running, whatever happens."""
    from mimatrix import launch as launches
    from mimatrix.cli.train.demo.progress import WorkerOutput, show_progress

    board, began_s = Board(len(SPEEDS)), time.monotonic()
    words = launches.module_command("mimatrix.worker.demo", ["--epochs", str(epochs)])
    launch = launches.RunSpec(words, len(SPEEDS), SPEEDS, slow_by=slow_by, threads=1, timeout_s=_TIMEOUT_S)
    launches.validate_run(launch)
    with show_progress(board, SPEEDS) as show:
        show()
        outcome = launches.run_local(launch, os.environ, WorkerOutput(board, show), sys.stderr.buffer, say)
    if outcome.code:
        say(outcome.describe())
        raise typer.Exit(outcome.code)
    return summarize(board, SPEEDS, time.monotonic() - began_s)


def _print(found: Result, picture: Path) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = "Three workers of speed 1, 0.5 and 0.25 train on digits, 512 samples a step"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
    table.add_column("")
    for heading in ("even", "planned"):
        table.add_column(heading, justify="right")
    ways = (found.even, found.planned)
    table.add_row("samples/s", *(f"{way.samples_per_s:.0f}" for way in ways))
    table.add_row("of the ideal", *(f"{way.fraction_of_ideal:.0%}" for way in ways))
    table.add_row("step", *(format_seconds(way.step_s) for way in ways))
    table.add_row("step, predicted", "-", _predicted(found.planned))
    table.add_row("idle", *(f"{way.idle:.1%}" for way in ways))
    table.add_row("accuracy on held-out digits", *(f"{way.accuracy:.1%}" for way in ways))
    for even, planned in zip(found.even.workers, found.planned.workers, strict=True):
        name = f"worker {even.rank} ({even.speed:g}x): batch, waiting"
        table.add_row(name, *(f"{each.batch}, {each.waiting:.0%}" for each in (even, planned)))
    console = plain_console()
    console.print(table)
    console.print(
        f"Planned is {found.speedup:.2f} times as fast as even. Ideal is {found.ideal_samples_per_s:.0f} samples/s: "
        f"what the workers do side by side without exchanging anything."
    )
    console.print(f"Both computed the same: losses differ by at most {found.largest_loss_difference:.1e}.")
    console.print(f"Picture: {picture}")


def _predicted(way: Way) -> str:
    return format_seconds(way.predicted_step_s) if way.predicted_step_s else "-"


def _draw(found: Result) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    bars, rates = figure.subplots(1, 2, gridspec_kw={"width_ratios": [5, 3]})
    _draw_workers(bars, found)
    _draw_rates(rates, found)
    figure.suptitle(
        f"The same training on workers of speed 1, 0.5, 0.25: {found.speedup:.2f} times as fast with a plan, at "
        f"{found.planned.fraction_of_ideal:.0%} of the ideal"
    )
    return figure


def _draw_workers(axes: "Axes", found: Result) -> None:
    ways = {"even": found.even, "planned": found.planned}
    texts: list[tuple[float, str]] = []
    for name, way in ways.items():
        for worker in way.workers:
            row = len(texts) + 0.5 * (name == "planned")
            start = 0.0
            for part, colour in zip((worker.busy, worker.moving, worker.waiting), _COLOURS.values(), strict=True):
                axes.barh(row, part, 0.8, start, color=colour, edgecolor="white")
                start += part
            texts.append((row, f"{name}: speed {worker.speed:g}, batch {worker.batch}"))
    axes.set_yticks([row for row, _ in texts], [text for _, text in texts], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("part of a step")
    for name, colour in _COLOURS.items():
        axes.barh(0, 0, color=colour, label=name)
    axes.legend(ncols=3, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.1))


def _draw_rates(axes: "Axes", found: Result) -> None:
    rates = [found.even.samples_per_s, found.planned.samples_per_s]
    bars = axes.bar(["even", "planned"], rates, 0.6, color=["#8d99ae", "#2a9d8f"])
    axes.bar_label(bars, fmt="%.0f", label_type="center", color="white", fontweight="bold")
    axes.axhline(found.ideal_samples_per_s, color="crimson", linestyle="--", label="ideal")
    axes.set_ylim(0, 1.2 * max(*rates, found.ideal_samples_per_s))
    axes.set_ylabel("samples/s")
    axes.legend(fontsize=8)
