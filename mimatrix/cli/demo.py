"""`mimatrix demo`: one table and one picture on why topology and algorithm matter."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mimatrix.cli.screen import check_file, plain_console, print_json, save_picture
from mimatrix.core.errors import UnsuitedError
from mimatrix.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.text import Text

_LARGE, _SMALL = 64 << 20, 64 << 10
_SYNC_S = 5e-6
_SCENES = {
    "one\nswitch": ("star:32", _LARGE),
    "racks\n4:1": ("leaf_spine:4x8,oversubscription=4", _LARGE),
    "racks\nECMP": ("leaf_spine:4x8", _LARGE),
    "BiGraph": ("bigraph:4x4", _LARGE),
    "8 share\na NIC": ("star:4,devices=8", _LARGE),
    "NIC per\nGPU": ("star:4,devices=8,nic=own", _LARGE),
    "one\nswitch,\n64KiB": ("star:32", _SMALL),
}
_ALGORITHMS = ("parameter_server", "ring", "halving_doubling", "gdraa", "hierarchical", "hdrm")
_UNEVEN = "star:4,rate=2*40Gbit+2*10Gbit"


@dataclass(frozen=True, slots=True)
class _Cell:
    """One replay of the demo."""

    scene: str
    cluster: str
    bytes: int
    algorithm: str
    seconds: float
    rounds: int
    lower_bound_seconds: float


def demo(
    picture: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("mimatrix-demo.png"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Sum gradients over 32 GPUs: six networks, six algorithms, one table and one picture."""
    check_file(picture, (".png", ".svg", ".pdf"))
    cells = _replay_all()
    uneven = _uneven_seconds()
    save_picture(_drawn(cells), picture)
    if as_json:
        print_json({"cells": [asdict(cell) for cell in cells], "uneven": uneven, "picture": str(picture)})
    else:
        _print(cells, uneven, picture)


def _replay_all() -> list[_Cell]:
    from rich.console import Console
    from rich.progress import track

    from mimatrix.cluster import Fabric, named
    from mimatrix.collectives import Collective, Wishes
    from mimatrix.netsim import Costs, simulate

    fabrics = {word: Fabric(named(word)) for word, _ in _SCENES.values()}
    cells = []
    todo = [(scene, name) for scene in _SCENES for name in _ALGORITHMS]
    for scene, name in track(todo, "simulating", console=Console(stderr=True), transient=True):
        word, size = _SCENES[scene]
        try:
            found, _ = simulate(name, fabrics[word], Collective.ALL_REDUCE, size, Wishes(), Costs(_SYNC_S))
        except UnsuitedError:
            continue  # HDRM is for BiGraph and leaf-spine networks only.
        cells.append(_Cell(scene, word, size, name, found.seconds, found.rounds, found.lower_bound_seconds))
    return cells


def _uneven_seconds() -> dict[str, float]:
    """Two NICs of 40 Gbit and two of 10: a ring, equal shares, shares by bandwidth."""
    from mimatrix.cluster import Fabric, named
    from mimatrix.collectives import Collective, Wishes
    from mimatrix.netsim import Costs, simulate

    asked = {
        "ring": ("ring", Wishes()),
        "gdraa, equal shares": ("gdraa", Wishes(segments=16)),
        "gdraa, shares by bandwidth": ("gdraa", Wishes(segments=16, shares="bandwidth")),
    }
    fabric = Fabric(named(_UNEVEN))
    return {
        label: simulate(name, fabric, Collective.ALL_REDUCE, _LARGE, wishes, Costs(_SYNC_S))[0].seconds
        for label, (name, wishes) in asked.items()
    }


def _print(cells: list[_Cell], uneven: dict[str, float], picture: Path) -> None:
    from rich.table import Table

    console = plain_console()
    title = f"Sum {format_bytes(_LARGE)} of gradients over 32 GPUs with 100 Gbit links (simulated)"
    table = Table(title=title, title_justify="left", padding=(0, 0), pad_edge=False)
    table.add_column("")
    for scene in _SCENES:
        table.add_column(scene, justify="right")
    best = {scene: min(cell.seconds for cell in cells if cell.scene == scene) for scene in _SCENES}
    times = {(cell.algorithm, cell.scene): _marked(cell.seconds, best[cell.scene]) for cell in cells}
    for name in _ALGORITHMS:
        table.add_row(name, *(times.get((name, scene), "-") for scene in _SCENES))
    bounds = {cell.scene: cell.lower_bound_seconds for cell in cells}
    table.add_section()
    table.add_row("no one can beat", *(format_seconds(bounds[scene]) for scene in _SCENES))
    console.print(table)
    rounds = {cell.algorithm: cell.rounds for cell in reversed(cells)}
    rounds |= {cell.algorithm: cell.rounds for cell in cells if cell.cluster == "star:32"}
    console.print("Synchronisations: " + ", ".join(f"{name} {rounds[name]}" for name in _ALGORITHMS) + ".")
    ways = ", ".join(f"{label} {format_seconds(value)}" for label, value in uneven.items())
    console.print(f"Uneven NICs, two of 40 Gbit and two of 10: {ways}.")
    console.print(f"Picture: {picture}")


def _marked(seconds: float, best: float) -> "Text":
    from rich.text import Text

    return Text(format_seconds(seconds), style="bold green" if seconds <= best * 1.005 else "")


def _drawn(cells: list[_Cell]) -> "Figure":
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    axes = figure.subplots()
    scenes = list(_SCENES)
    width = 0.84 / len(_ALGORITHMS)
    for index, name in enumerate(_ALGORITHMS):
        found = {cell.scene: cell.seconds / cell.lower_bound_seconds for cell in cells if cell.algorithm == name}
        places = [scenes.index(scene) + (index - len(_ALGORITHMS) / 2 + 0.5) * width for scene in found]
        colour = colormaps["viridis"](index / (len(_ALGORITHMS) - 1))
        bars = axes.bar(places, list(found.values()), width, label=name, color=colour, edgecolor="white")
        axes.bar_label(bars, fmt="%.3g", fontsize=7, padding=1)
    axes.axvline(len(scenes) - 1.5, color="0.6", linestyle=":")
    axes.axhline(1.0, color="crimson", linewidth=1.5, label="no algorithm can beat")
    axes.set_yscale("log")
    axes.set_ylim(0.9, 120)
    axes.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.set_ylabel("time / least possible time")
    axes.set_xticks(np.arange(len(scenes)), scenes)
    axes.set_title(f"Summing {format_bytes(_LARGE)} over 32 GPUs: the network and the algorithm decide (simulated)")
    axes.legend(ncols=7, fontsize=8, loc="upper center")
    return figure
