"""How the ranks of a job find their coordinator, which rank 0 starts, and with which token they greet it."""

import json
import secrets
from dataclasses import asdict

from mimatrix.comm.addresses import HostAddress, choose_address
from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.control.coordinator_process import CoordinatorProcess, start_coordinator
from mimatrix.comm.control.job_store import Store
from mimatrix.comm.control.liveness import silence_limit
from mimatrix.core import environment
from mimatrix.core.errors import UserError

_KEY = "mimatrix/coordinator"


def connect_to_coordinator(
    store: Store, rank: int, world_size: int, own: HostAddress, generation: int
) -> tuple[CoordinatorProcess | None, ControlClient]:
    """Return this rank's connection to the coordinator, and on rank 0 the process. A collective.

    Args:
        store: The same on all ranks. It may be one that strangers read: with MIMATRIX_JOB_SECRET nothing secret is
            written to it.
        rank: This rank; rank 0 starts the coordinator.
        world_size: The number of ranks.
        own: Host and address of this rank.
        generation: How many times the job was restarted.
    """
    store.set(f"mimatrix/endpoint/{rank}", json.dumps(asdict(own)))
    ranks = [HostAddress(**json.loads(store.get(f"mimatrix/endpoint/{peer}"))) for peer in range(world_size)]
    process: CoordinatorProcess | None = None
    secret = environment.JOB_SECRET.get()
    if rank == 0:
        published = "" if secret else secrets.token_hex(32)
        address = choose_address(ranks, rank)
        process = start_coordinator(address, generation, secret or published, world_size)
        store.set(_KEY, json.dumps([address, process.port, published]))
    address, port, published = json.loads(store.get(_KEY))
    if not (token := published or secret):
        raise UserError(
            f"rank 0 has {environment.JOB_SECRET.name}, and rank {rank} has not; set it on all ranks, or on none"
        )
    hosts = [place.host for place in ranks]
    return process, ControlClient.connect(rank, hosts, address, port, generation, token, silence_s=silence_limit())
