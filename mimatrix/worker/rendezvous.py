"""Finding the others: every worker asks the server, and rank 0 says where it is."""

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from mimatrix.core import environment as env
from mimatrix.core.errors import UserError, WorldError
from mimatrix.wire.client import Client
from mimatrix.wire.messages import PROTOCOL, Join, Joined
from mimatrix.wire.torchrun import Place, torchrun_variables
from mimatrix.worker.ports import free_port

_DEADLINE_S = 300.0
_PAUSE_S = 0.1
_LONGER_S = 2.0


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """To which job a worker belongs, as whoever started it says."""

    server: str
    token: str
    job: int
    generation: int
    rank: int
    returns: int = 0
    """How often its group was lost and started again."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> "WorkerIdentity":
        """From the environment."""
        try:
            job, generation, rank = (int(environ[each.name]) for each in (env.JOB, env.GENERATION, env.RANK))
            returns = int(env.REJOINS.get(environ, "0"))
            return cls(environ[env.SERVER.name], environ[env.TOKEN.name], job, generation, rank, returns)
        except (KeyError, ValueError) as error:
            raise UserError(
                f"this is started by a job server, and not by hand ({error} is missing); use mimatrix submit"
            ) from None


def join(client: Client, mine: WorkerIdentity, say: Callable[[str], None]) -> Joined:
    """Where all ranks meet. A server that does not answer is asked again, until the deadline."""
    address, port = own_address(mine.server), 0
    if mine.rank == 0:
        port = free_port(address)
    said = Join(protocol=PROTOCOL, generation=mine.generation, rank=mine.rank, address=address, port=port)
    deadline, last = time.monotonic() + _DEADLINE_S, "rank 0 has not come"
    pause = _PAUSE_S
    while time.monotonic() < deadline:
        try:
            found = client.join(mine.job, said)
            if found.master_port or mine.returns:
                return found  # who returns needs no rank 0, which may be gone
        except WorldError as error:
            if last != str(error):
                say(str(error))
            last = str(error)
        time.sleep(pause)
        pause = min(_LONGER_S, 1.2 * pause)
    raise WorldError(f"rank {mine.rank} of job {mine.job} found no others within {_DEADLINE_S:g} s: {last}")


def enter(joined: Joined, mine: WorkerIdentity) -> None:
    """Make this process one of the ranks, for whatever runs in it."""
    address = joined.master_address or own_address(mine.server)
    place = Place(mine.rank, joined.ranks, joined.local_rank, joined.local_ranks, address, joined.master_port)
    os.environ.update(torchrun_variables(place, f"job-{mine.job}", mine.generation - 1 + mine.returns, 0))


def own_address(server: str) -> str:
    """Of the interface by which this machine reaches the server; a datagram socket that sends nothing knows."""
    parts = urlsplit(server)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
        family, kind, _, _, where = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WorldError(f"there is no way to the job server at {server} ({error}); look at the network") from None
