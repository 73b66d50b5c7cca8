"""Commands that show submitted jobs and change them."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from mimatrix.cli.client import Json, Number, connected
from mimatrix.cli.output import plain_console, print_json, say
from mimatrix.core.errors import UserError, WorldError
from mimatrix.core.exit_codes import TIMED_OUT
from mimatrix.core.text import ordinal
from mimatrix.core.units import format_bytes, format_duration, format_seconds, parse_duration

if TYPE_CHECKING:
    from mimatrix.api.client import Client
    from mimatrix.api.models import Job

_PAGE = 1000
_PAUSE_S, _PATIENCE_S = 0.5, 60.0
T = TypeVar("T")


def jobs(
    every: Annotated[bool, typer.Option("--all", "-a", help="Include finished jobs.")] = False,
    state: Annotated[
        list[str] | None, typer.Option(metavar="STATE", help="Only jobs in this state; may be repeated.")
    ] = None,
    user: Annotated[str, typer.Option(metavar="USER", help="Only jobs of this user.")] = "",
    most: Annotated[
        int, typer.Option(min=1, metavar="N", help="Maximum number of jobs to list, the newest ones.")
    ] = 50,
    as_json: Json = False,
) -> None:
    """List jobs, the newest first, with the reason for each state.

    Example: mimatrix jobs --all
    """
    from mimatrix.api.models import JobState
    from mimatrix.core.errors import nearest

    known = [each.value for each in JobState]
    for each in state or []:
        if each not in known:
            raise UserError(f'unknown state "{each}"{nearest(each, known)}')
    unfinished = tuple(each.value for each in JobState if not each.is_final)
    asked = tuple(state or ()) if every or state else unfinished
    with connected() as client:
        found, more = _list_newest(client, most, asked, user)
    if as_json:
        print_json([job.model_dump(mode="json") for job in found])
    elif found:
        _print_jobs(found)
    else:
        plain_console().print(
            "no jobs; submit one: mimatrix submit train.py"
            if every
            else "no jobs are waiting or running; mimatrix jobs --all shows the others"
        )
    if more:
        say(f"{more} older jobs are not shown; add --most {len(found) + more} to see all of them")


def show(number: Number, as_json: Json = False) -> None:
    """Show everything that is known of a job.

    Example: mimatrix show 3
    """
    with connected() as client:
        job = client.job(number)
    if as_json:
        print_json(job.model_dump(mode="json"))
        return
    console = plain_console()
    for name, value in _describe(job):
        console.print(f"{name:>10}  {value}")


def explain(number: Number, as_json: Json = False) -> None:
    """Show what happened to a job and why: why it waits, why it has these devices, how it ended.

    Example: mimatrix explain 3
    """
    with connected() as client:
        job, events = client.job(number), client.events(number)
    if as_json:
        print_json([event.model_dump(mode="json") for event in events])
        return
    console = plain_console()
    for event in events:
        when = event.at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        console.print(f"{when}  {event.state:<10} {event.reason}")
    last = {"kind": events[-1].kind, **events[-1].data} if events else None
    if job.reason and job.reason_data != last:
        console.print(f"{'now':<19}  {job.state:<10} {job.reason}")


def logs(
    number: Number,
    rank: Annotated[
        int, typer.Option("--rank", "-r", min=0, metavar="RANK", help="The rank whose output is printed.")
    ] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job has ended.")] = False,
    generation: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Output of an earlier start, counted from 1.")
    ] = None,
) -> None:
    """Print the output of a job.

    Example: mimatrix logs -f 3
    """
    from mimatrix.api.text import strip_escapes

    with connected() as client:
        offset, now = 0, generation
        while True:
            part = _retry_while_down(lambda: client.log(number, rank, offset, now), follow)  # noqa: B023 (called at once)
            sys.stdout.write(strip_escapes(part.text) if sys.stdout.isatty() else part.text)
            sys.stdout.flush()
            offset, now = part.next_offset, generation or part.generation or None
            if part.text:
                continue
            if follow and generation is None and (part.has_ended or not now):
                later = _retry_while_down(lambda: client.job(number), follow)
                if later.generation > (now or 0):
                    sys.stderr.write(f"mimatrix: started for the {ordinal(later.generation)} time\n" if now else "")
                    offset, now = 0, later.generation
                    continue
                if not later.state.is_final:
                    time.sleep(_PAUSE_S)
                    continue
            if part.has_ended or not follow:
                return
            time.sleep(_PAUSE_S)


def cancel(number: Number, as_json: Json = False) -> None:
    """Cancel a job, whether it waits or runs.

    Example: mimatrix cancel 3
    """
    _act(number, "cancel", as_json)


def retry(number: Number, as_json: Json = False) -> None:
    """Requeue a finished job; it resumes from its last checkpoint, if it has one.

    Example: mimatrix retry 3
    """
    _act(number, "retry", as_json)


def priority(
    number: Number,
    value: Annotated[int, typer.Argument(min=0, max=100, metavar="N", help="Larger values come first.")],
    as_json: Json = False,
) -> None:
    """Change the priority of a waiting or running job, from 0 to 100.

    Example: mimatrix priority 3 80
    """
    with connected() as client:
        from mimatrix.api.models import JobUpdate

        job = client.update(number, JobUpdate(priority=value))
    if as_json:
        print_json(job.model_dump(mode="json"))
    else:
        plain_console().print(f"job {job.id} has priority {job.priority}")


def wait(
    number: Number,
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="Stop waiting after this time, e.g. 10m; exit code 124.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Wait until a job has ended and exit with its exit code.

    Example: mimatrix wait 3
    """
    from mimatrix.api.models import ENDED, JobState

    deadline = time.monotonic() + parse_duration(timeout) if timeout else None
    with connected() as client:
        while (job := _retry_while_down(lambda: client.job(number), True)).state not in ENDED:
            if deadline is not None and time.monotonic() > deadline:
                plain_console().print(f"job {number} is still {job.state} after {timeout}: {job.reason}")
                raise typer.Exit(TIMED_OUT)
            time.sleep(_PAUSE_S)
    if as_json:
        print_json(job.model_dump(mode="json"))
    else:
        plain_console().print(f"job {number} is {job.state}: {job.reason}")
    if job.state is not JobState.DONE:
        code = job.exit_code or 1
        # As a shell reports a signal.
        raise typer.Exit(128 - code if code < 0 else min(code, 255))


def nodes(as_json: Json = False) -> None:
    """List the machines, their devices, and the jobs that use them.

    Example: mimatrix nodes
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    with connected() as client:
        found = client.nodes()
    if as_json:
        print_json([node.model_dump(mode="json") for node in found])
        return
    table = Table(box=SIMPLE_HEAD, padding=0)
    for heading in ("device", "kind"):
        table.add_column(heading, overflow="fold")
    table.add_column("memory", justify="right")
    table.add_column("job")
    for node in found:
        for device in node.devices:
            has = f"job {device.job}" if device.job else ("free" if node.answers else "not responding")
            table.add_row(device.name, device.kind, format_bytes(device.memory_bytes), has)
    plain_console().print(table)


def _list_newest(client: "Client", most: int, states: tuple[str, ...], user: str) -> "tuple[list[Job], int]":
    """Return the newest `most` jobs, page by page, and how many older ones there are."""
    page = client.jobs(None, min(most, _PAGE), states, user)
    found = list(page.jobs)
    while page.next_before is not None and len(found) < most:
        page = client.jobs(page.next_before, min(most - len(found), _PAGE), states, user)
        found += page.jobs
    return found, page.more


def _retry_while_down(ask: "Callable[[], T]", waits: bool) -> "T":
    """Return the answer; if the caller waits anyway, a server that is restarting is asked again for a while."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return ask()
        except WorldError:
            if not waits or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)


def _act(number: int, action: str, as_json: bool) -> None:
    with connected() as client:
        job = client.act(number, action)
    if as_json:
        print_json(job.model_dump(mode="json"))
    else:
        plain_console().print(
            f"job {job.id} is {job.state}"
            + (", and is being stopped" if job.state.is_active and action == "cancel" else "")
        )


def _print_jobs(found: "Sequence[Job]") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=0)
    table.add_column("job", justify="right")
    for heading in ("name", "user", "state", "devices"):
        table.add_column(heading, overflow="fold")
    table.add_column("step", justify="right")
    table.add_column("reason", overflow="fold")
    for job in found:
        has = ", ".join(job.allocation) if job.allocation else job.devices
        step = str(job.progress.step) if job.progress.step else ""
        table.add_row(str(job.id), job.name, job.user, job.state, has, step, job.reason)
    plain_console().print(table)


def _describe(job: "Job") -> Iterator[tuple[str, str]]:
    yield "job", f"{job.id} ({job.name}) of {job.user}"
    yield "state", f"{job.state}: {job.reason}"
    yield "runs", " ".join((job.script, *job.arguments))
    yield "devices", job.devices + (f": {', '.join(job.allocation)}" if job.allocation else "")
    yield "priority", str(job.priority) + (", may be preempted" if job.preemptible else "")
    if job.max_time_s:
        yield "limit", format_duration(job.max_time_s)
    for name, when in (("submitted", job.created_at), ("started", job.started_at), ("ended", job.ended_at)):
        if when:
            yield name, when.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    if job.generation > 1:
        yield "started", f"{job.generation} times"
    progress = job.progress
    if progress.step:
        predicted = f" ({format_seconds(progress.predicted_step_s)} predicted)" if progress.predicted_step_s else ""
        each = f"{format_seconds(progress.step_s)} each{predicted}"
        yield "step", f"{progress.step}, {each}, {progress.samples_per_s:,.0f} samples/s"
    for name, value in progress.metrics.items():
        yield name, "nan" if value is None else f"{value:g}"
    if job.exit_code is not None:
        yield "exit code", str(job.exit_code)
