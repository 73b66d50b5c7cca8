"""`mimatrix simulate-queue`: replay a trace of jobs through the scheduler under several policies."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mimatrix.cli.output import plain_console, print_json, progress
from mimatrix.core.errors import UserError
from mimatrix.core.units import format_duration

if TYPE_CHECKING:
    from mimatrix.scheduler.simulation.replay import ReplayResult


def simulate_queue(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Devices and jobs as JSON.")],
    jobs: Annotated[bool, typer.Option("--jobs", help="Also print every job.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Replay a trace of jobs through the scheduler: how long jobs would wait under which policy.

    Example: mimatrix simulate-queue examples/queue.json
    """
    from mimatrix.scheduler.simulation.replay import POLICIES, replay
    from mimatrix.scheduler.simulation.trace import Trace

    try:
        text = trace.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f'"{trace}" cannot be read ({error}); name a trace such as examples/queue.json') from None
    read = Trace.from_text(text, trace.name)
    found = {}
    for name, policy in POLICIES.items():
        with progress(f"replaying: {name}") as show:
            found[name] = replay(read, policy, show)
    if as_json:
        print_json([_summarize(name, outcome) for name, outcome in found.items()])
        return
    _print(found, jobs)


def _summarize(name: str, outcome: "ReplayResult") -> dict[str, Any]:
    return {
        "policy": name,
        "mean_waited_s": outcome.mean_waited_s,
        "p50_waited_s": outcome.waited_s(0.5),
        "p95_waited_s": outcome.waited_s(0.95),
        "max_waited_s": outcome.waited_s(1.0),
        "utilisation": outcome.utilisation,
        "preempted": sum(stay.preempted for stay in outcome.jobs),
        "never": list(outcome.never),
        "jobs": [
            {
                "job": stay.job,
                "user": stay.user,
                "at_s": stay.at_s,
                "started_s": stay.started_s,
                "ended_s": stay.ended_s,
                "preempted": stay.preempted,
                "ended_by_limit": stay.reached_limit,
            }
            for stay in outcome.jobs
        ],
    }


def _print(found: dict[str, "ReplayResult"], jobs: bool) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    console = plain_console()
    table = Table(title="Waiting", title_justify="left", box=SIMPLE_HEAD, padding=0)
    table.add_column("policy")
    for name in ("mean", "p50", "p95", "max", "in use", "preempted"):
        table.add_column(name, justify="right")
    for name, outcome in found.items():
        waits = (outcome.mean_waited_s, *(outcome.waited_s(part) for part in (0.5, 0.95, 1.0)))
        preempted = sum(stay.preempted for stay in outcome.jobs)
        table.add_row(name, *(format_duration(each) for each in waits), f"{outcome.utilisation:.1%}", str(preempted))
    console.print(table)
    never = next(iter(found.values())).never
    if never:
        console.print(f"never started, since there are too few devices: {', '.join(never)}")
    if jobs:
        for name, outcome in found.items():
            console.print(_job_table(name, outcome))


def _job_table(name: str, outcome: "ReplayResult") -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=name, title_justify="left", box=SIMPLE_HEAD, padding=0)
    table.add_column("job", overflow="fold")
    table.add_column("user", overflow="fold")
    for heading in ("submitted", "waited", "ended", "preempted"):
        table.add_column(heading, justify="right")
    for stay in outcome.jobs:
        times = (stay.at_s, stay.waited_s, stay.ended_s)
        table.add_row(stay.job, stay.user, *(format_duration(each) for each in times), str(stay.preempted))
    return table
