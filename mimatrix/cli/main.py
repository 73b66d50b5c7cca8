"""The entry of the command. Sub-commands import what they need when they run, so that `--help` is there at once."""

import os
import sys
from io import TextIOWrapper

import typer

from mimatrix import __version__
from mimatrix.cli.admin.tokens import tokens
from mimatrix.cli.admin.up import up
from mimatrix.cli.jobs.jobs import cancel, explain, jobs, logs, nodes, priority, retry, show, wait
from mimatrix.cli.jobs.submit import submit
from mimatrix.cli.jobs.top import metrics, top
from mimatrix.cli.network.bench import bench
from mimatrix.cli.network.lab import lab
from mimatrix.cli.network.simulate import algorithms, simulate
from mimatrix.cli.network.simulate_queue import simulate_queue
from mimatrix.cli.network.topology import topology
from mimatrix.cli.train.demo.command import demo
from mimatrix.cli.train.export import export
from mimatrix.cli.train.plan import plan
from mimatrix.cli.train.profile import profile
from mimatrix.cli.train.run import run
from mimatrix.core.errors import MiMatrixError, UserError

app = typer.Typer(
    name="mimatrix",
    help="Train PyTorch models on clusters whose machines are not alike.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
# What follows the script is the script's own, options included.
_before_the_script = {"allow_interspersed_args": False}
app.command(context_settings=_before_the_script)(run)
app.command(context_settings=_before_the_script)(profile)
app.command()(plan)
app.command()(up)
for command in (submit, jobs, top, show, explain, logs, metrics, cancel, retry, priority, wait, nodes):
    app.command()(command)
app.add_typer(tokens, name="tokens")
app.command()(simulate)
app.command()(simulate_queue)
app.command()(topology)
app.command()(algorithms)
app.command()(bench)
app.command()(export)
app.add_typer(lab, name="lab")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mimatrix {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Train PyTorch models on clusters whose machines are not alike."""


def main() -> None:
    """Run the command: bad input ends with one sentence and exit code 2, never with a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="mimatrix")
    except UserError as error:
        _complain(error)
        sys.exit(2)
    except MiMatrixError as error:
        _complain(error)
        sys.exit(1)
    except BrokenPipeError:
        # The reader (`head`, say) has seen enough. Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        _complain(error)
        sys.exit(1)


def _complain(error: Exception) -> None:
    typer.echo(f"mimatrix: {error}", err=True)


if __name__ == "__main__":
    main()
