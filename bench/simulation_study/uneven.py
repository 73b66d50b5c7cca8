"""Part 3: equal shares against shares by bandwidth on NICs of unlike rates."""

from typing import Any

from matplotlib.figure import Figure

from bench.markdown import table
from bench.simulation_study.common import MB, save, seconds
from mimatrix.cluster import Fabric, topology_from_name
from mimatrix.collectives import FitOptions, nic_rates, shares_by_bandwidth

SIZE = 64 * MB
SLOW_GBIT = 10
RATIOS = (1, 2, 4, 8, 16)
MIXES = ((2, 2), (4, 4), (6, 2), (1, 7))
SEGMENTS = 16
WAYS = {
    "ring": ("ring", FitOptions()),
    "equal, 1 segment": ("gdraa", FitOptions()),
    f"equal, {SEGMENTS} segments": ("gdraa", FitOptions(segments=SEGMENTS)),
    f"by bandwidth, {SEGMENTS} segments": ("gdraa", FitOptions(segments=SEGMENTS, shares="bandwidth")),
}


def section() -> str:
    """Return the part's text, and write its picture."""
    parts, lines = [], {}
    for fast, slow in MIXES:
        print(f"uneven: {fast} fast, {slow} slow", flush=True)
        lines[fast, slow] = _mix(fast, slow)
        parts.append(f"{fast} fast and {slow} slow NICs:\n\n{_rows(lines[fast, slow])}")
    picture = save(_draw(lines), "uneven.png")
    ours = lines[2, 2][f"by bandwidth, {SEGMENTS} segments"][RATIOS.index(4)]
    gain = lines[2, 2]["ring"][RATIOS.index(4)] / ours
    return f"""## 3. Uneven networks: shares by bandwidth

One switch; slow NICs of {SLOW_GBIT} Gbit and fast ones 1 to 16 times as fast; 64 MB. Times as multiples of S / slow rate, which
nothing can beat: the slow NIC must send its own gradient and receive the sum. *Predicted* is the linear programme's own
figure for the shares it chose, *bound* the least that any algorithm needs.

{"".join(parts)}
{picture}
- Two fast and two slow NICs at 4:1: {ours:.3f} of the bound's time, {gain:.2f} times as fast as a ring. The rest, 1/{SEGMENTS}, is
  the pipeline's first and last round, in which the slow NIC works in one direction only.
- With one segment nothing is gained: in two bare rounds the slow NIC first only sends, then only receives.
- The programme's figure is not always reached: it counts bytes on each NIC and assumes that each is busy in both directions
  to the end of a round. With one fast NIC among seven slow ones (2:1 and 4:1) the many small reads between the slow
  ranks take an equal share of each slow link next to the one large read of the fast rank, which comes too late to fill
  its own NIC; a ring is then better. At 2:1 the same costs six fast and two slow NICs, and four and four, a part of their
  gain. So a planner has to ask the simulator and not only the programme.
"""


def _mix(fast: int, slow: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {label: [] for label in (*WAYS, "predicted", "bound")}
    for ratio in RATIOS:
        cluster = f"star:{fast + slow},rate={fast}*{SLOW_GBIT * ratio}Gbit+{slow}*{SLOW_GBIT}Gbit"
        rates = nic_rates(Fabric(topology_from_name(cluster)), range(fast + slow))
        unit = SIZE / rates.min()
        for label, (name, wishes) in WAYS.items():
            found[label].append(seconds(name, cluster, SIZE, wishes) / unit)
        predicted = shares_by_bandwidth([float(rate) for rate in rates], SEGMENTS).seconds_per_byte
        found["predicted"].append(predicted * rates.min())
        found["bound"].append(float(max(1.0, 2 * (len(rates) - 1) * rates.min() / rates.sum())))
    return found


def _rows(found: dict[str, list[float]]) -> str:
    rows = [[label, *(f"{value:.3f}" for value in line)] for label, line in found.items()]
    return table(["fast : slow", *(f"{ratio}:1" for ratio in RATIOS)], rows) + "\n"


def _draw(lines: dict[tuple[int, int], dict[str, list[float]]]) -> Figure:
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    panels = figure.subplots(1, len(lines), sharey=True)
    styles: dict[str, dict[str, Any]] = {
        "ring": {"linewidth": 5, "alpha": 0.35},
        "predicted": {"linestyle": "--", "color": "0.4"},
        "bound": {"linestyle": ":", "color": "crimson"},
    }
    for panel, ((fast, slow), found) in zip(panels, lines.items(), strict=True):
        for label, line in found.items():
            style = styles.get(label, {"marker": "o", "markersize": 4})
            panel.plot(RATIOS, line, label=label, **style)
        panel.set_xscale("log", base=2)
        panel.set_xticks(RATIOS, [f"{ratio}:1" for ratio in RATIOS])
        panel.set_title(f"{fast} fast, {slow} slow")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("time / (S / slow rate)")
    panels[0].legend(fontsize=8)
    return figure
