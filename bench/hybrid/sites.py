"""`python -m bench.hybrid.sites [--keep]`: two sites of two hosts with 20 Mbit/s between them, emulated (root).

Synchronous training sums every gradient over the slow link; asynchronous groups push over it, each step or every few
steps. All ways train the same net on the same clouds through `mimatrix.init`.
"""

import json
import os
import statistics
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.hybrid.sites_worker import BATCH, GROUPS, GroupRecord, SiteMode, SiteRun, wide
from bench.markdown import MEASUREMENTS, machine, table
from mimatrix.cluster import read_cluster
from mimatrix.collectives import Collective
from mimatrix.core.units import parse_rate
from mimatrix.lab import Lab, down, link_bytes, run, up

WAYS = {
    "synchronous, ring": SiteMode("ring", epochs=4),
    "synchronous, hierarchical": SiteMode("hierarchical", epochs=4),
    "hybrid": SiteMode(policy="large", epochs=7),
    "local steps (10)": SiteMode(policy="local", options={"local_steps": 10}, epochs=8),
    "local steps (10), in rounds (DiLoCo)": SiteMode(
        policy="local", options={"local_steps": 10, "rounds": True}, epochs=8
    ),
}
TARGET = 0.97
"""Of the best accuracy that is possible."""
FOLDER = MEASUREMENTS / "hybrid"
_ACROSS = "20Mbit"
_CLUSTER = f"""
name = "two sites"
switch = [{{ name = "east" }}, {{ name = "west" }}]
node = [{{ name = "e", devices = [{{ kind = "cpu" }}], count = 2 }}, {{ name = "w", devices = [{{ kind = "cpu" }}], count = 2 }}]
link = [
  {{ between = ["e0", "east"], rate = "1Gbit" }},
  {{ between = ["e1", "east"], rate = "1Gbit" }},
  {{ between = ["w0", "west"], rate = "1Gbit" }},
  {{ between = ["w1", "west"], rate = "1Gbit" }},
  {{ between = ["east", "west"], rate = "{_ACROSS}" }},
]
"""
CLUSTER = read_cluster(_CLUSTER)
BETWEEN = ("east->west", "west->east")
SAMPLES = 4000
"""Of an epoch."""
_POINTS, _TURN_S = 40, 120.0
_COLOURS = ("#d8743b", "#8a8a8a", "#7fb2f0", "#1f5fbf", "#3a9d6e")


@dataclass(frozen=True, slots=True)
class SitesResult:
    """The result of a turn. Seconds count from when every group had ended its first step, which tunes collectives."""

    samples: int
    """Of all groups, from start to end."""
    samples_per_s: float
    staleness: float
    """A mean over steps, of the last push of each; 0 where there are none."""
    curve: tuple[tuple[float, int, float], ...]
    """(seconds, samples of all groups, accuracy in percent)."""

    @classmethod
    def of(cls, records: Sequence[GroupRecord]) -> "SitesResult":
        """Return the result of all groups together, for as long as all of them trained."""
        start, end = (pick(record.ends_s[place] for record in records) for pick, place in ((max, 0), (min, -1)))

        def samples(until_s: float) -> int:
            return BATCH * sum(bisect_right(record.ends_s, until_s) for record in records)

        rate = (samples(end) - samples(start)) / (end - start)
        late = [each for record in records for each in record.staleness]
        points = (point for record in records for point in record.curve if point[0] >= start)
        curve = tuple((when - start, samples(when), accuracy) for when, accuracy in points)
        return cls(samples(inf), rate, statistics.mean(late or [0.0]), curve)

    def seconds_to(self, accuracy: float) -> float | None:
        """Return when the accuracy was first reached, or None."""
        return next((seconds for seconds, _, reached in self.curve if reached >= accuracy), None)


def measure(rounds: int = 3, ways: Mapping[str, SiteMode] = WAYS) -> dict[str, Any]:
    """Run every way in every round, in turns: figures of each turn, their medians, and the prediction."""
    from support.hybrid_tasks import clouds

    best = clouds(0).best
    assert best
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as cache, lab() as here:
        for number in range(rounds):
            for name in _rotate(list(ways), number):
                result, carried = _run_turn(here, ways[name], number, Path(cache) / name)
                turns[name].append(_figures_of(result, carried, TARGET * best))
                shown = {key: value for key, value in turns[name][-1].items() if key != "curve"}
                print(f"round {number + 1}: {name} {shown}", flush=True)
    size = gradient_bytes()
    rows = {name: _medians(turns[name]) | {"predicted": predict(way, size)} for name, way in ways.items()}
    asked = {"batch": BATCH, "bytes": size, "across": _ACROSS, "best": best, "target": TARGET * best}
    return {"rounds": rounds, "machine": machine(), **asked, "ways": rows}


@contextmanager
def lab() -> Iterator[Lab]:
    """Run the two sites, and remove them afterwards."""
    name = f"sites{os.getpid()}"
    try:
        yield up(CLUSTER, name)
    finally:
        down(name)


def gradient_bytes() -> int:
    """Return the bytes of the net's gradients."""
    return sum(each.numel() * each.element_size() for each in wide(20, 10).parameters())


def predict(way: SiteMode, size: int) -> dict[str, float]:
    """Return the bytes per sample on the link between the sites, in each direction, and the samples/s that it allows."""
    rate = parse_rate(_ACROSS)
    if way.policy:
        # A push goes out whole: half of it to the other site's shard, half to the mirror of one's own. And as much
        # comes in: the mirror of the other's shard, which is here, and the pull of that shard.
        each = size / (BATCH * way.steps)
        return {"bytes": each, "samples_per_s": rate / each}
    from mimatrix.comm.tuning.choice import AlgorithmChoice
    from mimatrix.comm.tuning.forecast import Forecast
    from mimatrix.comm.tuning.known_cluster import KnownCluster
    from mimatrix.netsim import replay

    schedule = Forecast(KnownCluster(CLUSTER, "this file", is_measured=False), ()).schedule(
        AlgorithmChoice("send_recv", way.algorithm), Collective.ALL_REDUCE
    )
    timeline = replay(schedule, CLUSTER, None, size)
    names = [channel.name for channel in timeline.traffic.fabric.channels]
    most = max(float(timeline.channel_bytes[names.index(name)]) for name in BETWEEN)
    return {"bytes": most / BATCH, "samples_per_s": BATCH / timeline.seconds}


def section(figures: dict[str, Any]) -> str:
    """Return this part of the page."""
    headings = [
        "",
        "samples/s",
        "least to most",
        "the link allows",
        "bytes a sample",
        "predicted",
        f"seconds to {figures['target']:.1f} %",
        "least to most",
        "accuracy at the end [%]",
        "staleness",
    ]
    rows = [_line(name, row) for name, row in figures["ways"].items()]
    return f"""## Two sites
`python -m bench.hybrid.sites --keep`

Two sites of two hosts, 1 Gbit/s inside a site and {figures["across"]}/s between them, made by [the lab](../lab.md): network namespaces with shaped links, one rank on
each host, one thread each. A net of two hidden layers is trained on ten clouds ({figures["bytes"] / 1000:.0f} kB of gradients, a global batch of {figures["batch"]}); the best possible accuracy
is {figures["best"]:.1f} %, and the target is {100 * TARGET:.0f} % of that. Medians of {figures["rounds"]} rounds, in each of which every way had its turn, with a seed of its own. Seconds count
from the end of the first step, in which collectives are tuned; accuracy is that of the first group's parameters, kept while it trains and looked at afterwards. *Bytes a
sample* went over the link between the sites, in the direction that carried more, from start to end; *predicted* for synchronous training by the simulator, for groups by
what a push and a pull are: `gradients / (batch * local steps)`. *The link allows*: the samples/s that follow, nothing computed.

![Accuracy over seconds](hybrid/sites.png)

{table(headings, rows)}{figures.get("note", "")}"""


def picture(figures: dict[str, Any]) -> Any:
    """Draw accuracy over seconds, a line for every round."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for (name, row), colour in zip(figures["ways"].items(), _COLOURS, strict=True):
        for number, turn in enumerate(row["turns"]):
            seconds, _, accuracies = zip(*turn["curve"], strict=True)
            axes.plot(seconds, accuracies, color=colour, linewidth=1.2, label="_" if number else name)
    axes.axhline(figures["best"], color="0.4", linewidth=1, label="best possible")
    axes.axhline(figures["target"], color="0.4", linewidth=1, linestyle="--", label="target")
    axes.set_xlabel("seconds")
    axes.set_ylabel("accuracy [%]")
    axes.set_ylim(bottom=0.6 * figures["best"])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def keep(figures: dict[str, Any]) -> None:
    """Store figures and picture, for the page."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "sites.json").write_text(json.dumps(figures) + "\n")
    picture(figures).savefig(FOLDER / "sites.png", dpi=150)


def main(
    rounds: Annotated[int, typer.Option(help="How often each way has its turn.")] = 3,
    kept: Annotated[bool, typer.Option("--keep", help="Keep the figures and the picture.")] = False,
) -> None:
    """Measure, and print the section."""
    figures = measure(rounds)
    if kept:
        keep(figures)
    print(section(figures))


def _run_turn(here: Lab, way: SiteMode, seed: int, cache: Path) -> tuple[SitesResult, int]:
    """Run one turn; return its result, and the bytes on the link in the direction that carried more."""
    before = link_bytes(here)
    with tempfile.TemporaryDirectory() as folder:
        turn = SiteRun(way, folder, str(cache), seed, _evaluation_interval(way))
        ending = run(here, [sys.executable, "-m", "bench.hybrid.sites_worker", turn.to_text()], timeout_s=_TURN_S)
        if ending.code:
            raise SystemExit(f"{way}: {ending.describe()}")
        records = [GroupRecord(**json.loads(path.read_text())) for path in sorted(Path(folder).glob("*.json"))]
    after = link_bytes(here)
    return SitesResult.of(records), max(after[name] - before[name] for name in BETWEEN)


def _evaluation_interval(way: SiteMode) -> int:
    """Return the steps between two evaluations: after meetings with the other group, and not more often than needed."""
    groups = len(GROUPS) if way.policy else 1
    steps = way.epochs * SAMPLES // (groups * BATCH)
    return way.steps * max(1, steps // _POINTS // way.steps)


def _figures_of(result: SitesResult, carried: int, target: float) -> dict[str, Any]:
    return {
        "samples_per_s": result.samples_per_s,
        "seconds_to_target": result.seconds_to(target),
        "bytes": carried / result.samples,
        "accuracy": result.curve[-1][2],
        "staleness": result.staleness,
        "curve": [(round(seconds, 2), samples, round(accuracy, 2)) for seconds, samples, accuracy in result.curve],
    }


def _medians(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return median, minimum and maximum of each figure; of seconds only if all turns reached the target."""
    figures: dict[str, Any] = {"turns": turns}
    for key in ("samples_per_s", "seconds_to_target", "bytes", "accuracy", "staleness"):
        values = [turn[key] for turn in turns]
        whole = all(value is not None for value in values)
        figures[key] = [statistics.median(values), min(values), max(values)] if whole else None
    return figures


def _line(name: str, row: dict[str, Any]) -> list[str]:
    rate, carried, took, accuracy = (row[key] for key in ("samples_per_s", "bytes", "seconds_to_target", "accuracy"))
    return [
        name,
        f"{rate[0]:.0f}",
        f"{rate[1]:.0f} to {rate[2]:.0f}",
        f"{row['predicted']['samples_per_s']:.0f}",
        f"{carried[0]:.0f}",
        f"{row['predicted']['bytes']:.0f}",
        f"{took[0]:.1f}" if took else "not in all rounds",
        f"{took[1]:.1f} to {took[2]:.1f}" if took else "",
        f"{accuracy[0]:.1f}",
        f"{row['staleness'][0]:.1f}",
    ]


def _rotate(names: list[str], by: int) -> Iterable[str]:
    by %= len(names)
    return names[by:] + names[:by]


if __name__ == "__main__":
    typer.run(main)
