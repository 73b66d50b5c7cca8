"""`mimatrix up`: the job server, with what starts processes on this machine."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from mimatrix.core.errors import UserError


def up(
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65_535, help="On which port.")] = 7700,
    data: Annotated[
        Path | None, typer.Option(help="Where everything is kept. [default: ~/.local/share/mimatrix]")
    ] = None,
    database: Annotated[
        str, typer.Option(help="postgresql://user@host/name; without, SQLite in the data folder.")
    ] = "",
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, PEM.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond this machine without TLS.")] = False,
    python: Annotated[str, typer.Option(help="The Python that jobs run under; it needs MiMatrix.")] = sys.executable,
    run_as: Annotated[str, typer.Option(help="The user that jobs run as; needs root.")] = "",
    advertise: Annotated[str, typer.Option(help="The address that clients and workers use, where it is another.")] = "",
    devices: Annotated[
        int | None, typer.Option(min=1, max=4096, help="CPU devices of this machine; without, one a core.")
    ] = None,
) -> None:
    """Serve jobs on this machine: queue, devices, logs, state in a folder. Stop it with Ctrl-C; jobs go on.

    Example: mimatrix up
    """
    try:
        from mimatrix.server import Settings, serve
    except ModuleNotFoundError as error:
        raise UserError(f"the server needs {error.name}; install it: pip install 'mimatrix[server]'") from None
    from mimatrix.launch import LocalLauncher, cores
    from mimatrix.wire.client import data_folder

    folder = (data or data_folder()).absolute()
    settings = Settings(folder, host, port, database, tls_cert, tls_key, insecure, python, run_as, advertise)
    facts = cores(devices) if devices else None
    serve(settings, lambda place: LocalLauncher(place / "launcher", devices=facts), _say)


def _say(sentence: str) -> None:
    sys.stderr.write(f"mimatrix: {sentence}\n")
    sys.stderr.flush()
