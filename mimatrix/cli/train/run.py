"""`mimatrix run`: start the workers of a script on this machine, without a server."""

import json
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from mimatrix.cli.output import say
from mimatrix.core import environment
from mimatrix.core.units import parse_duration

if TYPE_CHECKING:
    from mimatrix.launch import RunSpec

Script = Annotated[str, typer.Argument(help="The script that every worker runs.", metavar="SCRIPT")]
Arguments = Annotated[list[str] | None, typer.Argument(help="Arguments of the script.", metavar="ARGS")]
Ranks = Annotated[int, typer.Option("-n", "--ranks", metavar="N", help="Number of workers.")]
Module = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")]
Speeds = Annotated[
    str, typer.Option(metavar="LIST", help="Slow workers down: a part of full speed for each, e.g. 1,0.5,0.25.")
]
Memory = Annotated[
    str,
    typer.Option(
        metavar="SIZES",
        help="Memory limit, one size for all workers or one for each, e.g. 2GB,512MB; enforced as root.",
    ),
]
SlowBy = Annotated[
    str,
    typer.Option(
        envvar=environment.SLOWDOWN.name,
        metavar="HOW",
        help="quota (control groups, root) or signals (stop and continue).",
        show_default="the first that works",
    ),
]
Timeout = Annotated[
    str, typer.Option(metavar="TIME", help="Stop all workers after this time, e.g. 5min; exit code 124.")
]
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="OMP_NUM_THREADS of each worker.", show_default="the variable if it is set, otherwise 1"
    ),
]


def run(
    script: Script,
    arguments: Arguments = None,
    ranks: Ranks = 1,
    module: Module = False,
    speeds: Speeds = "",
    memory: Memory = "",
    slow_by: SlowBy = "",
    max_restarts: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Restart all workers, or only the group, this often when a worker is lost; exit code 2 is final.",
        ),
    ] = 0,
    groups: Annotated[
        str,
        typer.Option(
            metavar="GROUPS",
            help='Groups of ranks, e.g. 0,1/2/3, for mode="hybrid"; the other groups survive the loss of one.',
        ),
    ] = "",
    grace: Annotated[
        str, typer.Option(metavar="TIME", help="How long the other workers may continue after one has failed.")
    ] = "5s",
    timeout: Timeout = "",
    threads: Threads = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, on one line after the workers' lines.")
    ] = False,
) -> None:
    """Run a script once for every worker of this machine, with torchrun's variables, and wait for all.

    Options come before the script; what follows it is the script's own. Every line is labelled with its rank.

    Example: mimatrix run -n 3 --speeds 1,0.5,0.25 train.py --lr 0.1
    """
    from mimatrix import launch as launches

    launch = replace(
        build_run_spec(script, arguments or [], module, ranks, speeds, memory, slow_by, threads, timeout),
        max_restarts=max_restarts,
        grace_s=parse_duration(grace),
        groups=launches.parse_groups(groups, ranks) if groups else (),
    )
    launches.validate_run(launch)
    outcome = launches.run_local(launch, os.environ, sys.stdout.buffer, sys.stderr.buffer, say)
    if reason := outcome.describe():
        say(reason)
    if as_json:
        # On one line, since it comes after the lines of the workers: `tail -n 1` has it.
        typer.echo(json.dumps(outcome.to_json()))
    if outcome.code:
        raise typer.Exit(outcome.code)


def build_run_spec(
    script: str,
    arguments: list[str],
    module: bool,
    ranks: int,
    speeds: str,
    memory: str,
    slow_by: str,
    threads: int | None,
    timeout: str,
) -> "RunSpec":
    """Return the run that the options describe, not yet checked as a whole."""
    from mimatrix import launch as launches

    return launches.RunSpec(
        _worker_command(script, arguments, module),
        ranks=ranks,
        speeds=launches.parse_speeds(speeds) if speeds else (),
        memory=launches.parse_memory(memory, ranks) if memory else (),
        slow_by=slow_by,
        threads=threads,
        timeout_s=parse_duration(timeout) if timeout else None,
    )


def _worker_command(script: str, arguments: list[str], module: bool) -> tuple[str, ...]:
    """Return the command of a worker; `--` may stand between the script and its arguments."""
    from mimatrix import launch as launches

    own = arguments[1:] if arguments[:1] == ["--"] else arguments
    return launches.module_command(script, own) if module else launches.script_command(script, own)
