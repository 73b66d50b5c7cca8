"""`mimatrix profile`: measure how fast every worker is with a script's model, for `mimatrix plan`."""

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from mimatrix.cli.output import check_file, plain_console, print_json, save_picture, say, write_text
from mimatrix.cli.train.run import (
    Arguments,
    Memory,
    Module,
    Ranks,
    Script,
    SlowBy,
    Speeds,
    Threads,
    Timeout,
    build_run_spec,
)
from mimatrix.core import environment as env
from mimatrix.core.errors import UserError
from mimatrix.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from mimatrix.launch import RunSpec
    from mimatrix.planner.model.profile import Measurements


def profile(
    script: Script,
    arguments: Arguments = None,
    ranks: Ranks = 1,
    module: Module = False,
    speeds: Speeds = "",
    memory: Memory = "",
    slow_by: SlowBy = "",
    timeout: Timeout = "",
    threads: Threads = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Where to store the measurements.")
    ] = Path("profile.json"),
    cluster: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also measure the links between workers and store them here as a cluster."),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw time, throughput and memory against the batch into this file."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore measurements of earlier runs.")] = False,
    sizes: Annotated[bool, typer.Option("--sizes", help="Also print every batch size that was timed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON.")] = False,
) -> None:
    """Measure how fast every worker is with a script's model. The script runs up to `run.prepare`; nothing is trained.

    Options come before the script, as in `mimatrix run`. What workers print goes to standard error.

    Example: mimatrix profile -n 3 --speeds 1,0.5,0.25 --picture curves.png train.py
    """
    from mimatrix import launch as launches

    check_file(output, (".json",))
    if cluster:
        check_file(cluster, (".toml",))
    if picture:
        check_file(picture, (".png", ".svg", ".pdf"))
    launch = build_run_spec(script, arguments or [], module, ranks, speeds, memory, slow_by, threads, timeout)
    launches.validate_run(launch)
    measurements = _measure(launch, script, cluster, fresh=fresh)
    write_text(measurements.to_text(), output)
    if picture:
        from mimatrix.planner.present.drawing import draw_measurements

        save_picture(draw_measurements(measurements, launch.speeds), picture)
    if as_json:
        print_json(json.loads(measurements.to_text()))
        return
    console = plain_console()
    _print(console, measurements)
    if sizes:
        _print_sizes(console, measurements)
    for what, file in (("profile", output), ("cluster", cluster), ("picture", picture)):
        if file:
            console.print(f"{what}: {file}")


def _measure(launch: "RunSpec", script: str, cluster: Path | None, *, fresh: bool) -> "Measurements":
    """Return what the workers measured; they end by themselves once they have stored it."""
    from mimatrix import launch as launches
    from mimatrix.planner.model.profile import Measurements

    with TemporaryDirectory(prefix="mimatrix-profile-") as folder:
        stored = Path(folder) / "profile.json"
        environment = os.environ | {env.PROFILE.name: str(stored)}
        if cluster:
            environment[env.PROFILE_CLUSTER.name] = str(cluster.absolute())
        if fresh:
            environment[env.FRESH.name] = "1"
        # Standard output is for the table, or for JSON and nothing else.
        outcome = launches.run_local(launch, environment, sys.stderr.buffer, sys.stderr.buffer, say)
        if outcome.code:
            say(outcome.describe())
            raise typer.Exit(outcome.code)
        if not stored.exists():
            raise UserError(
                f"{script} ended without having measured; call run.prepare(model, optimizer, dataset, loss=...) in it"
            )
        return Measurements.from_text(stored.read_text(encoding="utf-8"), "the result of the workers")


def _print(console: "Console", found: "Measurements") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from mimatrix.planner.present.rows import format_rate_per_s, profile_rows

    heading = f"{found.model.name}, {found.model.parameters:,} parameters"
    table = Table(title=heading, title_justify="left", box=SIMPLE_HEAD, padding=0)
    table.add_column("rank", justify="right")
    table.add_column("device", overflow="fold")
    for name in ("largest", "samples/s", "noise", "optimizer", "room", "took", "overflows"):
        table.add_column(name, justify="right")
    for row in profile_rows(found):
        table.add_row(
            str(row.rank),
            row.device,
            str(row.largest_batch),
            format_rate_per_s(row.samples_per_s),
            f"{row.noise:.1%}",
            format_seconds(row.optimizer_s),
            format_bytes(row.room_bytes),
            format_seconds(row.took_s) if row.took_s else "before",
            str(row.overflows),
        )
    console.print(table)
    console.print("largest: batch that was measured; samples/s with it, forward and backward alone", style="dim")
    if not all(each.took_s for each in found.profiles):
        console.print("before: measured in an earlier run; --fresh measures again", style="dim")
    if found.communication.reason:
        console.print(f"- {found.communication.reason}")
    if found.equal_counts:
        console.print("- samples of a micro-step are coupled (batch norm), so ranks run equally many micro-steps")


def _print_sizes(console: "Console", found: "Measurements") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from mimatrix.planner.present.rows import format_rate_per_s, size_rows

    table = Table(title="Every batch size", title_justify="left", box=SIMPLE_HEAD, padding=0)
    for name in ("rank", "batch", "time", "samples/s", "memory"):
        table.add_column(name, justify="right")
    for row in size_rows(found):
        table.add_row(
            str(row.rank),
            str(row.batch),
            format_seconds(row.seconds),
            format_rate_per_s(row.samples_per_s),
            format_bytes(row.memory_bytes),
        )
    console.print(table)
