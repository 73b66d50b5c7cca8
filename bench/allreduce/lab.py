"""Part 4: emulated networks, the simulator's prediction beside each figure, and HDRM's bytes on each link."""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.allreduce.common import Rows, command, keep, kept

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
    """A lab that is gone afterwards."""
    command("lab", "up", cluster, "--name", name)
    try:
        yield
    finally:
        command("lab", "down", "--name", name)


def measure(only: str = "") -> None:
    """All networks, and HDRM's bytes; or those whose description has a word. Keeps `lab.json` and `links.json`."""
    os.environ["MIMATRIX_CACHE"] = tempfile.mkdtemp()
    found = kept("lab") if only else {}
    for cluster, (sizes, plans) in NETWORKS.items():
        if only in cluster:
            print(f"lab: {cluster}", flush=True)
            with lab(cluster):
                found[cluster] = _rows(sizes, plans)
    keep("lab", found)
    if not only:
        keep("links", _links())
        keep("remarks", "")


def _rows(sizes: str, plans: str) -> Rows:
    words = ["allreduce", "--bytes", sizes, "--seconds", "8", "--candidates"]
    return bench_rows(NAME, *words, *(["--algorithms", plans] if plans else []))


def bench_rows(name: str, *words: str) -> Rows:
    """What `mimatrix bench WORDS` measures among the ranks of a lab."""
    inside = [sys.executable, "-m", "mimatrix.cli.main", "bench", *words, "--json"]
    said = command("lab", "run", "--name", name, "--", *inside, timeout_s=1200)
    text = "".join(line.split("] ", 1)[1] + "\n" for line in said.splitlines() if line.startswith("[0 "))
    rows: Rows = json.loads(text)
    return rows


def _links() -> dict[str, Any]:
    """Bytes that HDRM sends over each link between switches, beside the simulator's."""
    cluster, size = "bigraph:2x2,rate=200Mbit", 8 * MIB
    with lab(cluster):
        before = _carried()
        inside = [sys.executable, "-m", "bench.allreduce.repeat", "send_recv hdrm", str(size), str(REPEATS)]
        command("lab", "run", "--name", NAME, "--", *inside, timeout_s=300)
        after = _carried()
    measured = {name: (after[name] - before[name]) / REPEATS for name in after}
    trunks = {name: count for name, count in _predicted(cluster, size).items() if name.count("er") == 2}
    return {"bytes": size, "links": {name: [count, measured[name]] for name, count in trunks.items()}}


def _carried() -> dict[str, int]:
    from mimatrix.lab import link_bytes, recall

    return dict(link_bytes(recall(NAME)))


def _predicted(cluster: str, size: int) -> dict[str, float]:
    from mimatrix.cluster import Fabric, named
    from mimatrix.collectives import Collective, fit
    from mimatrix.netsim import replay

    fabric = Fabric(named(cluster))
    fitted = fit("hdrm", fabric, Collective.ALL_REDUCE)
    timeline = replay(fitted.schedule, fabric.cluster, fitted.placement, size, routes=fitted.routes)
    names = [channel.name for channel in fabric.channels]
    return dict(zip(names, (float(count) for count in timeline.channel_bytes), strict=True))


def errors(found: dict[str, Rows]) -> list[tuple[str, str, int, float, float]]:
    """(network, plan, bytes, predicted, measured) of every plan that was predicted."""
    return [
        (cluster, row["who"], row["bytes"], row["predicted_s"], row["median_s"])
        for cluster, rows in found.items()
        for row in rows
        if row["predicted_s"] and row["who"].startswith("send_recv")
    ]


def summary(found: dict[str, Rows]) -> tuple[int, float, float]:
    """How many combinations, and by how much predictions are off: median and worst."""
    off = [abs(measured / predicted - 1) for *_, predicted, measured in errors(found)]
    return len(off), statistics.median(off), max(off)
