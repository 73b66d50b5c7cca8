"""How the workers of a job find each other: each asks the job server, and rank 0 tells it where it listens."""

import hmac
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from mimatrix.api.client import Client
from mimatrix.api.models import PROTOCOL, Rendezvous, RendezvousRequest
from mimatrix.api.torchrun_env import Place, torchrun_variables
from mimatrix.core import environment as env
from mimatrix.core.addresses import local_address
from mimatrix.core.errors import UserError, WorldError
from mimatrix.processes.ports import free_port

logger = logging.getLogger(__name__)
_DEADLINE_S = 300.0
_PAUSE_S = 0.1
_MAX_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Which worker of which job this process is, as its launcher says."""

    server: str
    token: str
    job: int
    generation: int
    rank: int
    rejoins: int = 0
    """How many times its group was lost and restarted."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> "WorkerIdentity":
        """Read the identity from environment variables.

        Raises:
            UserError: A variable is missing or not a number.
        """
        for variable in (env.SERVER, env.TOKEN, env.JOB, env.GENERATION, env.RANK):
            if not variable.get(environ):
                raise UserError(
                    f"{variable.name} is not set, but workers are started by a job server; use mimatrix submit"
                )
        try:
            return cls(
                server=env.SERVER.get(environ),
                token=env.TOKEN.get(environ),
                job=int(env.JOB.get(environ)),
                generation=int(env.GENERATION.get(environ)),
                rank=int(env.RANK.get(environ)),
                rejoins=int(env.REJOINS.get(environ, "0")),
            )
        except ValueError as error:
            raise UserError(
                f"the variables of this worker are damaged ({error}); start it with mimatrix submit"
            ) from None


def take_token(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with the token, which the launcher has put into a pipe; it can be read only once.

    Raises:
        UserError: The pipe is gone.
    """
    known, descriptor = dict(environ), env.TOKEN_FD.get(environ)
    if descriptor:
        try:
            with os.fdopen(int(descriptor), encoding="utf-8") as pipe:
                known[env.TOKEN.name] = pipe.read()
        except (OSError, ValueError) as error:
            raise UserError(
                f"the token of this worker cannot be read ({error}); start it with mimatrix submit"
            ) from None
    return known


def join(client: Client, identity: WorkerIdentity) -> Rendezvous:
    """Return where all ranks meet; retry until rank 0 has joined, also while the server does not answer.

    Raises:
        WorldError: Rank 0 did not join before the deadline, or the server did not answer.
    """
    address, port = own_address(identity.server), 0
    if identity.rank == 0:
        port = free_port(address)
    request = RendezvousRequest(
        protocol=PROTOCOL, generation=identity.generation, rank=identity.rank, address=address, port=port
    )
    deadline, problem = time.monotonic() + _DEADLINE_S, "rank 0 has not joined"
    pause = _PAUSE_S
    while time.monotonic() < deadline:
        try:
            joined = client.join(identity.job, request)
            if joined.master_port or identity.rejoins:
                return joined  # a worker that rejoins does not need rank 0, which may be gone
        except WorldError as error:
            if problem != str(error):
                logger.warning("%s", error)
            problem = str(error)
        time.sleep(pause)
        pause = min(_MAX_PAUSE_S, 1.2 * pause)
    raise WorldError(
        f"rank {identity.rank} of job {identity.job} did not find its peers within {_DEADLINE_S:g} s: {problem}"
    )


def set_environment(joined: Rendezvous, identity: WorkerIdentity) -> None:
    """Set torchrun's variables, so that whatever runs in this process is one of the ranks."""
    address = joined.master_address or own_address(identity.server)
    place = Place(identity.rank, joined.ranks, joined.local_rank, joined.local_ranks, address, joined.master_port)
    restarts = identity.generation - 1 + identity.rejoins
    os.environ.update(torchrun_variables(place, f"job-{identity.job}", restarts, 0))
    os.environ[env.JOB_SECRET.name] = _job_secret(identity)


def _job_secret(identity: WorkerIdentity) -> str:
    """Return what all workers of this generation share, and what does not reveal the token of the job server."""
    message = f"secret of job {identity.job}, generation {identity.generation}"
    return hmac.new(identity.token.encode(), message.encode(), "sha256").hexdigest()


def own_address(server: str) -> str:
    """Return the address of the interface by which this machine reaches the server."""
    parts = urlsplit(server)
    try:
        return local_address(parts.hostname or "localhost", parts.port or 80)
    except OSError as error:
        raise WorldError(f"the job server at {server} cannot be reached ({error}); check the network") from None
