"""`mimatrix run`: local workers, no server."""

import json
import os
import re
import sys
from typing import Annotated

import typer

from mimatrix.core.units import parse_seconds


def run(
    script: Annotated[str, typer.Argument(help="What every worker runs.", metavar="SCRIPT")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments.", metavar="ARGS")] = None,
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Number of workers.")] = 1,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")] = False,
    speeds: Annotated[
        str, typer.Option(help="Slow workers down: a part of full speed for each, as in 1,0.5,0.25.")
    ] = "",
    slow_by: Annotated[
        str,
        typer.Option(
            envvar="MIMATRIX_SLOWDOWN",
            help="quota (control groups, root) or signals (stop and continue); without, the first that works.",
        ),
    ] = "",
    max_restarts: Annotated[
        int, typer.Option(help="How often to start all again when a worker is lost; exit code 2 is final.")
    ] = 0,
    grace: Annotated[str, typer.Option(help="How long the others may go on when one worker has failed.")] = "5s",
    timeout: Annotated[str, typer.Option(help="End everything after this time, as in 5min; exit code 124.")] = "",
    threads: Annotated[
        int | None, typer.Option(help="OMP_NUM_THREADS of each worker; without, what is set, or 1.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print how it ended as JSON, on one line after the workers' lines.")
    ] = False,
) -> None:
    """Run a script once for every worker of this machine, with torchrun's variables, and wait for all.

    Options come before the script; what follows it is the script's own. Every line is labelled with its rank.

    Example: mimatrix run -n 3 --speeds 1,0.5,0.25 train.py --lr 0.1
    """
    from mimatrix import launch as launches

    words = _words(script, arguments or [], module)
    launch = launches.Launch(
        words,
        ranks=ranks,
        speeds=launches.parse_speeds(speeds) if speeds else (),
        slow_by=slow_by,
        threads=threads,
        max_restarts=max_restarts,
        grace_s=_seconds(grace),
        timeout_s=_seconds(timeout) if timeout else None,
    )
    launches.check(launch)
    outcome = launches.run_local(launch, os.environ, sys.stdout.buffer, sys.stderr.buffer, _say)
    if outcome.code:
        _say(outcome.reason)
    if as_json:
        from dataclasses import asdict

        # On one line, since it comes after the lines of the workers: `tail -n 1` has it.
        typer.echo(json.dumps(asdict(outcome)))
    if outcome.code:
        raise typer.Exit(outcome.code)


def _words(script: str, arguments: list[str], module: bool) -> tuple[str, ...]:
    """The words of a worker; `--` may stand between the script and its arguments."""
    from mimatrix import launch as launches

    own = arguments[1:] if arguments[:1] == ["--"] else arguments
    return launches.module_words(script, own) if module else launches.script_words(script, own)


def _seconds(text: str) -> float:
    """A time, in seconds where it has no unit."""
    return parse_seconds(f"{text}s" if re.fullmatch(r"\s*[\d.]+\s*", text) else text)


def _say(sentence: str) -> None:
    typer.echo(f"mimatrix: {sentence}", err=True)
