"""The connection to the job server, and options that commands about jobs share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from mimatrix.core.errors import UserError

if TYPE_CHECKING:
    from mimatrix.api.client import Client

Number = Annotated[int, typer.Argument(min=1, metavar="JOB", help="Number of the job, as in `mimatrix jobs`.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def connected() -> Iterator["Client"]:
    """Yield a client of the server that the environment names, or that this user runs."""
    try:
        from mimatrix.api.client import Client, find_server
    except ModuleNotFoundError as error:
        raise UserError(f"this needs {error.name}; install it: pip install 'mimatrix[server]'") from None
    with Client(*find_server()) as client:
        yield client
