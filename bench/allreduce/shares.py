"""Part 6: uneven shards in the lab at three rates, every candidate of the tuner next to what it chose."""

import os
import tempfile
from typing import Any

from bench.allreduce.common import Rows, keep, load_figures
from bench.allreduce.lab import bench_rows, lab

NAME = "shares"
NETWORKS = ("star:3,rate=100Mbit", "star:3,rate=400Mbit", "star:3,rate=400Mbit+200Mbit+100Mbit")
COLLECTIVES = ("reducescatter", "allgather")
ASKED = ("--bytes", "16MiB", "--shares", "0.6,0.25,0.15", "--candidates", "--against", "none", "--seconds", "8")
AUTO = "mimatrix"
LEAST_RATIO = 0.97
"""Of the best candidate's time over that of what the tuner chose."""


def measure(only: str = "") -> None:
    """Measure all networks, or those whose description has a word, each with an empty tuner cache. Writes `shares.json`."""
    figures: dict[str, Rows] = (only and load_figures("shares")) or {}
    for cluster in NETWORKS:
        if only in cluster:
            with lab(cluster, NAME):
                figures[cluster] = [row for collective in COLLECTIVES for row in _measure_fresh(cluster, collective)]
            keep("shares", figures)


def _measure_fresh(cluster: str, collective: str) -> Rows:
    print(f"shares: {cluster}, {collective}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MIMATRIX_CACHE"] = folder
        return bench_rows(NAME, collective, *ASKED)


def candidates_of(rows: Rows) -> Rows:
    """Return the rows of one collective without those for which the tuner chooses."""
    return [row for row in rows if not row["who"].startswith(AUTO)]


def ratio(rows: Rows) -> float:
    """Return the best candidate's time over that of what the tuner chose, of one collective."""
    (auto,) = (row for row in rows if row["who"] == AUTO)
    best_s: float = min(row["median_s"] for row in candidates_of(rows))
    return best_s / float(auto["median_s"])


def by_collective(rows: Rows) -> dict[str, Rows]:
    """Return the rows of each collective."""
    names: list[Any] = [row["collective"] for row in rows]
    return {name: [row for row in rows if row["collective"] == name] for name in dict.fromkeys(names)}
