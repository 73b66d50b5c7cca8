"""`mimatrix up`: run the job server, with a launcher for this machine or for a Ray cluster."""

import logging
import os
import sys
from collections.abc import Callable
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mimatrix.core.errors import UserError
from mimatrix.core.logs import configure_logging
from mimatrix.core.units import parse_duration

if TYPE_CHECKING:
    from mimatrix.launch import Launcher

AUTO = "auto"
logger = logging.getLogger(__name__)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Machines(StrEnum):
    """Where jobs run."""

    LOCAL = "local"
    RAY = "ray"


def up(
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65_535, metavar="PORT", help="Port to listen on.")] = 7700,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Directory for all data.", show_default="~/.local/share/mimatrix"),
    ] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Directory for checkpoints, on a file system that all nodes share.",
            show_default="checkpoints in the data directory",
        ),
    ] = None,
    keep_checkpoints: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="How long checkpoints are kept after their job ended, e.g. 30d.",
            show_default="for good",
        ),
    ] = "",
    database: Annotated[
        str,
        typer.Option(
            metavar="URL", help="Database, e.g. postgresql://user@host/name.", show_default="SQLite in the data folder"
        ),
    ] = "",
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="TLS certificate, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Key of the certificate, PEM.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Accept connections from other machines without TLS.")
    ] = False,
    python: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Python that runs jobs; MiMatrix must be installed there.",
            show_default="the one of this command",
        ),
    ] = sys.executable,
    run_as: Annotated[str, typer.Option(metavar="USER", help="User that jobs run as; needs root.")] = "",
    advertise: Annotated[
        str, typer.Option(metavar="URL", help="Address that clients and workers use, if it differs.")
    ] = "",
    trusted_proxies: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="Reverse proxies whose X-Forwarded-For header is used: addresses, comma-separated."
        ),
    ] = "",
    devices: Annotated[
        int | None,
        typer.Option(min=1, max=4096, metavar="N", help="CPU devices of this machine.", show_default="one per core"),
    ] = None,
    launcher: Annotated[Machines, typer.Option(help="Run jobs on this machine, or on a Ray cluster.")] = Machines.LOCAL,
    address: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Ray cluster, host:port, or auto: the cluster that this machine belongs to."
        ),
    ] = AUTO,
) -> None:
    """Run the job server in the foreground. Stop it with Ctrl-C; jobs keep running.

    Example: mimatrix up
    """
    try:
        from mimatrix.server import ServerSettings, serve
    except ModuleNotFoundError as error:
        raise UserError(f"the server needs {error.name}; install it: pip install 'mimatrix[server]'") from None
    from mimatrix.api.client import data_folder

    folder = (data or data_folder()).absolute()
    settings = ServerSettings(
        data=folder,
        host=host,
        port=port,
        database=database,
        checkpoints=checkpoints.absolute() if checkpoints else None,
        checkpoints_s=parse_duration(keep_checkpoints) if keep_checkpoints else None,
        tls_cert=tls_cert,
        tls_key=tls_key,
        insecure=insecure,
        python=python,
        run_as=run_as,
        advertise=advertise,
        trusted_proxies=trusted_proxies,
    )
    configure_logging()
    make = _local_launcher(devices, address) if launcher is Machines.LOCAL else _ray_launcher(devices, address)
    if launcher is Machines.RAY and not advertise and host in _LOOPBACK:
        logger.warning("workers on other machines cannot reach %s; if there are any, give --host or --advertise", host)
    serve(settings, make)


def _local_launcher(devices: int | None, address: str) -> "Callable[[Path], Launcher]":
    if address != AUTO:
        raise UserError(f'"{address}" is the address of a Ray cluster; give --launcher ray as well, or leave it out')
    from mimatrix.launch import LocalLauncher, cores

    facts = cores(devices) if devices else None
    return lambda data: LocalLauncher(data / "launcher", devices=facts)


def _ray_launcher(devices: int | None, address: str) -> "Callable[[Path], Launcher]":
    if devices:
        raise UserError("--devices is for this machine alone; on Ray give nodes the label mimatrix.devices instead")
    if find_spec("ray") is None:
        raise UserError("the launcher needs ray; install it on all machines: pip install 'mimatrix[ray]'")
    from mimatrix.launch import RayLauncher, ray_environment

    def made(data: Path) -> "Launcher":
        folder = data / "ray"
        return RayLauncher(folder, address, ray_environment(folder, os.environ))

    return made
