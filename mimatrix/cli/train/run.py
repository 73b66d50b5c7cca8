"""`mimatrix run`: local workers, no server."""

import json
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from mimatrix.core import environment
from mimatrix.core.units import parse_duration

if TYPE_CHECKING:
    from mimatrix.launch import RunSpec

Script = Annotated[str, typer.Argument(help="What every worker runs.", metavar="SCRIPT")]
Arguments = Annotated[list[str] | None, typer.Argument(help="Its arguments.", metavar="ARGS")]
Ranks = Annotated[int, typer.Option("-n", "--ranks", help="Number of workers.")]
Module = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")]
Speeds = Annotated[str, typer.Option(help="Slow workers down: a part of full speed for each, as in 1,0.5,0.25.")]
Memory = Annotated[
    str,
    typer.Option(help="What each worker may use, one size for all or one for each, as in 2GB,512MB; enforced as root."),
]
SlowBy = Annotated[
    str,
    typer.Option(
        envvar=environment.SLOWDOWN.name,
        help="quota (control groups, root) or signals (stop and continue); without, the first that works.",
    ),
]
Timeout = Annotated[str, typer.Option(help="End everything after this time, as in 5min; exit code 124.")]
Threads = Annotated[int | None, typer.Option(help="OMP_NUM_THREADS of each worker; without, what is set, or 1.")]


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
            help="How often to start all again when a worker is lost, or only its group; exit code 2 is final."
        ),
    ] = 0,
    groups: Annotated[
        str, typer.Option(help='Ranks that go together, as in 0,1/2/3, for mode="hybrid"; a lost group ends no other.')
    ] = "",
    grace: Annotated[str, typer.Option(help="How long the other workers may continue when one has failed.")] = "5s",
    timeout: Timeout = "",
    threads: Threads = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print how it ended as JSON, on one line after the workers' lines.")
    ] = False,
) -> None:
    """Run a script once for every worker of this machine, with torchrun's variables, and wait for all.

    Options come before the script; what follows it is the script's own. Every line is labelled with its rank.

    Example: mimatrix run -n 3 --speeds 1,0.5,0.25 train.py --lr 0.1
    """
    from mimatrix import launch as launches

    launch = replace(
        asked(script, arguments or [], module, ranks, speeds, memory, slow_by, threads, timeout),
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


def asked(
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
    """What the options ask for, not yet checked as a whole."""
    from mimatrix import launch as launches

    return launches.RunSpec(
        _words(script, arguments, module),
        ranks=ranks,
        speeds=launches.parse_speeds(speeds) if speeds else (),
        memory=launches.parse_memory(memory, ranks) if memory else (),
        slow_by=slow_by,
        threads=threads,
        timeout_s=parse_duration(timeout) if timeout else None,
    )


def say(sentence: str) -> None:
    """Tell the user on standard error, apart from what workers print."""
    typer.echo(f"mimatrix: {sentence}", err=True)


def _words(script: str, arguments: list[str], module: bool) -> tuple[str, ...]:
    """The words of a worker; `--` may stand between the script and its arguments."""
    from mimatrix import launch as launches

    own = arguments[1:] if arguments[:1] == ["--"] else arguments
    return launches.module_command(script, own) if module else launches.script_command(script, own)
