"""Part 1, MiMatrix: time and synchronisations of GDRAA, ring, halving-doubling and a parameter server on one switch."""

from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from bench.markdown import table
from bench.simulation_study.common import GB, KB, MB, lay_out, save, seconds
from mimatrix.core.units import format_bytes, format_seconds

ALGORITHMS = ("gdraa", "ring", "halving_doubling", "parameter_server")
RANKS = tuple(2**power for power in range(1, 11))
SIZES = (KB, 10 * KB, 100 * KB, MB, 10 * MB, 100 * MB, GB)
Times = dict[tuple[str, int, int], float]


def section() -> str:
    """Return the part's text, and write its pictures."""
    times: Times = {}
    rounds: dict[tuple[str, int], int] = {}
    for name in ALGORITHMS:
        for ranks in RANKS:
            print(f"scaling: {name}, {ranks} ranks", flush=True)
            fitted, _ = lay_out(name, f"star:{ranks}")
            rounds[name, ranks] = len(fitted.schedule.rounds)
            times |= {(name, ranks, size): seconds(name, f"star:{ranks}", size) for size in SIZES}
    curves, map_ = save(_curves(times, rounds), "scaling.png"), save(_advantage(times), "advantage.png")
    shown = [(name, size) for size in (KB, MB, GB) for name in ALGORITHMS]
    body = [
        [f"{format_bytes(size)} {name}", *(format_seconds(times[name, ranks, size]) for ranks in (2, 16, 128, 1024))]
        for name, size in shown
    ]
    counts = [[name, *(str(rounds[name, ranks]) for ranks in RANKS)] for name in ALGORITHMS]
    small = times["ring", 1024, KB] / times["gdraa", 1024, KB]
    halving = times["halving_doubling", 1024, KB] / times["gdraa", 1024, KB]
    server = times["parameter_server", 1024, GB] / times["gdraa", 1024, GB]
    return f"""## 1. MiMatrix: how many synchronisations, and what they cost

One switch, 100 Gbit links of 1 µs each, 5 µs for every synchronisation, 2 to 1,024 ranks, 1 KB to 1 GB.
GDRAA here is our reconstruction (docs/decisions/0003): the paper states two synchronisations and O(1) handshakes and
prints no times, so there is nothing of theirs to compare with.

Synchronisations:

{table(["", *map(str, RANKS)], counts)}
{curves}
Times by number of ranks:

{table(["", "2", "16", "128", "1024"], body)}
What the others take, as a multiple of GDRAA's time:

{map_}
- At 1 KB and 1,024 ranks GDRAA is {small:.0f} times as fast as a ring and {halving:.1f} times as fast as halving-doubling:
  all that counts there is the number of synchronisations, and the simulator charges nothing for posting 1,023 reads of
  a byte each. A real NIC does, so for small messages among many ranks the figure is a bound and no forecast.
- At 1 GB all three that spread the blocks are alike (they move the same bytes), and the parameter server is
  {server:.0f} times slower: its one link carries everything.

"""


def _curves(times: Times, rounds: dict[tuple[str, int], int]) -> Figure:
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    panels = figure.subplots(1, 4)
    for name in ALGORITHMS:
        # Dashed where two lines lie on one another: the parameter server has two synchronisations as well.
        line = "--" if name == "parameter_server" else "-"
        counts = [rounds[name, ranks] for ranks in RANKS]
        panels[0].plot(RANKS, counts, line, marker="o", markersize=3, label=name)
        for panel, size in zip(panels[1:], (KB, MB, GB), strict=True):
            panel.plot(RANKS, [times[name, ranks, size] * 1e3 for ranks in RANKS], marker="o", markersize=3)
            panel.set_title(f"time for {format_bytes(size)} [ms]")
    panels[0].set_title("synchronisations")
    panels[0].legend()
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("ranks")
        panel.grid(alpha=0.3)
    return figure


def _advantage(times: Times) -> Figure:
    """Return how many times longer the others take than GDRAA, for every number of ranks and size."""
    others = [name for name in ALGORITHMS if name != "gdraa"]
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    panels = figure.subplots(1, len(others), sharey=True)
    for panel, name in zip(panels, others, strict=True):
        grid = [[times[name, ranks, size] / times["gdraa", ranks, size] for ranks in RANKS] for size in SIZES]
        image = panel.imshow(grid, cmap="YlOrRd", norm=LogNorm(1, 1000), aspect="auto")
        for row, line in enumerate(grid):
            for column, ratio in enumerate(line):
                colour = "white" if ratio > 100 else "black"
                text = f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.3g}"
                panel.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
        panel.set_xticks(range(len(RANKS)), [str(ranks) for ranks in RANKS])
        panel.set_yticks(range(len(SIZES)), [format_bytes(size) for size in SIZES])
        panel.set_xlabel("ranks")
        panel.set_title(f"time of {name} / time of gdraa", fontsize=10)
    figure.colorbar(image, ax=panels, pad=0.01)
    return figure
