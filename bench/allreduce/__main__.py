"""Make docs/measurements/allreduce.md: `python -m bench.allreduce [same_host] [ddp] [lab] [lab:WORD] [shares] [shares:WORD] [two_level] [page]`.

Without a word all parts are measured. Every part stores its figures next to the page, so that it can be measured again
alone. The parts with a GPU are measured on another machine: `python -m bench.allreduce.gpu docs/measurements/allreduce/gpu.json`,
`python -m bench.allreduce.gpu_hosts docs/measurements/allreduce/gpu_hosts.json`, `python -m bench.allreduce.gpu_ranks docs/measurements/allreduce`.
"""

import statistics
import sys
from typing import Any

from bench.allreduce import lab, pictures, same_host, shares, two_level
from bench.allreduce.common import Rows, figure_path, load_figures, pick
from bench.allreduce.gpu_hosts import CONTROL
from bench.markdown import machine, table, write_page
from mimatrix.cluster import Fabric, topology_from_name
from mimatrix.collectives import Collective, fit
from mimatrix.core.units import format_bytes, format_rate, format_seconds
from mimatrix.netsim import lower_bound_seconds

MIB = 1 << 20
PARTS = {
    "same_host": same_host.measure,
    "lab": lab.measure,
    "shares": shares.measure,
    "two_level": two_level.measure,
}
SOME = {"lab": lab.measure, "shares": shares.measure}
"""Parts that can be measured on some networks only."""
AGAIN = {"ddp": same_host.measure_ddp, "page": lambda: None}
"""What is a part of another one; or the page alone, from what is kept."""


def main() -> None:
    """Measure the given parts, then write the page from all stored figures."""
    for name in sys.argv[1:] or PARTS:
        part, _, word = name.partition(":")
        SOME[part](word) if word else (PARTS | AGAIN)[part]()
    sections = [
        _same_host(load_figures("same_host")),
        _backend(load_figures("same_host"), load_figures("ddp")),
        _gpu(load_figures("gpu")),
    ]
    sections += [
        _lab(load_figures("lab")),
        load_figures("remarks") or "",
        _links(load_figures("links")),
        _shares(load_figures("shares")),
    ]
    sections += [
        _gpu_hosts(load_figures("gpu_hosts")),
        _gpu_ranks(load_figures("gpu_ranks")),
        _gpu_kills(load_figures("gpu_kills")),
    ]
    sections += [_two_level(load_figures("two_level"))]
    write_page(
        "allreduce.md",
        f"""# All-reduce on real links

Medians of interleaved turns in one run, ± half the distance of the quartiles; a turn counts as long as its slowest rank took.
Results are checked in every run (#wrong is 0 everywhere). CPU figures: {machine()}, one thread for each rank.
Made by `make allreduce`; the GPU parts by the commands given there.

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
run next to it; with more cores on a thread of their own, as Gloo does it: then both hide most of it, and there is less to gain.

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


def _gpu_hosts(found: dict[str, Any] | None) -> str:
    if not found:
        return ""
    facts = found["facts"]
    by_what: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        by_what.setdefault(row["what"], []).append(row)
    body = []
    for what, rows in by_what.items():
        best_s = min(row["median_s"] for row in rows if row["who"].startswith("NCCL"))
        for row in rows:
            times = [format_seconds(row["median_s"]), format_seconds(row["spread_s"])]
            ratio = f"{row['median_s'] / best_s:.2f}x"
            ours = row["who"].startswith("mimatrix")
            body.append([what, row["who"], *times, f"**{ratio}**" if ours else ratio if row["who"] == CONTROL else ""])
    counters = ", ".join(f"{name} {count}" for name, count in found["counters"].items())
    return f"""## 7. Three hosts of unlike GPUs

Sections 7 to 9 are of the code before the last changes to how calls are launched, and are to be measured again.

{facts["gpu"]}: three parts of it ({facts["parts"]}) play three hosts, torch {facts["torch"]}, NCCL {found["nccl"]} over sockets. Ours and NCCL itself take
turns in the same processes, in random order; the last column is our time over that of NCCL's fastest way. Shares 0.6/0.25/0.15. The models of
DDP and FSDP2 have 16.8 million parameters and next to nothing to compute: a step is communication. `python -m bench.allreduce.gpu_hosts OUT.json`.

{table(["", "who", "time", "±", "of NCCL's best"], body)}
#wrong: {found["wrong"]}. After all steps the parameters of DDP are apart from those over NCCL by {found["apart"]["DDP"]:.1g}, of FSDP2 by {found["apart"]["FSDP2"]:.1g}.
Counters of our backend: {counters}. Between one run and the next NCCL itself differs by a quarter; compare within a row group only.

"""


def _gpu_ranks(found: dict[str, Any] | None) -> str:
    if not found:
        return ""
    body = []
    for name, case in found.items():
        carried = {counter.partition(" ")[2] for counter in case.get("counters", {})}
        gpu = sorted(each for each in carried if any(word in each for word in ("nccl", "cuda", "host", "staged")))
        apart = f"{max(case['apart'].values()):.1e}" if "apart" in case else ""
        plan = case.get("profile")
        chosen = f"stage {plan['stage']}, batches {'+'.join(map(str, plan['batches']))}" if plan else ""
        body.append([name, case["result"], apart, ", ".join(gpu), chosen])
    return f"""## 8. Exact on every layout of hosts

Parts of 60, 25 and 10 % of an NVIDIA H200, float64, batches 5+2+1 in micro-batches of 2, 1 and 1, shares 0.6/0.3/0.1 (two ranks: 5+2, 0.7/0.3), a perceptron, a
transformer and a residual net with batch norm, five steps with AdamW or momentum, clipping and a schedule, stages 0 to 3, against a plain loop on one
device. *Apart*: the largest difference of any parameter on any rank. *Carried by*: what carried the tensors of GPUs, by the counters.
*Plan*: what `plan="profile"` chose for a tiny model afterwards. `python -m bench.allreduce.gpu_ranks FOLDER`, or `pytest tests/engine/test_engine_gpu.py`.

{table(["", "result", "apart", "carried by", "plan"], body)}
"""


def _gpu_kills(found: dict[str, Any] | None) -> str:
    if not found:
        return ""
    body = [
        [each["way"], format_seconds(max(each["after_s"])), " and ".join(map(str, each["codes"])), each["texts"][0]]
        for each in found["tries"]
    ]
    return f"""## 9. A rank that is killed while NCCL runs

Three parts that play three hosts; rank 2 kills itself (SIGKILL) while the others wait for it in a bare all-reduce (*between*), in a step of stage 3 (*training*), or
while its own kernels run (*inside*), which under CUDA MPS is a fault of every process on the GPU. The time is that of the slowest of the others.
GPU memory afterwards: {found["memory"]}, no process left. `pytest tests/comm/test_gpu_lost_ranks.py`. {found.get("remark", "")}

{table(["way", "others raise after", "exit codes of the others", "what the first says"], body)}
"""


def _two_level(found: dict[str, Any] | None) -> str:
    if not found:
        return ""
    parts = [f"`{network}`:\n\n{_two_level_table(each['rows'])}\n" for network, each in found.items()]
    counted = [
        [
            f"`{network}`, {way}",
            format_bytes(int(simulated)),
            format_bytes(int(bytes_sent)),
            f"{bytes_sent / simulated - 1:+.1%}",
        ]
        for network, each in found.items()
        for way, (simulated, bytes_sent) in each["bytes"].items()
    ]
    return f"""## 10. Hosts with several ranks

In the lab, ranks of a host share its memory and its NIC. *mixed two_level* reads windows inside a host and sends between hosts; *mimatrix* is what the tuner
chose by itself, in a job that had measured nothing before. *Slower than mixed*: its time over that of the fastest mixed way, and
the same of the simulator's times. `python -m bench.allreduce two_level` (root).

{"".join(parts)}
Bytes that the busiest host sends for one all-reduce of 16 MiB, by the schedule and by the interface's own counter (headers and acknowledgements included):

{table(["", "schedule", "counted", "off by"], counted)}
"""


def _two_level_table(rows: Rows) -> str:
    body: list[list[str]] = []
    for collective, size in dict.fromkeys((row["collective"], row["bytes"]) for row in rows):
        some = [
            row
            for row in rows
            if (row["collective"], row["bytes"]) == (collective, size) and row["who"] != "mimatrix arena"
        ]
        slower = {who: (measured, simulated) for who, measured, simulated in two_level.factors(some)}
        for row in some:
            measured, simulated = slower.get(row["who"], (None, None))
            chosen = f" ({row['choice']})" if row["who"] == two_level.AUTO else ""
            body.append(
                [
                    f"{collective} of {format_bytes(size)}, {row['who']}{chosen}",
                    format_seconds(row["median_s"]),
                    format_seconds(row["spread_s"] / 2),
                    f"{measured:.2f}x" if measured else "",
                    f"{simulated:.2f}x" if simulated else "",
                    str(row["wrong"]),
                ]
            )
    return table(["", "time", "±", "slower than mixed", "simulated", "#wrong"], body)


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
    """Return the lower bound of any all-reduce on these links."""
    fabric = Fabric(topology_from_name(network))
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


def _shares(found: dict[str, Rows]) -> str:
    body = [
        line
        for cluster, rows in found.items()
        for collective, some in shares.by_collective(rows).items()
        for line in _shares_lines(f"`{cluster}`, {collective}", some)
    ]
    ratios = [shares.ratio(some) for rows in found.values() for some in shares.by_collective(rows).values()]
    return f"""
## 6. Shares, tuned

Ranks own unlike parts, as in ZeRO with shares: `mimatrix bench reducescatter|allgather {" ".join(shares.ASKED)}` in the lab, by
`python -m bench.allreduce shares` (root). *auto* is what the tuner chose by itself, in a job that had measured nothing before; all other rows
are its candidates. *Ratio*: the best candidate's time over this one's. `auto` is at least **{min(ratios):.3f}x** the best candidate ({shares.LEAST_RATIO} is required).

{table(["", "time", "±", "ratio", "#wrong"], body)}"""


def _shares_lines(label: str, rows: Rows) -> list[list[str]]:
    candidates = shares.candidates_of(rows)
    best_s = min(row["median_s"] for row in candidates)
    (auto,) = (row for row in rows if row["who"] == shares.AUTO)
    named = [(f"{label}: **auto** ({auto['choice']})", auto), *((row["who"], row) for row in candidates)]
    return [
        [
            name,
            format_seconds(row["median_s"]),
            format_seconds(row["spread_s"] / 2),
            f"{best_s / row['median_s']:.3f}",
            str(row["wrong"]),
        ]
        for name, row in named
    ]


if __name__ == "__main__":
    main()
