"""Make docs/measurements/allreduce.md: `python -m bench.allreduce [same_host] [ddp] [lab] [lab:WORD] [page]`.

Without a word all is measured. Every part keeps its figures beside the page, so that one of them can be measured anew
alone. The part with the GPU is measured on another machine by `python -m bench.allreduce.gpu docs/measurements/allreduce/gpu.json`.
"""

import statistics
import sys
from typing import Any

from bench.allreduce import lab, pictures, same_host
from bench.allreduce.common import Rows, figure_path, kept, pick
from bench.markdown import machine, table, write_page
from mimatrix.cluster import Fabric, named
from mimatrix.collectives import Collective, fit
from mimatrix.core.units import format_bytes, format_rate, format_seconds
from mimatrix.netsim import lower_bound_seconds

MIB = 1 << 20
PARTS = {"same_host": same_host.measure, "lab": lab.measure}
AGAIN = {"ddp": same_host.measure_ddp, "page": lambda: None}
"""What is a part of another one; or the page alone, from what is kept."""


def main() -> None:
    """Measure what is asked for, then write the page from all that is kept."""
    for name in sys.argv[1:] or PARTS:
        part, _, word = name.partition(":")
        lab.measure(word) if word else (PARTS | AGAIN)[part]()
    sections = [_same_host(kept("same_host")), _backend(kept("same_host"), kept("ddp")), _gpu(kept("gpu"))]
    sections += [_lab(kept("lab")), kept("remarks") or "", _links(kept("links"))]
    write_page(
        "allreduce.md",
        f"""# All-reduce on real links

Medians of interleaved turns in one run, ± half the distance of the quartiles; a turn counts as long as its slowest rank took.
Results are checked in every run (#wrong is 0 everywhere). CPU figures: {machine()}, one thread for each rank.
Made by `make allreduce`; the GPU part by `python -m bench.allreduce.gpu`.

{"".join(sections)}""",
    )


def _same_host(rows: Rows) -> str:
    pictures.bus_bandwidth(rows).savefig(figure_path("same_host.png"), dpi=110)
    body = [
        [f"{row['collective']}, {row['world']} ranks, {format_bytes(row['bytes'])}", *_figures(rows, row)]
        for row in rows
        if row["who"] == "mimatrix arena"
    ]
    return f"""## 1. One host

float32, sum. *Arena*: the tensor lies in a window, as the engine's buffers will, so peers sum straight out of it. *Bound*: all
ranks read and write their own data once at the same time, which no all-reduce can avoid once it is larger than the caches.

{table(["", "Gloo", "Open MPI", "arena", "±", "faster than Gloo", "than MPI", "of the bound"], body)}
![Bus bandwidth on one host](allreduce/same_host.png)

Below a megabyte Open MPI is faster: a call of ours passes through some 50 to 90 µs of Python.

"""


def _figures(rows: Rows, row: dict[str, Any]) -> list[str]:
    same = {key: row[key] for key in ("collective", "world", "bytes")}
    gloo, mpi, bound = (pick(rows, who=who, **same) for who in ("gloo", "mpi", "bound: read and write once"))
    assert gloo
    assert mpi
    assert bound
    ours = row["median_s"]
    return [
        format_seconds(gloo["median_s"]),
        format_seconds(mpi["median_s"]),
        format_seconds(ours),
        format_seconds(row["spread_s"] / 2),
        f"**{gloo['median_s'] / ours:.1f}x**",
        f"**{mpi['median_s'] / ours:.1f}x**",
        f"{bound['median_s'] / ours:.0%}",
    ]


def _backend(rows: Rows, pairs: list[dict[str, Any]]) -> str:
    body = []
    for row in rows:
        if row["who"] == "mimatrix":
            same = {key: row[key] for key in ("collective", "world", "bytes")}
            gloo = pick(rows, who="gloo", **same)
            assert gloo
            ratio = f"**{gloo['median_s'] / row['median_s']:.1f}x**"
            label = f"{row['collective']}, {row['world']} ranks, {format_bytes(row['bytes'])}"
            body.append([label, format_seconds(gloo["median_s"]), format_seconds(row["median_s"]), ratio])
    ratios = sorted(pair["seconds"]["gloo"][1] / pair["seconds"]["mimatrix"][1] for pair in pairs)
    ours, gloo_s = (statistics.median(pair["seconds"][who][1] for pair in pairs) for who in ("mimatrix", "gloo"))
    apart = max(pair["apart"] for pair in pairs)
    counters = ", ".join(f"{name} {count}" for name, count in pairs[0]["counters"].items())
    return f"""## 2. Ordinary tensors, through the backend

Tensors anywhere in memory, staged through slots that stay in cache:

{table(["", "Gloo", "mimatrix", "ratio"], body)}
DDP on 8 linear layers of 1024, batch 16, SGD, 2 ranks, both backends in turns in the same processes, {len(pairs)} pairs of processes one after the other, the median step of
each: a step takes {format_seconds(ours)}, with Gloo {format_seconds(gloo_s)} (medians of the pairs); ratios within a pair **{statistics.median(ratios):.2f}x**
(median; {ratios[0]:.2f} to {ratios[-1]:.2f}). The parameters differ by {apart:.1g} at the most. Counters of one: {counters}.

DDP's buckets lie in ordinary memory, but come again in every step: they are moved into shared memory once, and peers sum straight out of them
([decision 16](../decisions/0016-buckets-are-read-where-they-lie.md)). With one core for each rank they are summed in the backward pass itself, since nothing can
run beside it; with more cores on a thread of their own, as Gloo does it: then both hide most of it, and there is less to gain.

"""


def _gpu(found: dict[str, Any] | None) -> str:
    if not found:
        return "## 3. One GPU, shared\n\nNot measured yet.\n\n"
    facts = found["facts"]
    by_size: dict[int, dict[str, list[Any]]] = {}
    for size, who, *figures in found["rows"]:
        by_size.setdefault(size, {})[who] = figures
    body = [
        [
            format_bytes(size),
            *(format_seconds(who[name][0]) for name in ("gloo", "ordinary", "arena")),
            f"**{who['gloo'][0] / who['arena'][0]:.0f}x**",
            str(sum(each[2] for each in who.values())),
        ]
        for size, who in by_size.items()
    ]
    percent = "/".join(map(str, facts["percent"]))
    return f"""## 3. One GPU, shared by unlike processes

{facts["gpu"]} under CUDA MPS, three processes that hold {percent} % of it, each with its own memory limit; CUDA IPC windows;
torch {facts["torch"]}. Gloo stages GPU tensors through the host. `python -m bench.allreduce.gpu OUT.json`.

{table(["", "Gloo", "ordinary tensors", "arena", "faster than Gloo", "#wrong"], body)}
"""


def _lab(found: dict[str, Rows]) -> str:
    points = lab.errors(found)
    pictures.predictions(points).savefig(figure_path("predictions.png"), dpi=110)
    pictures.lab_bars(found).savefig(figure_path("lab.png"), dpi=110)
    count, middle, worst = lab.summary(found)
    parts = [f"`{network}`:\n\n{_lab_table(network, rows)}\n" for network, rows in found.items()]
    return f"""## 4. Emulated networks

`mimatrix lab` on one machine: namespaces, links shaped to their rates. *mimatrix* is what the tuner chose by itself. *Of the
wire*: the least time that the links allow over the time it took. Predicted is the simulator's figure for the same schedule.

{"".join(parts)}![Times in the lab](allreduce/lab.png)

Over {count} combinations of network, algorithm and size the simulator is off by {middle:.1%} (median) and {worst:.1%} (worst).
What it leaves out is mostly the reading of messages and adding by Python and Gloo, so it is nearly always too low. Rows over
windows (NIXL) are not counted: over plain TCP a read is emulated by messages, which the simulator knows nothing of.

![Predicted and measured](allreduce/predictions.png)

"""


def _least_s(network: str, size: int) -> float:
    """What no all-reduce can beat on these links."""
    fabric = Fabric(named(network))
    schedule = fit("gdraa", fabric, Collective.ALL_REDUCE).schedule
    return lower_bound_seconds(schedule, fabric, None, size)


def _lab_table(network: str, rows: Rows) -> str:
    body = []
    for row in rows:
        if row["who"] == "mimatrix arena":
            continue
        gloo = pick(rows, who="gloo", bytes=row["bytes"])
        assert gloo
        predicted = row["predicted_s"]
        body.append(
            [
                f"{format_bytes(row['bytes'])} {row['who']}",
                format_seconds(row["median_s"]),
                format_seconds(row["spread_s"] / 2),
                format_rate(row["busbw"]),
                f"{gloo['median_s'] / row['median_s']:.2f}x",
                f"{_least_s(network, row['bytes']) / row['median_s']:.0%}",
                format_seconds(predicted) if predicted else "",
                f"{row['median_s'] / predicted - 1:+.1%}" if predicted else "",
            ]
        )
    return table(["", "time", "±", "busbw", "against Gloo", "of the wire", "predicted", "off by"], body)


def _links(found: dict[str, Any]) -> str:
    body = [
        [name, format_bytes(int(predicted)), format_bytes(int(measured)), f"{measured / predicted - 1:+.2%}"]
        for name, (predicted, measured) in found["links"].items()
    ]
    return f"""## 5. HDRM on a BiGraph, link by link

8 endpoints, all-reduce of {format_bytes(found["bytes"])}: bytes that one all-reduce sends over each link between switches, by the
interface's own counter (headers and acknowledgements included) and by the simulator.

{table(["", "simulated", "counted", "off by"], body)}"""


if __name__ == "__main__":
    main()
