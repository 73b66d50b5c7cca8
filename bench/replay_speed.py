"""How long replays take on one core, and how that grows with ranks: writes docs/measurements/replay_speed.md."""

import os
import time
from dataclasses import dataclass
from statistics import median

from bench.markdown import machine, table, write_page
from mimatrix.cluster import Fabric, topology_from_name
from mimatrix.collectives import Collective, fit
from mimatrix.netsim import Traffic, run

SIZE = 64 << 20
REPEATS = 3
CASES = {
    "hdrm": ["bigraph:8x4", "bigraph:16x8", "bigraph:32x16", "bigraph:32x32", "bigraph:64x32"],
    "gdraa": ["star:64", "star:128", "star:256", "star:512", "star:1024"],
    "ring": ["star:64", "star:256", "star:1024"],
    "halving_doubling": ["fat_tree:8", "fat_tree:12", "fat_tree:16"],
}


@dataclass(frozen=True, slots=True)
class ReplayTiming:
    """The seconds of one replay, by part."""

    build_s: float
    lay_s: float
    run_s: float

    @property
    def total_s(self) -> float:
        """The sum of all parts."""
        return self.build_s + self.lay_s + self.run_s


def time_replay(algorithm: str, cluster: str) -> tuple[ReplayTiming, int, int]:
    """Time one replay, from the name of the cluster to the timeline: timing, ranks, moves."""
    started = time.perf_counter()
    fabric = Fabric(topology_from_name(cluster))
    fitted = fit(algorithm, fabric, Collective.ALL_REDUCE)
    built = time.perf_counter()
    traffic = Traffic.of(fitted.schedule, fabric, fitted.placement, fitted.routes)
    laid = time.perf_counter()
    run(traffic, SIZE)
    ended = time.perf_counter()
    return ReplayTiming(built - started, laid - built, ended - laid), traffic.ranks, len(traffic.src)


def measure(algorithm: str, cluster: str) -> list[str]:
    """Return a row of the page: the median by total time of several repeats, and their spread."""
    found = [time_replay(algorithm, cluster) for _ in range(REPEATS)]
    totals = [timing.total_s for timing, _, _ in found]
    middle, ranks, moves = next(each for each in found if each[0].total_s == median(totals))
    print(f"{algorithm:18} {cluster:14} {ranks:5} ranks {middle.total_s:7.2f} s", flush=True)
    parts = [f"{part:.2f}" for part in (middle.build_s, middle.lay_s, middle.run_s)]
    spread = f"{min(totals):.2f}-{max(totals):.2f}"
    return [algorithm, f"`{cluster}`", str(ranks), f"{moves:,}", *parts, f"**{middle.total_s:.2f}**", spread]


def main() -> None:
    """Measure all cases on one core and write the page."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = [measure(algorithm, cluster) for algorithm, clusters in CASES.items() for cluster in clusters]
    headings = [
        "algorithm",
        "cluster",
        "ranks",
        "moves",
        "build [s]",
        "lay out [s]",
        "replay [s]",
        "total [s]",
        "spread",
    ]
    write_page(
        "replay_speed.md",
        f"""# How long a replay takes

Made by `make bench` on one core ({machine()}); the medians of {REPEATS} runs by total time, and their spread.
An all-reduce of 64 MiB, from the word that names the cluster to the finished timeline. *Build* makes the cluster and the
schedule, *lay out* routes every move, *replay* runs the events.

{table(headings, rows)}
HDRM and everything on a star run in lockstep, so the number of events is small and the time grows with the number of
moves: P log P for HDRM, P² for GDRAA and ring. Where hashes make flows collide (fat-tree under ECMP) almost every
transfer ends at a moment of its own, and each of these events computes the fair rates again: time then grows with events
times flows.
""",
    )


if __name__ == "__main__":
    main()
