"""Part 10: hosts with several ranks in the lab: windows inside and messages between, next to every flat algorithm."""

import os
import sys
import tempfile
from typing import Any

from bench.allreduce.common import Rows, command, keep, pick
from bench.allreduce.lab import bench_rows, lab

NAME = "levels"
MIB = 1 << 20
NETWORKS = {
    "star:2,rate=1Gbit,devices=2": ("4MiB,64MiB", "0.4,0.3,0.2,0.1"),
    "star:3,rate=400Mbit,devices=2": ("1MiB,16MiB", "0.3,0.2,0.2,0.1,0.1,0.1"),
}
"""Hosts, the sizes of all-reduces, and the shares for a reduce-scatter and an all-gather."""
FLAT = "send_recv ring,send_recv gdraa,send_recv halving_doubling"
AUTO, OURS = "mimatrix", "mixed"
COUNTED = ("mixed two_level/4", "send_recv ring", "send_recv gdraa")
COUNTED_BYTES, REPEATS = 16 * MIB, 5


def measure() -> None:
    """Measure all networks with an empty tuner cache. Writes `two_level.json`."""
    figures: dict[str, Any] = {}
    for cluster, (sizes, parts) in NETWORKS.items():
        with lab(cluster, NAME):
            figures[cluster] = {"rows": _sums(sizes) + _shards(parts), "bytes": _bytes_between(cluster)}
        keep("two_level", figures)


def _sums(sizes: str) -> Rows:
    words = ("--bytes", sizes, "--candidates", "--against", "gloo", "--algorithms", FLAT, "--seconds", "5")
    return _measure_fresh("allreduce", *words)


def _shards(parts: str) -> Rows:
    words = ("--bytes", "8MiB", "--shares", parts, "--candidates", "--against", "none", "--seconds", "5")
    return [row for collective in ("reducescatter", "allgather") for row in _measure_fresh(collective, *words)]


def _measure_fresh(*words: str) -> Rows:
    print(f"two levels: {' '.join(words)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MIMATRIX_CACHE"] = folder
        return bench_rows(NAME, *words)


def _bytes_between(cluster: str) -> dict[str, list[float]]:
    """Return the bytes that one all-reduce sends from the busiest host, by algorithm: simulated, and counted."""
    return {way: [_simulated_bytes(cluster, way, COUNTED_BYTES), _counted_bytes(way, COUNTED_BYTES)] for way in COUNTED}


def _counted_bytes(way: str, size: int) -> float:
    before = _sent()
    inside = [sys.executable, "-m", "bench.allreduce.repeat", way, str(size), str(REPEATS)]
    command("lab", "run", "--name", NAME, "--", *inside, timeout_s=300)
    after = _sent()
    return max(after[name] - before[name] for name in after) / REPEATS


def _sent() -> dict[str, int]:
    """Return what each host has sent."""
    from mimatrix.lab import link_bytes, recall

    return {name: count for name, count in link_bytes(recall(NAME)).items() if name.startswith("n")}


def _simulated_bytes(cluster: str, way: str, size: int) -> float:
    from mimatrix.cluster import Fabric, topology_from_name
    from mimatrix.collectives import Collective, FitOptions, fit

    fabric = Fabric(topology_from_name(cluster))
    algorithm, _, segments = way.split()[1].partition("/")
    schedule = fit(algorithm, fabric, Collective.ALL_REDUCE, FitOptions(segments=int(segments or 1))).schedule
    devices = len(fabric.exits) // len(fabric.cluster.nodes)
    ends, sent = schedule.shares.ends(), [0.0] * len(fabric.cluster.nodes)
    for move in (move for moves in schedule.rounds for move in moves):
        if move.src // devices != move.dst // devices:
            sent[move.src // devices] += float(ends[move.blocks.stop] - ends[move.blocks.start])
    return max(sent) * size


def best(rows: Rows, prefix: str) -> dict[str, Any]:
    """Return the fastest row of an algorithm, for rows of one collective and size."""
    return min((row for row in rows if row["who"].startswith(prefix)), key=lambda row: float(row["median_s"]))


def factors(rows: Rows) -> list[tuple[str, float, float | None]]:
    """Return the name of each flat algorithm, with its time over the best mixed one: measured, and simulated."""
    ours = best(rows, OURS)
    predicted = [row["predicted_s"] for row in rows if row["who"].startswith(OURS) and row["predicted_s"]]
    flat = [row for row in rows if not row["who"].startswith((OURS, AUTO))]
    return [
        (
            row["who"],
            row["median_s"] / ours["median_s"],
            row["predicted_s"] / min(predicted) if row["predicted_s"] and predicted else None,
        )
        for row in flat
    ]


def auto_ratio(rows: Rows) -> float:
    """Return the fastest row's time over that of what the tuner chose, for rows of one collective and size."""
    auto = pick(rows, who=AUTO)
    assert auto
    return float(min(row["median_s"] for row in rows) / auto["median_s"])
