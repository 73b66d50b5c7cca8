"""`mimatrix submit` and what one asks about jobs afterwards."""

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from mimatrix.cli.screen import plain_console, print_json
from mimatrix.core.errors import UserError, WorldError
from mimatrix.core.units import format_bytes, format_seconds, parse_seconds

if TYPE_CHECKING:
    from mimatrix.wire.client import Client
    from mimatrix.wire.messages import Job, Submission

Number = Annotated[int, typer.Argument(min=1, metavar="JOB", help="Its number, as in `mimatrix jobs`.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_PAUSE_S, _PATIENCE_S = 0.5, 60.0
_TIMED_OUT = 124
T = TypeVar("T")
_STATES = ("queued", "starting", "profiling", "training", "saving", "preempted", "done", "failed", "cancelled")


def submit(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A .py file, or a job as a .toml file.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="The script's arguments.")] = None,
    name: Annotated[str, typer.Option(help="For people; without, the script's name.")] = "",
    devices: Annotated[str, typer.Option(help="4, a100:2,v100:4, 2..8 or all.")] = "",
    priority: Annotated[int | None, typer.Option(min=0, max=100, help="The larger comes first. [default: 50]")] = None,
    preemptible: Annotated[
        bool, typer.Option("--preemptible", help="May be told to save and wait for others.")
    ] = False,
    max_time: Annotated[str, typer.Option(help="Ended after so long, as in 2h.")] = "",
    env: Annotated[list[str] | None, typer.Option(help="A variable, as in NAME=VALUE; may be given often.")] = None,
    file: Annotated[
        list[Path] | None, typer.Option(help="A file from elsewhere to take along; may be given often.")
    ] = None,
    retries: Annotated[int, typer.Option(min=0, max=100, help="Starts again when a worker is lost.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would become of it, and do nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Hand a script to the job server. Its folder is taken along as it is now.

    Example: mimatrix submit --devices 2 train.py -- --lr 0.1
    """
    from mimatrix.cli.snapshot import archive
    from mimatrix.wire.messages import MOST_SNAPSHOT_BYTES

    given = _given(name, devices, priority, preemptible, max_time, env or [], retries)
    path, given = _described(script, given, arguments or [])
    with _client() as client, TemporaryDirectory(prefix="mimatrix-submit-") as folder:
        packed = Path(folder) / "snapshot.tar.gz"
        with _gathered(path.parent, file or []) as source:
            digest = archive(source, packed, MOST_SNAPSHOT_BYTES, path.name)
        job = _submission({**given, "script": path.name, "snapshot": digest})
        if dry_run:
            would = client.would(job)
            print_json(would.model_dump(mode="json")) if as_json else plain_console().print(
                f"it would {'start' if would.starts else 'wait'}: {would.reason}"
            )
            return
        if not client.has_snapshot(digest):
            client.upload(digest, packed)
        made = client.submit(job)
    if as_json:
        print_json(made.model_dump(mode="json"))
        return
    plain_console().print(f"job {made.id} ({made.name}) is {made.state}; follow it: mimatrix logs -f {made.id}")


def jobs(
    every: Annotated[bool, typer.Option("--all", "-a", help="Those that have ended, too.")] = False,
    state: Annotated[list[str] | None, typer.Option(help="Only these; may be given often.")] = None,
    user: Annotated[str, typer.Option(help="Only those of one user.")] = "",
    most: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 50,
    as_json: Json = False,
) -> None:
    """List jobs, the newest first, each with the reason of what it does.

    Example: mimatrix jobs --all
    """
    from mimatrix.core.errors import nearest

    for each in state or []:
        if each not in _STATES:
            raise UserError(f'"{each}" is no state{nearest(each, _STATES)}')
    asked = tuple(state or () if every or state else _STATES[:6])
    with _client() as client:
        found = client.jobs(most=most, states=asked, user=user)
    if as_json:
        print_json([job.model_dump(mode="json") for job in found.jobs])
        return
    if not found.jobs:
        plain_console().print(
            "no jobs; hand one in: mimatrix submit train.py"
            if every
            else "no jobs wait or run; mimatrix jobs --all shows the others"
        )
        return
    _print_jobs(found.jobs)


def show(number: Number, as_json: Json = False) -> None:
    """All that is known of one job.

    Example: mimatrix show 3
    """
    with _client() as client:
        job = client.job(number)
    if as_json:
        print_json(job.model_dump(mode="json"))
        return
    console = plain_console()
    for name, value in _facts(job):
        console.print(f"{name:>10}  {value}")


def explain(number: Number, as_json: Json = False) -> None:
    """What happened to a job and why, in order: why it waits, why it has these devices, how it ended.

    Example: mimatrix explain 3
    """
    with _client() as client:
        job, events = client.job(number), client.events(number)
    if as_json:
        print_json([event.model_dump(mode="json") for event in events])
        return
    console = plain_console()
    for event in events:
        when = event.at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        console.print(f"{when}  {event.state:<10} {event.reason}")
    if job.reason and (not events or events[-1].reason != job.reason):
        console.print(f"{'now':<19}  {job.state:<10} {job.reason}")


def logs(
    number: Number,
    rank: Annotated[int, typer.Option("--rank", "-r", min=0, help="Of which rank.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it has ended.")] = False,
    generation: Annotated[int | None, typer.Option(min=1, help="Of an earlier start.")] = None,
) -> None:
    """What a job printed.

    Example: mimatrix logs -f 3
    """
    with _client() as client:
        offset, now = 0, generation
        while True:
            part = _patiently(lambda: client.log(number, rank, offset, now), follow)  # noqa: B023 (called at once)
            sys.stdout.write(part.text)
            sys.stdout.flush()
            offset, now = part.next_offset, generation or part.generation or None
            if part.text:
                continue
            if follow and generation is None and (part.has_ended or not now):
                later = _patiently(lambda: client.job(number), follow)
                if later.generation > (now or 0):
                    sys.stderr.write(f"mimatrix: started for the {later.generation}. time\n" if now else "")
                    offset, now = 0, later.generation
                    continue
                if later.state not in _STATES[6:]:
                    time.sleep(_PAUSE_S)
                    continue
            if part.has_ended or not follow:
                return
            time.sleep(_PAUSE_S)


def cancel(number: Number, as_json: Json = False) -> None:
    """End a job, wherever it is.

    Example: mimatrix cancel 3
    """
    _act(number, "cancel", as_json)


def retry(number: Number, as_json: Json = False) -> None:
    """Queue a job once more that has ended; it goes on from its last checkpoint, if it has one.

    Example: mimatrix retry 3
    """
    _act(number, "retry", as_json)


def wait(
    number: Number,
    timeout: Annotated[str, typer.Option(help="No longer than this, as in 10min.")] = "",
    as_json: Json = False,
) -> None:
    """Wait until a job has ended; the exit code is the job's.

    Example: mimatrix wait 3
    """
    from mimatrix.wire.messages import ENDED, JobState

    deadline = time.monotonic() + parse_seconds(timeout) if timeout else None
    with _client() as client:
        while (job := _patiently(lambda: client.job(number), True)).state not in ENDED:
            if deadline is not None and time.monotonic() > deadline:
                plain_console().print(f"job {number} is still {job.state} after {timeout}: {job.reason}")
                raise typer.Exit(_TIMED_OUT)
            time.sleep(_PAUSE_S)
    if as_json:
        print_json(job.model_dump(mode="json"))
    else:
        plain_console().print(f"job {number} is {job.state}: {job.reason}")
    if job.state is not JobState.DONE:
        code = job.exit_code or 1
        # As a shell tells of a signal.
        raise typer.Exit(128 - code if code < 0 else min(code, 255))


def nodes(as_json: Json = False) -> None:
    """The machines, their devices, and who has them.

    Example: mimatrix nodes
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    with _client() as client:
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
            has = f"job {device.job}" if device.job else ("free" if node.answers else "does not answer")
            table.add_row(device.name, device.kind, format_bytes(device.memory_bytes), has)
    plain_console().print(table)


def _patiently(ask: "Callable[[], T]", waits: bool) -> "T":
    """The answer; a server that is being restarted is asked again for a while, if whoever asks waits anyway."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return ask()
        except WorldError:
            if not waits or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)


def _act(number: int, action: str, as_json: bool) -> None:
    with _client() as client:
        job = client.act(number, action)
    if as_json:
        print_json(job.model_dump(mode="json"))
    else:
        plain_console().print(
            f"job {job.id} is {job.state}"
            + (", and was told to end" if job.state not in _STATES[5:] and action == "cancel" else "")
        )


@contextmanager
def _client() -> Iterator["Client"]:
    try:
        from mimatrix.wire.client import Client, found_server
    except ModuleNotFoundError as error:
        raise UserError(f"this needs {error.name}; install it: pip install 'mimatrix[server]'") from None
    with Client(*found_server()) as client:
        yield client


def _given(
    name: str, devices: str, priority: int | None, preemptible: bool, max_time: str, env: list[str], retries: int
) -> dict[str, Any]:
    """What was said on the command line, and nothing else."""
    found: dict[str, Any] = {"name": name, "devices": devices, "priority": priority}
    found |= {"preemptible": preemptible or None, "retries": retries or None}
    found["max_time_s"] = parse_seconds(max_time) if max_time else None
    found["environment"] = dict(_variable(text) for text in env) or None
    return {key: value for key, value in found.items() if value not in (None, "")}


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise UserError(f'"{text}" is no variable; write --env NAME=VALUE')
    return name, value


def _described(script: str, given: dict[str, Any], arguments: list[str]) -> tuple[Path, dict[str, Any]]:
    """The script's path and what is asked for it; a job file says both, and the command line has the last word."""
    path = Path(script)
    if path.suffix == ".toml":
        from mimatrix.cli.job_file import read_job

        path, said = read_job(path)
        given = {**said, **given}
    if not path.is_file():
        raise UserError(f'there is no "{path}"; give the path of a script, or of a .toml file that names one')
    if arguments:
        given["arguments"] = tuple(arguments)
    # Of the script's name what a name may have.
    name = re.sub(r"[^A-Za-z0-9._ -]+|^[._ -]+", "", path.stem)[:100]
    return path, {"name": name or "job", **given}


def _submission(given: dict[str, Any]) -> "Submission":
    from pydantic import ValidationError

    from mimatrix.wire.messages import Submission

    try:
        return Submission(**given)
    except ValidationError as error:
        first = error.errors()[0]
        place, said = ".".join(map(str, first["loc"])), str(first["msg"]).removeprefix("Value error, ")
        raise UserError(f"{place}: {said}") from None


@contextmanager
def _gathered(folder: Path, files: list[Path]) -> Iterator[Path]:
    """The folder, or a copy of it with files from elsewhere beside the script."""
    if not files:
        yield folder
        return
    import shutil

    for file in files:
        if not file.is_file():
            raise UserError(f'there is no file "{file}" to take along; check its path')
    with TemporaryDirectory(prefix="mimatrix-files-") as made:
        copy = Path(made) / "folder"
        shutil.copytree(folder, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__"))
        for file in files:
            shutil.copy2(file, copy / file.name)
        yield copy


def _print_jobs(found: "tuple[Job, ...]") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=0)
    table.add_column("job", justify="right")
    for heading in ("name", "user", "state", "devices"):
        table.add_column(heading, overflow="fold")
    table.add_column("step", justify="right")
    table.add_column("why", overflow="fold")
    for job in found:
        has = ", ".join(job.seats) if job.seats else job.devices
        step = str(job.progress.step) if job.progress.step else ""
        table.add_row(str(job.id), job.name, job.user, job.state, has, step, job.reason)
    plain_console().print(table)


def _facts(job: "Job") -> Iterator[tuple[str, str]]:
    yield "job", f"{job.id} ({job.name}) of {job.user}"
    yield "state", f"{job.state}: {job.reason}"
    yield "runs", " ".join((job.script, *job.arguments))
    yield "devices", job.devices + (f": {', '.join(job.seats)}" if job.seats else "")
    yield "priority", str(job.priority) + (", may be preempted" if job.preemptible else "")
    if job.max_time_s:
        yield "limit", format_seconds(job.max_time_s)
    for name, when in (("handed in", job.created_at), ("started", job.started_at), ("ended", job.ended_at)):
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
        yield name, f"{value:g}"
    if job.exit_code is not None:
        yield "exit code", str(job.exit_code)
