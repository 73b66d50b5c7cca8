"""Part 4: emulated networks, the simulator's prediction next to each figure, and HDRM's bytes on each link."""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.allreduce.common import Rows, command, keep, load_figures

MIB = 1 << 20
NAME = "bench"
NETWORKS = {
    "star:4,rate=400Mbit": ("16MiB", ""),
    "star:4,rate=2*400Mbit+2*100Mbit": ("16MiB", "send_recv ring,send_recv gdraa"),
    "bigraph:2x2,rate=200Mbit": (
        "4MiB,16MiB",
        "send_recv hdrm,send_recv ring,send_recv halving_doubling,send_recv gdraa,send_recv gdraa/4",
    ),
    "leaf_spine:2x2,rate=200Mbit,oversubscription=2": (
        "4MiB,16MiB",
        "send_recv ring,send_recv halving_doubling,send_recv gdraa,send_recv hierarchical",
    ),
}
REPEATS = 10


@contextmanager
def lab(cluster: str, name: str = NAME) -> Iterator[None]:
    """Run a lab, and remove it afterwards."""
    command("lab", "up", cluster, "--name", name)
    try:
        yield
    finally:
        command("lab", "down", "--name", name)


def measure(only: str = "") -> None:
    """Measure all networks and HDRM's bytes, or the networks whose description has a word. Writes `lab.json`, `links.json`."""
    os.environ["MIMATRIX_CACHE"] = tempfile.mkdtemp()
    figures = load_figures("lab") if only else {}
    for cluster, (sizes, plans) in NETWORKS.items():
        if only in cluster:
            print(f"lab: {cluster}", flush=True)
            with lab(cluster):
                figures[cluster] = _rows(sizes, plans)
    keep("lab", figures)
    if not only:
        keep("links", _links())
        keep("remarks", "")


def _rows(sizes: str, plans: str) -> Rows:
    words = ["allreduce", "--bytes", sizes, "--seconds", "8", "--candidates"]
    return bench_rows(NAME, *words, *(["--algorithms", plans] if plans else []))


def bench_rows(name: str, *words: str) -> Rows:
    """Return what `mimatrix bench WORDS` measures among the ranks of a lab."""
    inside = [sys.executable, "-m", "mimatrix.cli.main", "bench", *words, "--json"]
    said = command("lab", "run", "--name", name, "--", *inside, timeout_s=1200)
    text = "".join(line.split("] ", 1)[1] + "\n" for line in said.splitlines() if line.startswith("[0 "))
    rows: Rows = json.loads(text)
    return rows


def _links() -> dict[str, Any]:
    """Return the bytes that HDRM sends over each link between switches: simulated, and measured."""
    cluster, size = "bigraph:2x2,rate=200Mbit", 8 * MIB
    with lab(cluster):
        before = _link_bytes()
        inside = [sys.executable, "-m", "bench.allreduce.repeat", "send_recv hdrm", str(size), str(REPEATS)]
        command("lab", "run", "--name", NAME, "--", *inside, timeout_s=300)
        after = _link_bytes()
    measured = {name: (after[name] - before[name]) / REPEATS for name in after}
    trunks = {name: count for name, count in _predict(cluster, size).items() if name.count("er") == 2}
    return {"bytes": size, "links": {name: [count, measured[name]] for name, count in trunks.items()}}


def _link_bytes() -> dict[str, int]:
    from mimatrix.lab import link_bytes, recall

    return dict(link_bytes(recall(NAME)))


def _predict(cluster: str, size: int) -> dict[str, float]:
    from mimatrix.cluster import Fabric, topology_from_name
    from mimatrix.collectives import Collective, fit
    from mimatrix.netsim import replay

    fabric = Fabric(topology_from_name(cluster))
    fitted = fit("hdrm", fabric, Collective.ALL_REDUCE)
    timeline = replay(fitted.schedule, fabric.cluster, fitted.placement, size, routes=fitted.routes)
    names = [channel.name for channel in fabric.channels]
    return dict(zip(names, (float(count) for count in timeline.channel_bytes), strict=True))


def errors(figures: dict[str, Rows]) -> list[tuple[str, str, int, float, float]]:
    """Return (network, plan, bytes, predicted, measured) of every plan that was predicted."""
    return [
        (cluster, row["who"], row["bytes"], row["predicted_s"], row["median_s"])
        for cluster, rows in figures.items()
        for row in rows
        if row["predicted_s"] and row["who"].startswith("send_recv")
    ]


def summary(figures: dict[str, Rows]) -> tuple[int, float, float]:
    """Return the number of combinations, and the median and worst error of the predictions."""
    off = [abs(measured / predicted - 1) for *_, predicted, measured in errors(figures)]
    return len(off), statistics.median(off), max(off)
