"""`mimatrix up`: the job server, with what starts processes on this machine or on those of a Ray cluster."""

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
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65_535, help="On which port.")] = 7700,
    data: Annotated[
        Path | None, typer.Option(help="Where everything is kept. [default: ~/.local/share/mimatrix]")
    ] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            help="Directory for checkpoints, on a file system that all nodes share.",
            show_default="checkpoints in the data directory",
        ),
    ] = None,
    database: Annotated[
        str, typer.Option(help="postgresql://user@host/name; without, SQLite in the data folder.")
    ] = "",
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, PEM.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond this machine without TLS.")] = False,
    python: Annotated[str, typer.Option(help="The Python that jobs run under; it needs MiMatrix.")] = sys.executable,
    run_as: Annotated[str, typer.Option(help="The user that jobs run as; needs root.")] = "",
    trusted_proxies: Annotated[
        str, typer.Option(help="Addresses of reverse proxies whose X-Forwarded-For header is used, comma-separated.")
    ] = "",
    advertise: Annotated[str, typer.Option(help="The address that clients and workers use, where it is another.")] = "",
    devices: Annotated[
        int | None, typer.Option(min=1, max=4096, help="CPU devices of this machine; without, one a core.")
    ] = None,
    launcher: Annotated[
        Machines, typer.Option(help="Where jobs run: on this machine, or on those of a Ray cluster.")
    ] = Machines.LOCAL,
    address: Annotated[
        str, typer.Option(help="Of the Ray cluster, host:port; auto: the one that this machine belongs to.")
    ] = AUTO,
) -> None:
    """Serve jobs on this machine: queue, devices, logs, state in a folder. Stop it with Ctrl-C; jobs continue.

    Example: mimatrix up
    """
    try:
        from mimatrix.server import Settings, serve
    except ModuleNotFoundError as error:
        raise UserError(f"the server needs {error.name}; install it: pip install 'mimatrix[server]'") from None
    from mimatrix.api.client import data_folder

    folder = (data or data_folder()).absolute()
    settings = Settings(
        data=folder,
        host=host,
        port=port,
        database=database,
        checkpoints=checkpoints.absolute() if checkpoints else None,
        tls_cert=tls_cert,
        tls_key=tls_key,
        insecure=insecure,
        python=python,
        run_as=run_as,
        advertise=advertise,
        trusted_proxies=trusted_proxies,
    )
    configure_logging()
    make = _on_this_machine(devices, address) if launcher is Machines.LOCAL else _on_ray(devices, address)
    if launcher is Machines.RAY and not advertise and host in _LOOPBACK:
        logger.warning("workers on other machines cannot reach %s; if there are any, give --host or --advertise", host)
    serve(settings, make)


def _on_this_machine(devices: int | None, address: str) -> "Callable[[Path], Launcher]":
    if address != AUTO:
        raise UserError(f'"{address}" is the address of a Ray cluster; give --launcher ray as well, or leave it out')
    from mimatrix.launch import LocalLauncher, cores

    facts = cores(devices) if devices else None
    return lambda data: LocalLauncher(data / "launcher", devices=facts)


def _on_ray(devices: int | None, address: str) -> "Callable[[Path], Launcher]":
    if devices:
        raise UserError("--devices is for this machine alone; on Ray give nodes the label mimatrix.devices instead")
    if find_spec("ray") is None:
        raise UserError("the launcher needs ray; install it on all machines: pip install 'mimatrix[ray]'")
    from mimatrix.launch import RayLauncher, ray_environment

    def made(data: Path) -> "Launcher":
        folder = data / "ray"
        return RayLauncher(folder, address, ray_environment(folder, os.environ))

    return made
