"""`mimatrix top`, the running jobs live, and `mimatrix metrics`, the stored figures of one."""

import csv
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from mimatrix.cli.client import Json, Number, connected
from mimatrix.cli.output import print_json
from mimatrix.core.errors import MiMatrixError
from mimatrix.core.units import format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mimatrix.api.client import Client
    from mimatrix.api.models import History, Job, NodeStatus, Point, Rank, Ranks

_WIDTH = 24
_MOST_RANKS = 16
_RUNS = ("starting", "profiling", "training", "saving")
_WAITS = ("queued", "preempted")


def top(
    every: Annotated[float, typer.Option(min=0.2, metavar="SECONDS", help="Seconds between updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Show running and waiting jobs and their stragglers, live, until Ctrl-C.

    Example: mimatrix top
    """
    from rich.console import Console
    from rich.live import Live

    with connected() as client:
        jobs, ranks, nodes = _fetch(client)
        if as_json:
            print_json(
                {
                    "jobs": [job.model_dump(mode="json") for job in jobs],
                    "ranks": {number: each.model_dump(mode="json") for number, each in ranks.items()},
                    "nodes": [node.model_dump(mode="json") for node in nodes],
                }
            )
            return
        console = Console()
        if once or not console.is_terminal:
            console.print(_render(jobs, ranks, nodes))
            return
        with Live(_render(jobs, ranks, nodes), console=console, auto_refresh=False, screen=True) as live:
            try:
                while True:
                    time.sleep(every)
                    live.update(_refresh(client), refresh=True)
            except KeyboardInterrupt:
                return


def metrics(
    number: Number,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, a line for each point.")] = False,
    points: Annotated[int, typer.Option(min=2, max=1000, metavar="N", help="Maximum number of points.")] = 300,
    as_json: Json = False,
) -> None:
    """Print the metrics of a job over time.

    Example: mimatrix metrics 3 --csv > job3.csv
    """
    with connected() as client:
        found = client.history(number, points)
    if as_json:
        print_json(found.model_dump(mode="json"))
    elif as_csv:
        _write_csv(found)
    else:
        _print_points(found)


def _fetch(client: "Client") -> tuple[list["Job"], dict[int, "Ranks"], list["NodeStatus"]]:
    jobs = list(client.jobs(limit=1000, states=(*_RUNS, *_WAITS)).jobs)
    ranks = {job.id: client.ranks(job.id) for job in jobs if job.state in _RUNS}
    return jobs, ranks, client.nodes()


def _refresh(client: "Client") -> "RenderableType":
    try:
        return _render(*_fetch(client))
    except MiMatrixError as error:  # it may come back
        return f"mimatrix: {error}"


def _render(jobs: list["Job"], ranks: dict[int, "Ranks"], nodes: list["NodeStatus"]) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    devices = [device for node in nodes for device in node.devices]
    used = sum(device.job is not None for device in devices)
    waits = [job for job in reversed(jobs) if job.state in _WAITS]
    parts: list[RenderableType] = [
        Text(f"{used} of {len(devices)} devices in use, {len(ranks)} jobs run, {len(waits)} wait", style="bold")
    ]
    for job in (job for job in jobs if job.id in ranks):
        parts += [Text(), *_job_lines(job, ranks[job.id])]
    if waits:
        parts += [Text(), Text("waiting", style="bold")]
    parts += [Text(f"{job.id:>5}  {job.name:<20.20} {job.user:<10.10} {job.reason}") for job in waits[:20]]
    if not jobs:
        parts.append(Text("no jobs are running or waiting; submit one: mimatrix submit train.py"))
    return Group(*parts)


def _job_lines(job: "Job", now: "Ranks") -> list["RenderableType"]:
    from rich.text import Text

    progress = job.progress
    losses = ", ".join(f"{name} {_number(value)}" for name, value in list(progress.metrics.items())[:4])
    predicted = f" (planned {format_seconds(progress.predicted_step_s)})" if progress.predicted_step_s else ""
    said = f"step {progress.step}, {format_seconds(progress.step_s)}{predicted}, {progress.samples_per_s:.4g} samples/s"
    found: list[RenderableType] = [
        Text(f"{job.id:>5}  {job.name:<20.20} {job.user:<10.10} {job.state}: {said}  {losses}".rstrip())
    ]
    found += [Text(line) for line in _group_lines(now)]
    held = {trouble.rank: trouble for trouble in now.stragglers}
    for rank in _select_ranks(now):
        whole = max(rank.step_s, 1e-9)
        line = Text(f"{rank.rank:>9}  {rank.device:<20.20} ")
        busy, moves = ((rank.compute_s + rank.data_s) / whole, rank.communication_s / whole)
        filled, moving = round(_WIDTH * min(1.0, busy)), round(_WIDTH * min(1.0, moves))
        line.append("#" * filled, style="red" if rank.rank in held else "green")
        line.append("~" * min(moving, _WIDTH - filled), style="blue")
        line.append("." * max(0, _WIDTH - filled - moving), style="dim")
        line.append(f" busy {busy:4.0%}, moving data {moves:4.0%}, waiting {rank.waiting_s / whole:4.0%}")
        if rank.rank in held:
            line.append("  <- straggler", style="red bold")
        found.append(line)
    if len(now.ranks) > _MOST_RANKS:
        found.append(Text(f"{'':>11}and {len(now.ranks) - _MOST_RANKS} more"))
    return [*found, *(Text(f"{'':>7}{trouble.sentence}", style="red") for trouble in now.stragglers)]


def _group_lines(now: "Ranks") -> list[str]:
    """Return a line on the pushes of each group that does not wait for others; of many, those that push most."""
    firsts = [rank for rank in now.ranks if rank.pushed]
    whole = max(1, sum(rank.pushed.samples for rank in firsts if rank.pushed))
    lines = []
    for rank in sorted(firsts, key=lambda each: -each.pushed.samples if each.pushed else 0)[:_MOST_RANKS]:
        assert rank.pushed
        who = ", ".join(str(each.rank) for each in now.ranks if each.group == rank.group)
        lines.append(
            f"{'':>7}group {rank.group} (rank {who:.20}): {rank.pushed.pushes:,} pushes, "
            f"{rank.pushed.samples:,} samples ({rank.pushed.samples / whole:.0%} of all), "
            f"{rank.samples_per_s:.4g} samples/s, "
            f"{rank.pushed.staleness:.3g} late, pushed for {format_seconds(rank.pushed.moved_s)}, "
            f"waited {format_seconds(rank.pushed.waited_s)}"
        )
    return lines


def _select_ranks(now: "Ranks") -> list["Rank"]:
    """Return the ranks to show: of many, the stragglers and then the slowest."""
    if len(now.ranks) <= _MOST_RANKS:
        return list(now.ranks)
    held = {trouble.rank for trouble in now.stragglers}
    slowest = sorted(now.ranks, key=lambda each: (each.rank not in held, -each.compute_s - each.data_s, each.rank))
    return slowest[:_MOST_RANKS]


def _number(value: float | None) -> str:
    return "nan" if value is None else f"{value:.4g}"


def _write_csv(found: "History") -> None:
    names = list(dict.fromkeys(name for point in found.points for name in point.metrics))
    by_rank = list(dict.fromkeys(name for point in found.points for name in point.ranks))
    ranks = max((len(values) for point in found.points for values in point.ranks.values()), default=0)
    columns = [f"{name}_rank{rank}" for name in by_rank for rank in range(ranks)]
    writer = csv.writer(sys.stdout)
    writer.writerow(["at", "step", "samples_per_s", "step_s", "predicted_step_s", *names, *columns])
    for point in found.points:
        values = [point.ranks.get(name, ()) for name in by_rank]
        figures = [each[rank] if rank < len(each) else None for each in values for rank in range(ranks)]
        row = [point.at.isoformat(), point.step, point.samples_per_s, point.step_s, point.predicted_step_s]
        writer.writerow([*row, *(_cell(point, name) for name in names), *figures])


def _cell(point: "Point", name: str) -> float | str:
    """Return the value of a metric, or nothing if it was not logged then."""
    value = point.metrics.get(name, "")
    return "nan" if value is None else value


def _print_points(found: "History") -> None:
    from mimatrix.cli.output import plain_console

    console = plain_console()
    if not found.points:
        console.print("no metrics yet; they are stored every few seconds once the job trains")
    for point in found.points:
        when = point.at.astimezone().strftime("%m-%d %H:%M:%S")
        measured = "".join(f"  {name} {_number(value)}" for name, value in point.metrics.items())
        speed = ""
        if point.samples_per_s is not None and point.step_s is not None:
            speed = f"{point.samples_per_s:>10.4g} samples/s  {format_seconds(point.step_s)}"
        console.print(f"{when}  step {point.step:<8} {speed:<28}{measured}".rstrip())
